from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from sandbox_server.agent.inslot import child
from tests.unit.agent.inslot.asking import Slot, limit_memory


def test_a_file_comes_as_it_is_whatever_its_bytes(slot: Slot) -> None:
    data = bytes(range(256)) * 1000
    (slot.workspace / "a").write_bytes(data)
    answer = slot.ask("read_file", path="a")
    assert answer.body == data
    assert answer.header == {"ok": True, "size_bytes": len(data), "more": False}


@pytest.mark.parametrize(
    ("offset", "limit", "wanted", "more"),
    [
        (None, None, b"one\ntwo\nthree", False),
        (0, 1, b"one\n", True),
        (1, 1, b"two\n", True),
        (1, None, b"two\nthree", False),
        (2, 1, b"three", False),
        (0, 3, b"one\ntwo\nthree", False),
        (2, 50, b"three", False),
    ],
)
def test_offset_skips_lines_and_limit_counts_them(slot: Slot, offset: int | None, limit: int | None, wanted: bytes, more: bool) -> None:
    (slot.workspace / "a").write_bytes(b"one\ntwo\nthree")
    answer = slot.ask("read_file", path="a", offset=offset, limit=limit)
    assert answer.body == wanted
    assert answer.header["more"] is more


@pytest.mark.parametrize("data", [b"one\ntwo\nthree", b"one\ntwo\nthree\n"])
def test_an_offset_past_the_end_says_how_many_lines_there_are(slot: Slot, data: bytes) -> None:
    (slot.workspace / "a").write_bytes(data)
    answer = slot.ask("read_file", path="a", offset=3)
    assert answer.refused == ("tool_error", None)
    assert "has 3 lines" in answer.detail
    assert "has 3 lines" in slot.ask("read_file", path="a", offset=100).detail


def test_lines_are_counted_across_chunks(slot: Slot) -> None:
    lines = [b"%07d" % number + b"x" * (number % 97) + b"\n" for number in range(50_000)]
    (slot.workspace / "a").write_bytes(b"".join(lines))
    answer = slot.ask("read_file", path="a", offset=30_000, limit=12_345)
    assert answer.body == b"".join(lines[30_000:42_345])


def test_an_empty_file_is_empty(slot: Slot) -> None:
    (slot.workspace / "a").touch()
    assert slot.ask("read_file", path="a").body == b""
    assert slot.ask("read_file", path="a", offset=0, limit=5).body == b""


def test_a_huge_line_and_a_sparse_file_take_no_memory(slot: Slot) -> None:
    with open(slot.workspace / "sparse", "wb") as file:
        file.truncate(64 << 20)  # one line, and eight times the memory
    answer = slot.ask("read_file", before=lambda: limit_memory(8 << 20), path="sparse", offset=0, limit=2)
    assert len(answer.body) == 64 << 20


def test_relative_paths_start_in_the_workspace_and_a_tilde_is_home(slot: Slot) -> None:
    (slot.workspace / "a").write_text("here")
    for path in ("a", "./a", "~/a", str(slot.workspace / "a"), "sub/../a"):
        (slot.workspace / "sub").mkdir(exist_ok=True)
        assert slot.ask("read_file", path=path).text == "here"


def test_tools_see_what_the_slot_sees_and_follow_symlinks(slot: Slot) -> None:
    (slot.outside / "a").write_text("outside")
    (slot.workspace / "link").symlink_to(slot.outside / "a")
    assert slot.ask("read_file", path="link").text == "outside"


def test_what_is_no_regular_file_is_refused_by_its_kind_and_never_blocks(slot: Slot) -> None:
    os.mkfifo(slot.workspace / "fifo")
    (slot.workspace / "to-fifo").symlink_to("fifo")
    (slot.workspace / "folder").mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(slot.workspace / "socket"))
        for path, kind in (("fifo", "a FIFO"), ("to-fifo", "a FIFO"), ("folder", "a folder"), ("socket", "a socket"), ("/dev/zero", "a device")):
            answer = slot.ask("read_file", path=path)
            assert answer.refused[0] == "tool_error"
            assert kind in answer.detail
            assert path in answer.detail


def test_errors_name_the_path(slot: Slot) -> None:
    (slot.workspace / "file").touch()
    (slot.workspace / "loop").symlink_to("loop")
    wanted = {"missing": "ENOENT", "file/below": "ENOTDIR", "loop": "ELOOP", "x" * 300: "ENAMETOOLONG"}
    for path, name in wanted.items():
        answer = slot.ask("read_file", path=path)
        assert answer.refused == ("tool_error", name)
        assert path[:100] in answer.detail


def test_no_permission_is_said(nobody: Slot) -> None:
    secret = nobody.outside / "secret"
    secret.write_text("x")
    secret.chmod(0)
    answer = nobody.ask("read_file", path=str(secret))
    assert answer.refused == ("tool_error", "EACCES")
    assert answer.detail == f"permission denied: {secret}"


def test_names_that_are_not_utf8_work_both_ways(slot: Slot) -> None:
    path = os.fsencode(slot.workspace) + b"/caf\xe9\nx"
    Path(os.fsdecode(path)).write_text("strange")
    assert slot.ask("read_file", path="caf\udce9\nx").text == "strange"
    assert "$'caf\\xe9\\ny'" in slot.ask("read_file", path="caf\udce9\ny").detail.replace(str(slot.workspace) + "/", "")


def test_a_reader_that_goes_away_ends_the_child_with_a_status(slot: Slot) -> None:
    (slot.workspace / "a").write_bytes(b"x" * (1 << 20))
    out_r, out_w = os.pipe()
    os.close(out_r)
    with pytest.raises(SystemExit) as end:
        child.run_operation("read_file", {"path": "a"}, slot.ctx, out_w)
    os.close(out_w)
    assert end.value.code == child.EXIT_INCOMPLETE_REPLY
