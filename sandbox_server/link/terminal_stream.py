"""The stream to one terminal of a slot: what the service asks the agent for, and what it accepts from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

from sandbox_server.agent import wire
from sandbox_server.link.agent_stream import AgentStream
from sandbox_server.link.errors import AgentProtocolError

MAX_SIDE: Final = 1000
"""The most columns and rows of a window."""
_MAX_NAME_CHARS = 64
_REPORTS: Final[Mapping[str, tuple[str, ...]]] = {
    "session": ("session", "new", "writer", "cols", "rows"),
    "writer": ("writer",),
    "resize": ("cols", "rows"),
    "skipped": ("bytes",),
    "exit": ("exit_code",),
}
"""The type of each report of an agent, and its fields."""
_HIGHEST: Final[Mapping[str, int]] = {"cols": MAX_SIDE, "rows": MAX_SIDE, "exit_code": 255, "bytes": 1 << 53}


@dataclass(frozen=True, kw_only=True, slots=True)
class TerminalRequest:
    """Which terminal to open, and how.

    Args:
        session: its name; None for a new one, or, to watch, for the one that was last written to.
        cols: the width of the window in columns.
        rows: its height in rows.
        may_write: whether the viewer writes; otherwise it only watches.
    """

    session: str | None
    cols: int
    rows: int
    may_write: bool

    def fields(self) -> dict[str, Any]:
        """The fields of the request to the agent."""
        return {"session": self.session, "cols": self.cols, "rows": self.rows, "mode": "write" if self.may_write else "watch"}


class TerminalStream:
    """One viewer's stream to a terminal. Use it as an async context manager; leaving it does not end the terminal.

    Args:
        stream: the stream.
    """

    def __init__(self, stream: AgentStream) -> None:
        self._stream = stream

    async def next_message(self) -> bytes | Mapping[str, Any] | None:
        """Wait for output, or for a report, whose fields were checked. What is not taken makes the program wait.

        Returns:
            None once the agent has ended the stream, which it does after the report `exit`.

        Raises:
            LinkLost: the connection has ended.
            AgentRefused: the agent has taken the terminal away, or could not open it.
            AgentProtocolError: the agent sent something else.
        """
        async for event in self._stream:
            if isinstance(event, wire.Data):
                return event.body
            if isinstance(event, wire.Item):
                return read_report(event.meta)
        return None

    async def send_keys(self, data: bytes) -> None:
        """Send keys to the program. Waits while many have not been taken.

        Raises:
            LinkLost: the connection has ended.
            AgentRefused: the agent has ended the stream.
        """
        await self._stream.send_data(data)

    async def resize(self, cols: int, rows: int) -> None:
        """Change the size of the window. Raises as `send_keys` does."""
        await self._send_item({"type": "resize", "cols": cols, "rows": rows})

    async def become_writer(self) -> None:
        """Make this viewer the writer. Raises as `send_keys` does."""
        await self._send_item({"type": "writer"})

    async def _send_item(self, meta: Mapping[str, Any]) -> None:
        await self._stream.wait_for_room()
        self._stream.send_item(meta)

    async def __aenter__(self) -> Self:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._stream.__aexit__(kind, error, trace)


def read_report(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Read an agent's report about a terminal.

    Raises:
        AgentProtocolError: it is not one of those that there are.
    """
    kind = meta.get("type")
    names = _REPORTS.get(kind) if isinstance(kind, str) else None
    if names is None or not all(_is_valid(name, meta.get(name)) for name in names):
        raise AgentProtocolError("the agent sent a report about a terminal that is none")
    return {"type": kind, **{name: meta[name] for name in names}}


def _is_valid(name: str, value: object) -> bool:
    if name == "session":
        return isinstance(value, str) and 0 < len(value) <= _MAX_NAME_CHARS
    if name in _HIGHEST:
        return type(value) is int and 0 <= value <= _HIGHEST[name]
    return isinstance(value, bool)
