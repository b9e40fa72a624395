from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import pytest

from sandbox_server.agent.inslot.walk import walk
from tests.unit.agent.inslot.asking import DEPTH, NAME, Slot, allow_few_descriptors, limit_memory, make_deep


@pytest.fixture
def tree(slot: Slot) -> Slot:
    (slot.workspace / "src/pkg").mkdir(parents=True)
    (slot.workspace / "src/a.py").write_text("import os\nfoo = 1\n")
    (slot.workspace / "src/pkg/b.py").write_text("foo()\r\nbar\r\n")
    (slot.workspace / "src/pkg/b.ts").write_text("foo")
    (slot.workspace / "binary").write_bytes(b"foo\0bar\n")
    (slot.workspace / "link").symlink_to("src")
    os.mkfifo(slot.workspace / "fifo")
    return slot


def test_a_folder_is_listed_a_line_an_entry(tree: Slot) -> None:
    assert tree.ask("list_files").text == "binary\nfifo\nlink -> src\nsrc/\n"
    assert tree.ask("list_files", path="src").text == "a.py\npkg/\n"
    assert tree.ask("list_files", path="link").text == "a.py\npkg/\n"


def test_a_tree_is_listed_without_following_symlinks(tree: Slot) -> None:
    answer = tree.ask("list_files", recursive=True)
    assert answer.text.splitlines() == ["binary", "fifo", "link -> src", "src/", "src/a.py", "src/pkg/", "src/pkg/b.py", "src/pkg/b.ts"]
    assert answer.header == {"ok": True, "entries": 8, "truncated": False, "unreadable": 0}


def test_a_cut_listing_says_so(tree: Slot) -> None:
    answer = tree.ask("list_files", recursive=True, max_entries=3)
    assert answer.text.splitlines() == ["binary", "fifo", "link -> src", "[cut after 3 lines: there are more; list a folder below, or raise max_entries]"]
    assert answer.header["truncated"] is True
    assert tree.ask("list_files", recursive=True, max_entries=8).header["truncated"] is False


def test_an_empty_folder_and_what_is_no_folder(tree: Slot) -> None:
    (tree.workspace / "empty").mkdir()
    assert "is empty" in tree.ask("list_files", path="empty").text
    assert tree.ask("list_files", path="binary").refused == ("tool_error", "ENOTDIR")
    assert tree.ask("list_files", path="fifo").refused == ("tool_error", "ENOTDIR")
    assert tree.ask("list_files", path="missing").refused == ("tool_error", "ENOENT")


def test_strange_names_are_quoted_the_way_bash_reads_them(slot: Slot) -> None:
    for name in (b"new\nline", b"caf\xe9", b"quo'te\t", "größe".encode(), b"back\\slash"):
        Path(os.fsdecode(os.fsencode(slot.workspace) + b"/" + name)).touch()
    assert slot.ask("list_files").text.splitlines() == ["back\\slash", "$'caf\\xe9'", "größe", "$'new\\nline'", "$'quo\\'te\\t'"]


def test_an_enormous_folder_is_cut_in_little_memory(slot: Slot) -> None:
    fd = os.open(slot.workspace, os.O_RDONLY)
    for number in range(5_000):
        os.close(os.open(f"{number:06d}", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
    answer = slot.ask("list_files", max_entries=2)
    tracemalloc.start()
    entries = [entry.name for entry in walk(fd, False, _fail, at_most=3)]
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    os.close(fd)
    assert answer.text.splitlines()[:2] == ["000000", "000001"]
    assert entries == ["000000", "000001", "000002"]
    assert peak_bytes < 5_000 * 8  # a list of all names takes 8 bytes for each reference alone


def _fail(path: str, error: OSError) -> None:
    raise error


def test_trees_deeper_than_a_path_may_be(slot: Slot) -> None:
    make_deep(slot.workspace)
    answer = slot.ask("list_files", before=allow_few_descriptors, recursive=True, max_entries=5000)
    assert len(answer.text.splitlines()) == DEPTH + 1
    assert answer.text.endswith(f"/{NAME}/leaf\n")
    found = slot.ask("search_files", before=allow_few_descriptors, pattern="needle")
    assert found.text == f"{NAME}/" * DEPTH + "leaf:1:needle\n"


def test_folders_that_cannot_be_read_are_named(nobody: Slot) -> None:
    for name, mode in (("closed", 0), ("unsearchable", 0o444), ("open", 0o755)):
        (nobody.workspace / name).mkdir()
        (nobody.workspace / name / "x").write_text("needle")
        (nobody.workspace / name).chmod(mode)
        if nobody.uid is not None:
            os.chown(nobody.workspace / name, nobody.uid, nobody.uid)
    answer = nobody.ask("list_files", recursive=True)
    assert answer.text.splitlines() == ["closed/", "open/", "open/x", "unsearchable/", "[permission denied: closed]", "[permission denied: unsearchable]"]
    assert answer.header["unreadable"] == 2
    found = nobody.ask("search_files", pattern="needle")
    assert found.text.splitlines()[0] == "open/x:1:needle"
    assert found.header["unreadable"] == 2
    assert "could not be read" in found.text


def test_searching_gives_path_line_and_text(tree: Slot) -> None:
    answer = tree.ask("search_files", pattern=r"^foo\b")
    assert answer.text.splitlines() == ["src/a.py:2:foo = 1", "src/pkg/b.py:1:foo()", "src/pkg/b.ts:1:foo"]
    assert answer.header == {"ok": True, "matches": 3, "truncated": False, "files_searched": 3, "files_binary": 1, "unreadable": 0}
    assert tree.ask("search_files", pattern=r"bar$", path="src").text == "src/pkg/b.py:2:bar\r\n"
    assert tree.ask("search_files", pattern="foo", path="src/a.py").text == "src/a.py:2:foo = 1\n"
    assert tree.ask("search_files", pattern="nowhere").text == "[no match in 3 files]\n"


@pytest.mark.parametrize(
    ("glob", "wanted"),
    [
        ("*.py", ["src/a.py", "src/pkg/b.py"]),
        ("b.*", ["src/pkg/b.py", "src/pkg/b.ts"]),
        ("*.{ts,js}", ["src/pkg/b.ts"]),
        ("src/*.py", ["src/a.py"]),
        ("src/**/*.py", ["src/a.py", "src/pkg/b.py"]),
        ("**/b.py", ["src/pkg/b.py"]),
        ("src/**", ["src/a.py", "src/pkg/b.py", "src/pkg/b.ts"]),
        ("[!b].py", ["src/a.py"]),
        ("[ab].p?", ["src/a.py", "src/pkg/b.py"]),
        ("*.(py)", []),
        ("[", []),
        ("{a", []),
    ],
)
def test_globs(tree: Slot, glob: str, wanted: list[str]) -> None:
    lines = tree.ask("search_files", pattern="foo", glob=glob).text.splitlines()
    assert [line.split(":")[0] for line in lines if not line.startswith("[")] == wanted


def test_a_bad_pattern_is_an_argument_error(slot: Slot) -> None:
    answer = slot.ask("search_files", pattern="(")
    assert answer.refused[0] == "invalid_args"
    assert answer.detail.startswith("pattern is not a regular expression: ")
    assert slot.ask("search_files", pattern="x", glob="[b-a]").detail.startswith("glob is not")
    assert slot.ask("search_files", pattern="(" * 5000 + ")" * 5000).refused[0] == "invalid_args"


def test_matches_are_cut_with_a_note(slot: Slot) -> None:
    (slot.workspace / "a").write_text("x\n" * 500)
    answer = slot.ask("search_files", pattern="x")
    assert answer.header["matches"] == 100
    assert answer.text.splitlines()[-1].startswith("[cut after 100 matches")
    assert slot.ask("search_files", pattern="x", max_matches=500).header["truncated"] is False


def test_bytes_that_are_not_utf8_come_out_as_they_are(slot: Slot) -> None:
    (slot.workspace / "a").write_bytes(b"caf\xe9 x\n\xc3\xa9\n")
    assert slot.ask("search_files", pattern="x").body == b"a:1:caf\xe9 x\n"
    assert slot.ask("search_files", pattern="^é$").body == b"a:2:\xc3\xa9\n"


def test_line_numbers_hold_across_blocks_and_huge_lines(slot: Slot) -> None:
    with open(slot.workspace / "a", "wb") as file:
        file.write(b"filler line\n" * 50_000)
        file.write(b"y" * (10 << 20) + b"needle" + b"z" * 1000 + b"\n")
        file.write(b"needle\n")
    for pattern in ("needle", "needl[e]"):
        lines = slot.ask("search_files", before=lambda: limit_memory(8 << 20), pattern=pattern).text.splitlines()
        assert [line.split(":")[1] for line in lines] == ["50001", "50002"]
        assert len(lines[0]) < 500
        assert "needle" in lines[0]


def test_a_symlink_loop_and_a_fifo_hold_nothing_up(slot: Slot) -> None:
    (slot.workspace / "loop").symlink_to(".")
    os.mkfifo(slot.workspace / "fifo")
    (slot.workspace / "a").write_text("x")
    assert slot.ask("search_files", pattern="x").text == "a:1:x\n"
    assert slot.ask("search_files", pattern="x", path="fifo").refused == ("tool_error", "EINVAL")
    assert slot.ask("list_files", recursive=True).text == "a\nfifo\nloop -> .\n"
