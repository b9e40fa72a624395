"""Parses what tmux writes in control mode: the replies to commands, and what the programs of the pane have printed.

tmux runs in the slot, so all of it is untrusted. Lines, replies and captures are limited in size; what breaks the protocol raises `ControlModeError`.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from typing import Callable, Deque, Protocol, Sequence

PANE = b"%0"  # the first pane of a server has this id; it is the one that is shown and recorded
MAX_LINE_BYTES = 256 << 10
MAX_REPLY_LINES = 50
MAX_CAPTURE_BYTES = 8 << 20
_ESCAPED = re.compile(rb"\\([0-7]{3})")
_GUARD = re.compile(rb"[0-9]{1,20} [0-9]{1,10} ([01])")
_BYTES = {b"%03o" % number: bytes((number,)) for number in range(256)}
_OUTPUT = b"%output " + PANE + b" "


class ControlModeError(Exception):
    """What tmux has written is not its control-mode protocol, or is larger than allowed."""


class ControlModeListener(Protocol):
    """Receives what is not a reply."""

    def on_attached(self) -> None:
        """The client is attached to its session, and can send commands."""

    def on_pane_output(self, data: bytes) -> None:
        """The programs of the pane have printed these bytes."""

    def on_text(self, line: bytes) -> None:
        """A line that is no reply: an error of tmux or of the shell that starts it, or why tmux ends the connection."""


class ShortReply:
    """The reply to a command that prints a few lines at most.

    Args:
        on_lines: called with the lines once the command has succeeded, before anything that follows is parsed.
    """

    def __init__(self, on_lines: Callable[[list[bytes]], None] = lambda lines: None) -> None:
        self.lines: list[bytes] = []
        self._on_lines = on_lines
        self.done: asyncio.Future[bool] = asyncio.get_event_loop().create_future()

    @property
    def takes_any_line(self) -> bool:
        """Whether the next line is content, whatever it looks like."""
        return False

    def add_line(self, line: bytes) -> None:
        """Take one line of content."""
        if len(self.lines) >= MAX_REPLY_LINES:
            raise ControlModeError("a reply of tmux has more than %d lines" % MAX_REPLY_LINES)
        self.lines.append(line)

    def finish_reply(self, succeeded: bool) -> None:
        """The reply is complete; `succeeded` says whether the command did what it should."""
        if succeeded:
            self._on_lines(self.lines)
        if not self.done.done():
            self.done.set_result(succeeded)


class CaptureReply(ShortReply):
    """The reply to `capture-pane`. Programs can print lines that look like the end of a reply, so the lines are counted: tmux prints one for each row.

    Attributes:
        line_count: how many lines will come. Set it before the reply begins.
        cut_lines: how many of the first lines were dropped because the capture is too large.
    """

    def __init__(self) -> None:
        super().__init__()
        self.line_count = 0
        self.cut_lines = 0
        self._kept: Deque[bytes] = deque()
        self._kept_bytes = 0

    @property
    def takes_any_line(self) -> bool:
        """See `ShortReply`."""
        return len(self._kept) + self.cut_lines < self.line_count

    def add_line(self, line: bytes) -> None:
        """See `ShortReply`. Of a capture that is too large, the last lines are kept."""
        if not self.takes_any_line:
            raise ControlModeError("a capture of tmux has more lines than the screen")
        self._kept.append(line)
        self._kept_bytes += len(line) + 1
        while self._kept_bytes > MAX_CAPTURE_BYTES:
            self._kept_bytes -= len(self._kept.popleft()) + 1
            self.cut_lines += 1

    def text(self) -> bytes:
        """The captured lines, without the blank ones at their end."""
        while self._kept and not self._kept[-1].strip():
            self._kept.pop()
        cut = [b"[... %d lines cut ...]" % self.cut_lines] if self.cut_lines else []
        return b"".join(line + b"\n" for line in (*cut, *self._kept))


class ControlModeParser:
    """Parses the output of one control-mode client.

    tmux frames the reply to each command with `%begin TIME NUMBER FLAGS` and `%end` or `%error` with the same words. Nothing else is written in between.

    Args:
        listener: receives everything else.
    """

    def __init__(self, listener: ControlModeListener) -> None:
        self._listener = listener
        self._partial_line = b""
        self._pane_output: list[bytes] = []
        self._expected: Deque[list[ShortReply]] = deque()
        self._guard = b""  # of the reply that has begun; empty: none has
        self._reply: ShortReply | None = None  # None if the reply that has begun is to a command that nobody here has sent

    def expect_replies(self, replies: Sequence[ShortReply]) -> None:
        """Expect the replies to the commands of one line. After the first command that fails, tmux drops the rest of the line."""
        self._expected.append(list(replies))

    def feed(self, data: bytes) -> None:
        """Parse some more output.

        Raises:
            ControlModeError: it breaks the protocol.
        """
        lines = (self._partial_line + data).split(b"\n")
        self._partial_line = lines.pop()
        for line in lines:
            if len(line) > MAX_LINE_BYTES:
                raise ControlModeError("tmux has written a line of %d bytes" % len(line))
            if self._guard:
                self._parse_reply_line(line)
            else:
                self._parse_line(line)
        if len(self._partial_line) > MAX_LINE_BYTES:
            raise ControlModeError("tmux has written more than %d bytes without an end of the line" % MAX_LINE_BYTES)
        if self._pane_output:
            output, self._pane_output = b"".join(self._pane_output), []
            self._listener.on_pane_output(output)

    def _parse_line(self, line: bytes) -> None:
        if line.startswith(_OUTPUT):
            self._pane_output.append(_ESCAPED.sub(_unescape, line[len(_OUTPUT) :]))
        elif line.startswith(b"%begin "):
            guard = line[len(b"%begin ") :]
            match = _GUARD.fullmatch(guard)
            if match is None:
                raise ControlModeError("tmux has begun a reply in an unknown form")
            self._guard = guard
            self._reply = self._next_reply() if match.group(1) == b"1" else None
        elif line.startswith(b"%session-changed "):
            self._listener.on_attached()
        elif not line.startswith(b"%") or line.startswith(b"%exit "):
            self._listener.on_text(line)

    def _next_reply(self) -> ShortReply:
        if not self._expected:
            raise ControlModeError("tmux has replied to a command that was not sent")
        return self._expected[0][0]

    def _parse_reply_line(self, line: bytes) -> None:
        reply = self._reply
        if reply is not None and reply.takes_any_line:
            reply.add_line(line)
        elif line in (b"%end " + self._guard, b"%error " + self._guard):
            self._guard, self._reply = b"", None
            if reply is not None:
                self._finish_reply(reply, line.startswith(b"%end "))
        elif reply is not None:
            reply.add_line(line)
        else:
            self._listener.on_text(line)

    def _finish_reply(self, reply: ShortReply, succeeded: bool) -> None:
        line = self._expected[0]
        line.pop(0)
        if not succeeded:
            for dropped in line:
                dropped.finish_reply(False)
            line.clear()
        if not line:
            self._expected.popleft()
        reply.finish_reply(succeeded)


def _unescape(match: re.Match[bytes]) -> bytes:
    return _BYTES.get(match.group(1), b"?")
