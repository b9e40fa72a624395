"""One question to a slot: a forked tool of ours runs in it and answers with a header."""

from __future__ import annotations

import asyncio
import os
from typing import Any, Mapping

from sandbox_server.agent.execution.drains import Drains
from sandbox_server.agent.execution.framed import Framed
from sandbox_server.agent.execution.process_kill import end_tree
from sandbox_server.agent.execution.process_tree import ProcessTree
from sandbox_server.agent.execution.slot_runtime import SlotRuntime


class NoAnswer(Exception):
    """The slot did not answer; the text says why."""


class _Nowhere:
    full = False

    def write(self, data: bytes) -> None:
        """Only the header is wanted."""


class _Asking:
    """Hears how the run goes."""

    def __init__(self, framed: Framed) -> None:
        self._framed = framed
        self.run: ProcessTree | None = None
        self.header: asyncio.Future[dict[str, Any]] = asyncio.get_event_loop().create_future()

    def wrote(self) -> None:
        """See `runs.Owner`."""

    def ended(self, status: int, cpu_s: float, max_rss_bytes: int) -> None:
        """See `runs.Owner`."""
        if self.run is not None:
            self.run.collect()
        header = self._framed.header
        if header is None or not header.get("ok"):
            self._fail(str(header.get("detail")) if header is not None else "it ended with status %d without an answer" % status)
        elif not self.header.done():
            self.header.set_result(header)

    def refused(self, number: int, where: str) -> None:
        """See `runs.Owner`."""
        if self.run is not None:
            self.run.collect()
        self._fail("it could not be started (%s): %s" % (where, os.strerror(number)))

    def init_lost(self, detail: str) -> None:
        """See `runs.Owner`."""
        if self.run is not None:
            self.run.collect()
        self._fail(detail)

    def _fail(self, text: str) -> None:
        if not self.header.done():
            self.header.set_exception(NoAnswer(text))


async def ask_slot(body: SlotRuntime, drains: Drains, tool: str, args: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
    """Run a tool in a slot.

    Returns:
        Its header. It comes from inside the slot: believe nothing in it unchecked.

    Raises:
        NoAnswer: it could not be run, failed, or took too long; then it is ended.
    """
    framed = Framed(_Nowhere())
    asking = _Asking(framed)
    asking.run = ProcessTree(body, drains, [framed], asking)
    try:
        asking.run.start({"op": "fork", "tool": tool, "args": dict(args), "env": None}, None)
        return await asyncio.wait_for(asking.header, timeout_s)
    except asyncio.TimeoutError:
        await end_tree(asking.run)
        raise NoAnswer("no answer within %g s" % timeout_s) from None
    except OSError as error:
        raise NoAnswer(str(error)) from None
