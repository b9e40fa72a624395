"""Deleting whatever a slot has made."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from sandbox_server.agent.kernel.trash import Trash, delete_tree


def test_a_deep_tree_goes(tmp_path: Path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    fd = os.open(top, os.O_RDONLY)
    for _ in range(1100):  # deeper than a recursion goes, and with such names, than a path may be
        os.mkdir("deep", dir_fd=fd)
        below = os.open("deep", os.O_RDONLY | os.O_DIRECTORY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)

    delete_tree(str(top))

    assert not top.exists()


def test_a_wide_tree_goes(tmp_path: Path) -> None:
    top = tmp_path / "top"
    for number in range(1200):  # more than are deleted in one batch
        (top / str(number)).mkdir(parents=True)
        (top / str(number) / "file").touch()

    delete_tree(str(top))

    assert not top.exists()


def test_folders_without_permissions_go(tmp_path: Path) -> None:
    inner = tmp_path / "top" / "a" / "b" / "c"
    inner.mkdir(parents=True)
    (inner / "file").touch()
    for path in (inner, inner.parent, inner.parent.parent):
        path.chmod(0)

    delete_tree(str(tmp_path / "top"))

    assert not (tmp_path / "top").exists()


def test_links_are_not_followed_and_names_like_our_own_do_not_stop_it(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    top = tmp_path / "top"
    (top / "x" / ".d0" / "y").mkdir(parents=True)
    for number in range(5):
        (top / f".d{number}").mkdir()
        (top / f".d{number}" / "file").touch()
    (top / "link").symlink_to(outside)
    (top / "x" / "link").symlink_to(outside, target_is_directory=True)
    os.mkfifo(top / "x" / "fifo")

    delete_tree(str(top))

    assert not top.exists()
    assert (outside / "kept").exists()


def test_a_missing_tree_is_fine(tmp_path: Path) -> None:
    delete_tree(str(tmp_path / "nowhere"))


def test_trash_takes_away_at_once_deletes_behind_and_finishes_what_was_left(tmp_path: Path) -> None:
    (tmp_path / "trash" / "left" / "over").mkdir(parents=True)
    (tmp_path / "thing" / "inside").mkdir(parents=True)
    errors: list[str] = []
    trash = Trash(str(tmp_path / "trash"), lambda path, error: errors.append(path))
    trash.discard_folder(str(tmp_path / "thing"))
    trash.discard_folder(str(tmp_path / "nowhere"))

    assert not (tmp_path / "thing").exists()
    trash.end_thread()
    assert trash.wait_for_thread(10)
    assert os.listdir(tmp_path / "trash") == []
    assert errors == []
    assert threading.active_count() >= 1
