"""A stream on which one viewer sees a terminal, and may write to it."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any, Mapping

from sandbox_server.agent.errors import Refused
from sandbox_server.agent.execution.terminals.terminal import Terminal
from sandbox_server.agent.execution.terminals.viewer import Viewer
from sandbox_server.agent.server.connections import Stream
from sandbox_server.agent.slots.slots import AgentSlot

log = logging.getLogger(__name__)

MAX_SIDE = 1000
"""The most columns and rows of a window."""
_NAME = re.compile(r"[A-Za-z0-9._:-]{1,64}")
_ACTIONS = frozenset({"resize", "writer"})


class TerminalStream:
    """Serves one viewer of a terminal.

    Output is sent as data, as fast as the service takes it; everything else is sent as items, of which no more than one is queued. Keys arrive as data, whose
    credit is returned when the terminal has taken them. When the stream is aborted, the terminal lives on.

    Args:
        stream: the stream.
        slot: the slot.
        meta: `mode` (`write` or `watch`), `cols` and `rows`, and `session`, the name of the terminal, or nothing.

    Raises:
        Refused: a field is not valid, there is no such terminal to watch, or there are too many terminals or viewers.
    """

    def __init__(self, stream: Stream, slot: AgentSlot, meta: Mapping[str, Any]) -> None:
        mode, name, size = _parse_request(meta)
        self._stream = stream
        self._terminals = slot.lease.terminals
        is_new = False
        if mode == "write":
            slot.lease.mark_live_calls_concurrent()
            self._terminal, is_new = self._terminals.open_terminal(slot.current_runtime(), name, size)
        else:
            self._terminal = self._terminals.find_terminal(name)
        self._has_news = asyncio.Event()
        self._viewer = Viewer(self._terminal, mode == "write", is_new, self._has_news.set)
        self._terminals.add_viewer(self._terminal, self._viewer)
        self._terminal.resize(self._viewer, *size)
        self._keys: asyncio.Queue[bytes] = asyncio.Queue()  # its size is bounded by the flow-control window
        stream.on_drained = self._has_news.set
        loop = asyncio.get_event_loop()
        self._has_seen_end = False
        self._typing = loop.create_task(self._pass_keys(self._terminal))
        self._serving = loop.create_task(self._serve(self._terminal))
        self._serving.add_done_callback(self._leave)

    async def _serve(self, terminal: Terminal) -> None:
        try:
            await self._send_messages(terminal)
        except Refused as error:
            self._stream.refuse(error)
        except Exception as error:  # the failure of one stream must not end the agent
            log.exception("a stream of a terminal failed")
            self._stream.refuse(Refused("internal", "%s: %s" % (type(error).__name__, error)))

    def _leave(self, serving: asyncio.Task[None]) -> None:
        """Leave the terminal, however the stream has ended: its task may have been cancelled before it began."""
        self._typing.cancel()
        self._stream.on_drained = None
        self._terminals.remove_viewer(self._terminal, self._viewer, self._has_seen_end)
        if self._has_seen_end:
            self._stream.end_stream()

    async def _send_messages(self, terminal: Terminal) -> None:
        """Send what there is for the viewer, each message when the one before has been taken, until it has been told that the shell has ended."""
        while self._stream.is_open:
            self._has_news.clear()
            message = None if self._stream.queued_bytes else self._viewer.next_message()
            if message is None:
                await self._has_news.wait()
                continue
            report, data = message
            if not report:
                terminal.note_progress()
                await self._stream.send_data(data)
                continue
            self._stream.send_item(report)
            if report is terminal.ending:
                self._has_seen_end = True
                return

    async def _pass_keys(self, terminal: Terminal) -> None:
        while True:
            data = await self._keys.get()
            await terminal.write(self._viewer, data)
            self._stream.acknowledge(data)

    def on_item(self, meta: dict[str, Any], body: bytes) -> None:
        """See `StreamHandler`. The writer resizes the window; another viewer that may write becomes the writer."""
        if meta.get("type") not in _ACTIONS or not self._viewer.may_write:
            raise Refused("invalid", "this viewer of the terminal cannot do %s" % ascii(meta.get("type"))[:100])
        if meta["type"] == "resize":
            self._terminal.resize(self._viewer, *_parse_size(meta))
        else:
            self._terminal.make_writer(self._viewer)

    def on_data(self, body: bytes) -> None:
        """See `StreamHandler`. The data is keys."""
        self._keys.put_nowait(body)

    def on_end(self) -> None:
        """See `StreamHandler`. The viewer sends nothing more, and still watches."""

    def on_abort(self) -> None:
        """See `StreamHandler`."""
        self._serving.cancel()


def _parse_request(meta: Mapping[str, Any]) -> tuple[str, str | None, tuple[int, int]]:
    mode, name = meta.get("mode"), meta.get("session")
    if mode not in ("write", "watch"):
        raise Refused("invalid", "mode must be write or watch")
    if name is not None and (not isinstance(name, str) or not _NAME.fullmatch(name)):
        raise Refused("invalid", "session must match %s" % _NAME.pattern)
    return mode, name, _parse_size(meta)


def _parse_size(meta: Mapping[str, Any]) -> tuple[int, int]:
    cols, rows = meta.get("cols"), meta.get("rows")
    if type(cols) is int and type(rows) is int and 1 <= cols <= MAX_SIDE and 1 <= rows <= MAX_SIDE:  # a bool is an int, too
        return cols, rows
    raise Refused("invalid", "cols and rows must be integers from 1 to %d" % MAX_SIDE)
