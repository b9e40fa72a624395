"""Which folders of ended runtimes are kept for others, whatever their owner has done to them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox_server.agent.isolation.reuse.empty_folders import EmptyFolders
from tests.unit.agent.open_files import only_so_many_new_files

TMPFS = "/dev/shm"


@pytest.fixture
def tmpfs() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=TMPFS) as folder:
        yield Path(folder)


def test_folders_that_are_as_new_are_kept_and_get_another_path(tmp_path: Path) -> None:
    folders = EmptyFolders()
    first = folders.make_folders(str(tmp_path / "1"), None)
    inode = os.stat(first.workspace).st_ino

    assert folders.keep_folders(first)
    second = folders.make_folders(str(tmp_path / "2"), None)
    assert (second.root, os.stat(second.workspace).st_ino) == (str(tmp_path / "2"), inode)
    assert not (tmp_path / "1").exists()


def test_folders_with_more_attributes_than_the_kernel_lists_are_not_kept(tmpfs: Path) -> None:
    folders = EmptyFolders()
    dirs = folders.make_folders(str(tmpfs / "1"), None)
    for number in range(270):
        os.setxattr(dirs.workspace, f"user.{number:0245}", b"")
    with pytest.raises(OSError, match="too long"):
        os.listxattr(dirs.workspace)

    assert not folders.keep_folders(dirs)


def test_folders_that_cannot_be_examined_now_are_not_kept(tmp_path: Path) -> None:
    folders = EmptyFolders()
    dirs = folders.make_folders(str(tmp_path / "1"), None)
    with only_so_many_new_files(1):  # The folder can be opened, but its content cannot be listed.
        is_kept = folders.keep_folders(dirs)

    assert not is_kept


def test_folders_whose_first_state_cannot_be_read_are_used_but_not_kept(tmp_path: Path) -> None:
    folders = EmptyFolders()
    with only_so_many_new_files(0):
        dirs = folders.make_folders(str(tmp_path / "1"), None)

    assert sorted(os.listdir(dirs.root)) == ["tmp", "workspace"]
    assert not folders.keep_folders(dirs)


def test_nothing_is_left_of_folders_that_could_not_be_made(tmp_path: Path) -> None:
    folders = EmptyFolders()
    assert folders.keep_folders(folders.make_folders(str(tmp_path / "1"), None))
    with pytest.raises(FileNotFoundError):
        folders.make_folders(str(tmp_path / "missing" / "2"), None)

    assert list(tmp_path.iterdir()) == []
    assert folders._states == {}
    assert folders.make_folders(str(tmp_path / "3"), None).root == str(tmp_path / "3")


def test_nothing_is_remembered_of_folders_that_are_deleted(tmp_path: Path) -> None:
    folders = EmptyFolders()
    kept, filled, forgotten = (folders.make_folders(str(tmp_path / name), None) for name in ("1", "2", "3"))
    Path(filled.tmp, "file").touch()
    assert [folders.keep_folders(dirs) for dirs in (kept, filled)] == [True, False]
    for dirs in (kept, filled, forgotten):
        folders.forget_folders(dirs)

    assert not folders.keep_folders(forgotten)
    assert folders._states == {}
    assert os.path.samefile(folders.make_folders(str(tmp_path / "4"), None).root, tmp_path / "4")
    assert not (tmp_path / "1").exists()
