"""The parser of tmux's control mode, with what a hostile tmux may write."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sandbox_server.agent.execution.background_tasks import BackgroundTasks
from sandbox_server.agent.execution.tmux.control_mode import (
    MAX_CAPTURE_BYTES,
    MAX_LINE_BYTES,
    CaptureReply,
    ControlModeError,
    ControlModeParser,
    ShortReply,
)
from sandbox_server.agent.execution.tmux.tmux_process import TmuxProcess


class Heard:
    """What a parser has reported."""

    def __init__(self) -> None:
        self.output = b""
        self.text: list[bytes] = []

    def on_attached(self) -> None:
        self.text.append(b"attached")

    def on_pane_output(self, data: bytes) -> None:
        self.output += data

    def on_text(self, line: bytes) -> None:
        self.text.append(line)


async def test_output_is_unescaped_wherever_the_stream_is_cut() -> None:
    stream = b"%session-changed $0 0\n%output %0 a\\015\\012\\134 \xc3\xa9\\\n%output %1 other\n%unknown x\nbash: no\n%exit gone\n"
    for size in (1, 7, len(stream)):
        heard = Heard()
        parser = ControlModeParser(heard)
        for start in range(0, len(stream), size):
            parser.feed(stream[start : start + size])
        assert heard.output == b"a\r\n\\ \xc3\xa9\\"
        assert heard.text == [b"attached", b"bash: no", b"%exit gone"]


async def test_a_capture_may_show_lines_that_look_like_the_end_of_a_reply() -> None:
    parser, capture = ControlModeParser(Heard()), CaptureReply()
    capture.line_count = 5
    parser.expect_replies([capture])

    parser.feed(b"%begin 1 2 1\nfirst\n%end 1 2 1\n%output %0 forged\n\n\n%end 1 2 1\n")

    assert capture.done.result() is True
    assert capture.text() == b"first\n%end 1 2 1\n%output %0 forged\n"


async def test_a_failed_command_drops_the_rest_of_its_line() -> None:
    parser = ControlModeParser(Heard())
    first, dropped, other = ShortReply(), CaptureReply(), ShortReply()
    parser.expect_replies([first, dropped])
    parser.expect_replies([other])

    parser.feed(b"%begin 1 2 0\nnot ours\n%end 1 2 0\n%begin 1 3 1\nno such pane\n%error 1 3 1\n%begin 1 4 1\nyes\n%end 1 4 1\n")

    assert (first.done.result(), dropped.done.result(), other.done.result()) == (False, False, True)
    assert (first.lines, other.lines) == ([b"no such pane"], [b"yes"])


@pytest.mark.parametrize(
    "stream",
    [
        b"%begin 1 2 1\n",
        b"%begin x\n",
        b"x" * (MAX_LINE_BYTES + 1),
        b"x" * (MAX_LINE_BYTES + 1) + b"\n",
        b"%begin 1 2 1\n" + b"line\n" * 60,
    ],
)
async def test_what_breaks_the_protocol_is_refused(stream: bytes) -> None:
    parser = ControlModeParser(Heard())
    if b"line" in stream:
        parser.expect_replies([ShortReply()])

    with pytest.raises(ControlModeError):
        parser.feed(stream)


async def test_a_capture_that_is_too_large_keeps_its_end() -> None:
    parser, capture = ControlModeParser(Heard()), CaptureReply()
    line = b"y" * 100_000
    capture.line_count = 100
    parser.expect_replies([capture])

    parser.feed(b"%begin 1 2 1\n" + (line + b"\n") * 99 + b"last\n%end 1 2 1\n")

    text = capture.text()
    assert text.startswith(b"[... 16 lines cut ...]\n")
    assert text.endswith(b"last\n")
    assert len(text) < MAX_CAPTURE_BYTES + 100


async def _end_tree() -> None:
    pass


def _tmux_process(output: list[bytes], closed: list[bool]) -> TmuxProcess:
    """A tmux whose client has written this output."""
    tmux = TmuxProcess(cast(Any, SimpleNamespace(slot_id="0")), cast(Any, None), BackgroundTasks("0"), lambda data: None)
    process = SimpleNamespace(stdin=None, try_read_output=output.pop, close_output=lambda: closed.append(True), release_leaf=lambda: None, end_tree=_end_tree)
    tmux._process = cast(Any, process)
    return tmux


async def test_cheap_lines_without_end_leave_the_event_loop_time_for_others() -> None:
    reads = 500
    output = [b"", *[b"%a\n"] * reads]
    tmux = _tmux_process(output, [])
    reader = asyncio.create_task(tmux._read_output())
    turns = 0
    while not reader.done():
        await asyncio.sleep(0)
        turns += 1

    assert turns >= reads
    await tmux.wait_until_gone()


async def test_a_tmux_that_ends_before_its_output_was_read_closes_its_pipe() -> None:
    closed: list[bool] = []
    tmux = _tmux_process([b""], closed)
    tmux._reader = asyncio.create_task(tmux._read_output())
    tmux.end_terminal("its slot was reset")
    await tmux.wait_until_gone()

    assert closed == [True]
