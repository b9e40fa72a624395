"""The recent output of a terminal."""

from __future__ import annotations

from sandbox_server.agent.execution.terminals.scrollback import Scrollback


def test_only_the_last_bytes_are_kept_and_offsets_go_on() -> None:
    scrollback = Scrollback(10)
    for _ in range(5):
        scrollback.append(b"abc\n")

    assert (scrollback.start, scrollback.end) == (10, 20)
    assert scrollback.read(scrollback.start, 100) == b"c\nabc\nabc\n"
    assert scrollback.read(18, 1) == b"c"
    assert scrollback.read(20, 100) == b""


def test_a_replay_begins_with_the_output_or_with_a_line() -> None:
    scrollback = Scrollback(10)
    scrollback.append(b"ab\ncd\n")
    assert scrollback.find_replay_offset(100) == 0
    assert scrollback.find_replay_offset(5) == 3
    scrollback.append(b"ef\ngh\n")

    assert scrollback.read(scrollback.find_replay_offset(100), 100) == b"cd\nef\ngh\n"


def test_a_replay_without_a_line_end_begins_anywhere() -> None:
    scrollback = Scrollback(10)
    scrollback.append(b"x" * 25)

    assert scrollback.find_replay_offset(4) == 21
