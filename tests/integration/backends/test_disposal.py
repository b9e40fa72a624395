"""Folders of sandboxes that are gone are deleted by a process of its own."""

from __future__ import annotations

import os
from pathlib import Path

from sandbox_server.backends.disposal import delete_folders, delete_leftovers


async def test_folders_are_gone_at_once_and_deleted_behind(tmp_path: Path) -> None:
    folder, aside = tmp_path / "sandboxes" / "s-1", tmp_path / "trash"
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "deep" / "file").write_text("x")
    (folder / "locked").mkdir(mode=0o000)
    (folder / "link").symlink_to(tmp_path)

    await delete_folders([str(folder), str(tmp_path / "never-there")], aside, within_s=30)

    assert not folder.exists()
    assert list(aside.iterdir()) == []
    assert tmp_path.exists()


async def test_nobody_waits_for_a_long_deletion(tmp_path: Path) -> None:
    folder, aside = tmp_path / "s-1", tmp_path / "trash"
    folder.mkdir()
    for number in range(2000):
        (folder / str(number)).touch()

    await delete_folders([str(folder)], aside, within_s=0)

    assert not folder.exists()
    await delete_leftovers(aside, within_s=30)
    assert list(aside.iterdir()) == []


async def test_what_an_earlier_life_moved_aside_is_swept(tmp_path: Path) -> None:
    aside = tmp_path / "trash"
    (aside / "s-old.1234").mkdir(parents=True)
    (aside / "s-old.1234" / "file").write_text("x")

    await delete_leftovers(aside, within_s=30)

    assert os.listdir(aside) == []


async def test_without_leftovers_nothing_is_deleted(tmp_path: Path) -> None:
    await delete_leftovers(tmp_path / "none", within_s=1)

    assert not (tmp_path / "none").exists()
