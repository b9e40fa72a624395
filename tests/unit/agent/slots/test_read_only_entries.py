"""Entries of a workspace are examined before they become read-only: what they are, how much work they are, and which files have a second name."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from sandbox_server.agent.errors import Refused
from sandbox_server.agent.execution.slot_runtime import Dirs
from sandbox_server.agent.slots.read_only_entries import MAX_COPIED_BYTES, MAX_DEPTH, MAX_NAMES, check_names, find_entries, prepare_entries


@pytest.fixture
def dirs(tmp_path: Path) -> Dirs:
    (tmp_path / "workspace").mkdir()
    return Dirs(root=str(tmp_path), workspace=str(tmp_path / "workspace"), tmp=str(tmp_path))


@pytest.fixture
def workspace(dirs: Dirs) -> Path:
    return Path(dirs.workspace)


def test_an_entry_is_found_with_its_inode(dirs: Dirs, workspace: Path) -> None:
    (workspace / "tests").mkdir()
    (workspace / "file").touch()

    found = prepare_entries(dirs, ["tests", "file"])

    assert [(entry.name, entry.inode) for entry in found] == [(name, (workspace / name).stat().st_ino) for name in ("tests", "file")]
    assert found == find_entries(dirs, ["tests", "file"])


def test_a_file_with_a_second_name_is_replaced_by_a_copy(dirs: Dirs, workspace: Path) -> None:
    folder = workspace / "tests" / "sub"
    folder.mkdir(parents=True)
    file, outside = folder / "a", workspace / "outside"
    file.write_text("content")
    file.chmod(0o6751)
    os.utime(file, ns=(1_000_000_000, 2_000_000_000))
    os.utime(folder, ns=(3_000_000_000, 4_000_000_000))
    os.link(file, outside)
    folder.chmod(0o555)
    os.utime(folder, ns=(3_000_000_000, 4_000_000_000))

    prepare_entries(dirs, ["tests"])
    outside.write_text("changed")

    info = file.stat()
    assert file.read_text() == "content"
    assert (info.st_nlink, stat.S_IMODE(info.st_mode), info.st_mtime_ns) == (1, 0o751, 2_000_000_000)
    assert (stat.S_IMODE(folder.stat().st_mode), folder.stat().st_mtime_ns) == (0o555, 4_000_000_000)
    assert os.listdir(folder) == ["a"]


def test_names_inside_of_an_entry_are_separated_too(dirs: Dirs, workspace: Path) -> None:
    (workspace / "one").write_text("x")
    os.link(workspace / "one", workspace / "two")

    prepare_entries(dirs, ["one", "two"])

    assert [(workspace / name).stat().st_nlink for name in ("one", "two")] == [1, 1]


def test_a_large_file_with_one_name_is_not_copied(dirs: Dirs, workspace: Path) -> None:
    (workspace / "data").mkdir()
    large = workspace / "data" / "large"
    large.touch()
    os.truncate(large, 100 << 30)
    before = large.stat()

    prepare_entries(dirs, ["data"])

    assert (large.stat().st_ino, large.stat().st_blocks) == (before.st_ino, before.st_blocks)


def test_large_files_with_second_names_are_refused(dirs: Dirs, workspace: Path) -> None:
    (workspace / "data").mkdir()
    large = workspace / "data" / "large"
    large.touch()
    os.truncate(large, MAX_COPIED_BYTES + 1)
    os.link(large, workspace / "other")

    with pytest.raises(Refused, match="'data/large' has more than one name"):
        prepare_entries(dirs, ["data"])
    assert sorted(os.listdir(workspace / "data")) == ["large"]


def test_a_tree_that_is_too_deep_is_refused(dirs: Dirs, workspace: Path) -> None:
    (workspace / "/".join(["deep"] * (MAX_DEPTH + 1))).mkdir(parents=True)

    with pytest.raises(Refused, match=f"more than {MAX_DEPTH} folders deep"):
        prepare_entries(dirs, ["deep"])


def test_a_tree_with_too_many_files_is_refused(dirs: Dirs, workspace: Path) -> None:
    (workspace / "many").mkdir()
    for number in range(11):
        (workspace / "many" / str(number)).touch()

    with pytest.raises(Refused, match="more than 10 files; 'many' was not examined"):
        prepare_entries(dirs, ["many"], max_files=10)


@pytest.mark.parametrize(("kind", "word"), [("link", "symbolic link"), ("fifo", "neither a regular file nor a folder"), ("missing", "no entry 'missing'")])
def test_what_is_neither_file_nor_folder_is_refused_by_name(dirs: Dirs, workspace: Path, kind: str, word: str) -> None:
    (workspace / "link").symlink_to("/etc")
    os.mkfifo(workspace / "fifo")

    with pytest.raises(Refused, match=word) as refused:
        prepare_entries(dirs, [kind])
    assert kind in refused.value.detail


def test_a_workspace_that_was_replaced_by_a_link_is_refused(dirs: Dirs, workspace: Path) -> None:
    workspace.rmdir()
    workspace.symlink_to("/etc")

    with pytest.raises(Refused, match="the workspace is no folder"):
        find_entries(dirs, ["passwd"])


@pytest.mark.parametrize("names", ["tests", [""], ["."], [".."], ["a/b"], ["/etc"], ["a\0b"], ["x" * 256], ["ä" * 128], [1], [None], ["x"] * (MAX_NAMES + 1)])
def test_what_is_no_list_of_names_is_refused(names: object) -> None:
    with pytest.raises(Refused) as refused:
        check_names(names)
    assert refused.value.code == "invalid"


def test_each_name_counts_once() -> None:
    assert check_names(["b", "a", "b"]) == ("b", "a")
