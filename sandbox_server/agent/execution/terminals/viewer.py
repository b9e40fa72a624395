"""One viewer of a terminal: how far it has read, and what it has been told."""

from __future__ import annotations

from typing import Any, Callable, Mapping, Protocol, Tuple

from sandbox_server.agent.errors import Refused
from sandbox_server.agent.execution.terminals.scrollback import Scrollback
from sandbox_server.agent.wire import DATA_BYTES

#: A viewer that could not keep up goes on with so much of the newest output.
SKIP_TO_BYTES = 32 << 10

Message = Tuple[Mapping[str, Any], bytes]
"""A message to the viewer, or, with an empty mapping, output."""


class ViewedTerminal(Protocol):
    """What a viewer sees of its terminal."""

    name: str
    scrollback: Scrollback
    size: tuple[int, int]  # columns and rows
    writer: Viewer | None
    is_started: bool
    ending: Mapping[str, Any] | None  # the last message to each viewer, once the terminal has ended
    failure: Refused | None  # why the terminal was taken away, or could not be opened


class Viewer:
    """One viewer. Whoever serves it takes its messages one by one, each when the one before has been sent.

    Args:
        terminal: the terminal.
        may_write: whether it may become the writer.
        is_first: whether the terminal was opened for it.
        on_news: called when there may be another message.
    """

    def __init__(self, terminal: ViewedTerminal, may_write: bool, is_first: bool, on_news: Callable[[], None]) -> None:
        self._terminal = terminal
        self.may_write = may_write
        self._is_first = is_first
        self.on_news = on_news
        self.offset = terminal.scrollback.find_replay_offset(terminal.scrollback.end)
        self._is_introduced = False
        self._told_writer = False
        self._told_size = (0, 0)

    @property
    def unread_bytes(self) -> int:
        """How much of the output it has not read."""
        return self._terminal.scrollback.end - self.offset

    def next_message(self) -> Message | None:
        """Return the next message, or None if there is none now.

        Raises:
            Refused: the terminal could not be opened, or was taken away.
        """
        terminal = self._terminal
        if terminal.failure is not None:
            raise terminal.failure
        if not terminal.is_started:
            return None
        message = self._next_report()
        if message is not None:
            return message, b""
        if self.unread_bytes:
            data = terminal.scrollback.read(self.offset, DATA_BYTES)
            self.offset += len(data)
            return {}, data
        return (terminal.ending, b"") if terminal.ending is not None else None

    def _next_report(self) -> Mapping[str, Any] | None:
        terminal, is_writer = self._terminal, self._terminal.writer is self
        if not self._is_introduced:
            self._is_introduced, self._told_writer, self._told_size = True, is_writer, terminal.size
            cols, rows = terminal.size
            return {"type": "session", "session": terminal.name, "new": self._is_first, "writer": is_writer, "cols": cols, "rows": rows}
        if self._told_writer != is_writer:
            self._told_writer = is_writer
            return {"type": "writer", "writer": is_writer}
        if self._told_size != terminal.size:
            self._told_size = terminal.size
            if not is_writer:  # the writer has set it
                return {"type": "resize", "cols": terminal.size[0], "rows": terminal.size[1]}
        if self.offset < terminal.scrollback.start:
            old, self.offset = self.offset, terminal.scrollback.find_replay_offset(SKIP_TO_BYTES)
            return {"type": "skipped", "bytes": self.offset - old}
        return None
