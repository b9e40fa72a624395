"""Asks a slot a question: a tool of `agent.inslot` runs inside the slot and answers with a header."""

from __future__ import annotations

import asyncio
import os
from typing import Any, Mapping

from sandbox_server.agent.execution.processes.drains import Drains
from sandbox_server.agent.execution.processes.slot_process import SlotProcess
from sandbox_server.agent.execution.processes.spawn_spec import forked_tool_spec
from sandbox_server.agent.execution.reply_parser import ReplyParser
from sandbox_server.agent.execution.slot_runtime import SlotRuntime


class NoAnswer(Exception):
    """The slot did not answer. The text says why."""


class _DiscardedContent:
    is_full = False

    def write(self, data: bytes) -> None:
        """Discard the content: only the header matters."""


class _Question:
    """Waits for the header of the tool's answer."""

    def __init__(self, runtime: SlotRuntime, drains: Drains) -> None:
        self._reply = ReplyParser(_DiscardedContent())
        self.process = SlotProcess(runtime, drains, [self._reply], self)
        self.header: asyncio.Future[dict[str, Any]] = asyncio.get_event_loop().create_future()

    def on_still_running(self) -> None:
        """See `ProcessListener`."""

    def on_output(self) -> None:
        """See `ProcessListener`."""

    def on_process_ended(self, status: int, cpu_s: float, max_rss_bytes: int) -> None:
        """See `ProcessListener`."""
        self.process.collect_output()
        header = self._reply.header
        if header is None or not header.get("ok"):
            self._fail(str(header.get("detail")) if header is not None else "it ended with status %d without an answer" % status)
        elif not self.header.done():
            self.header.set_result(header)

    def on_process_refused(self, errno: int, step: str) -> None:
        """See `ProcessListener`."""
        self.process.collect_output()
        self._fail("it could not be started (%s): %s" % (step, os.strerror(errno)))

    def on_init_lost(self, detail: str) -> None:
        """See `ProcessListener`."""
        self.process.collect_output()
        self._fail(detail)

    def _fail(self, text: str) -> None:
        if not self.header.done():
            self.header.set_exception(NoAnswer(text))


async def ask_slot(runtime: SlotRuntime, drains: Drains, tool: str, args: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
    """Run a tool in a slot.

    Args:
        runtime: the slot runtime.
        drains: of the slot.
        tool: the name of the tool.
        args: its arguments.
        timeout_s: how long it may take, in seconds. After that, its processes are ended.

    Returns:
        The header of its answer. It comes from inside the slot, so it may be anything.

    Raises:
        NoAnswer: the tool could not be run, failed, or took too long.
    """
    question = _Question(runtime, drains)
    try:
        question.process.start_process(forked_tool_spec(tool, args))
        return await asyncio.wait_for(question.header, timeout_s)
    except asyncio.TimeoutError:
        await question.process.end_tree()
        raise NoAnswer("no answer within %g s" % timeout_s) from None
    except OSError as error:
        raise NoAnswer(str(error)) from None
