from __future__ import annotations

import os
import resource
import stat
from pathlib import Path

import pytest

from tests.unit.agent.inslot.asking import Slot, names_below


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_writing_makes_the_file_and_the_folders_above(slot: Slot) -> None:
    answer = slot.ask("write_file", path="a/b/c.txt", content="hällo\n")
    assert answer.text == f"made {slot.workspace}/a/b/c.txt (7 bytes)\n"
    assert answer.header["created"] is True
    assert (slot.workspace / "a/b/c.txt").read_text() == "hällo\n"
    assert mode_of(slot.workspace / "a/b/c.txt") == 0o644
    assert names_below(slot.workspace) == ["a", "a/b", "a/b/c.txt"]


def test_an_existing_file_keeps_its_mode_unless_one_is_given(slot: Slot) -> None:
    script = slot.workspace / "run"
    script.write_text("old and longer")
    script.chmod(0o755)
    assert slot.ask("write_file", path="run", content="new").text.startswith("wrote ")
    assert (script.read_text(), mode_of(script)) == ("new", 0o755)
    slot.ask("write_file", path="run", content="newer", mode="0600")
    assert (script.read_text(), mode_of(script)) == ("newer", 0o600)


def strict_umask() -> None:
    os.umask(0o077)


def test_the_umask_of_init_does_not_matter(slot: Slot) -> None:
    slot.ask("write_file", before=strict_umask, path="a", content="")
    assert mode_of(slot.workspace / "a") == 0o644


def test_writing_through_a_symlink_writes_its_target(slot: Slot) -> None:
    (slot.outside / "target").write_text("old")
    (slot.workspace / "link").symlink_to(slot.outside / "target")
    (slot.workspace / "dangling").symlink_to("not-yet/there")
    slot.ask("write_file", path="link", content="new")
    slot.ask("write_file", path="dangling", content="made")
    assert (slot.workspace / "link").is_symlink()
    assert (slot.outside / "target").read_text() == "new"
    assert (slot.workspace / "not-yet/there").read_text() == "made"


def test_what_cannot_be_a_file_is_refused(slot: Slot) -> None:
    os.mkfifo(slot.workspace / "fifo")
    (slot.workspace / "folder").mkdir()
    (slot.workspace / "file").touch()
    wanted = {"fifo": "EINVAL", "folder": "EISDIR", "folder/": "EISDIR", "new/": "EISDIR", "file/x": "ENOTDIR", ".": "EISDIR", "/dev/null": "EINVAL"}
    for path, name in wanted.items():
        assert slot.ask("write_file", path=path, content="x").refused == ("tool_error", name)
    assert names_below(slot.workspace) == ["fifo", "file", "folder"]


def test_a_write_protected_file_stays(nobody: Slot) -> None:
    nobody.ask("write_file", path="a", content="old", mode="0444")
    answer = nobody.ask("write_file", path="a", content="new")
    assert answer.refused == ("tool_error", "EACCES")
    assert "chmod" in answer.detail
    assert nobody.ask("edit_file", path="a", old="old", new="new").refused == ("tool_error", "EACCES")
    assert (nobody.workspace / "a").read_text() == "old"


def test_a_folder_without_permission_is_named(nobody: Slot) -> None:
    (nobody.workspace / "closed").mkdir()
    (nobody.workspace / "closed").chmod(0o555)
    assert nobody.ask("write_file", path="closed/a", content="x").refused == ("tool_error", "EACCES")


def test_the_largest_file_is_a_limit_that_is_told_and_nothing_is_left(slot: Slot) -> None:
    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    (slot.workspace / "a").write_text("old")
    answer = slot.ask("write_file", before=small_files, path="a", content="x" * (2 << 20))
    assert answer.refused == ("tool_error", "EFBIG")
    assert names_below(slot.workspace) == ["a"]
    assert (slot.workspace / "a").read_text() == "old"


def test_an_edit_replaces_one_text(slot: Slot) -> None:
    path = slot.workspace / "a.py"
    path.write_bytes(b"\xff one\ntwo\nthree\n")
    path.chmod(0o750)
    answer = slot.ask("edit_file", path="a.py", old="two", new="2\n2")
    assert answer.text == f"replaced 1 occurrence in {path} (line 2)\n"
    assert path.read_bytes() == b"\xff one\n2\n2\nthree\n"
    assert mode_of(path) == 0o750


def test_an_edit_must_be_found_and_unique(slot: Slot) -> None:
    path = slot.workspace / "a"
    path.write_text("x\nx\nyaay\n")
    answer = slot.ask("edit_file", path="a", old="x", new="y")
    assert answer.refused[0] == "tool_error"
    assert "found 2 times" in answer.detail
    assert "lines 1, 2" in answer.detail
    assert "found 0 times" in slot.ask("edit_file", path="a", old="z", new="y").detail
    path.write_text("aaa")
    assert "found 2 times" in slot.ask("edit_file", path="a", old="aa", new="b").detail
    assert path.read_text() == "aaa"


def test_replace_all_replaces_all(slot: Slot) -> None:
    path = slot.workspace / "a"
    path.write_text("x.x.x")
    answer = slot.ask("edit_file", path="a", old="x", new="", replace_all=True)
    assert answer.header["replacements"] == 3
    assert path.read_text() == ".."


def test_line_endings_are_kept(slot: Slot) -> None:
    path = slot.workspace / "dos"
    path.write_bytes(b"one\r\ntwo\r\nthree\r\n")
    slot.ask("edit_file", path="dos", old="one\ntwo\n", new="1\n2\n2b\n")
    assert path.read_bytes() == b"1\r\n2\r\n2b\r\nthree\r\n"
    slot.ask("edit_file", path="dos", old="three\r\n", new="3\r\n")
    assert path.read_bytes() == b"1\r\n2\r\n2b\r\n3\r\n"
    path.write_bytes(b"dos\r\nunix\n")
    slot.ask("edit_file", path="dos", old="unix\n", new="a\nb\n")
    assert path.read_bytes() == b"dos\r\na\nb\n"


def test_an_edit_through_a_symlink_keeps_the_symlink(slot: Slot) -> None:
    (slot.workspace / "a").write_text("old")
    (slot.workspace / "link").symlink_to("a")
    slot.ask("edit_file", path="link", old="old", new="new")
    assert (slot.workspace / "link").is_symlink()
    assert (slot.workspace / "a").read_text() == "new"


def test_an_edit_does_not_make_files_nor_read_huge_ones(slot: Slot) -> None:
    assert slot.ask("edit_file", path="a", old="x", new="y").refused == ("tool_error", "ENOENT")
    with open(slot.workspace / "large", "wb") as file:
        file.truncate(17 << 20)
    assert slot.ask("edit_file", path="large", old="x", new="y").refused == ("tool_error", "EFBIG")


@pytest.mark.parametrize("content", ["a\udce9b", "nul\0inside", ""])
def test_content_is_taken_as_it_is(slot: Slot, content: str) -> None:
    slot.ask("write_file", path="a", content=content)
    assert (slot.workspace / "a").read_bytes() == content.encode("utf-8", "surrogateescape")
