"""Requests to init with a time limit, because a slot must not be able to delay the service by blocking its init.

A slot cannot stop its init. But if init runs as the slot's user, the slot can stop (SIGSTOP) a child that init has just forked, and the kernel lets init wait
until that child has executed its program. So the agent first kills such children. If init still does not answer, the caller ends all processes of the slot.

While all memory for slots is in use, the kernel lets init wait for memory, or refuses it. Then the slot itself is not proven to be the cause.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import Any, Sequence

from sandbox_server.agent.execution.slot_runtime import SlotRuntime
from sandbox_server.agent.init import process_table

_ANSWER_WITHIN_S = 1.0
_ANSWER_FREED_WITHIN_S = 0.5  # After the stopped children of init were killed, or while all memory for slots is in use.
_STOPPED = (b"T", b"t")


class Unanswered(Exception):
    """Init did not answer a request, or could not do what it asks for.

    Args:
        detail: what happened.
        own_work: whether only the slot itself can be the cause.
    """

    def __init__(self, detail: str, own_work: bool) -> None:
        super().__init__(detail)
        self.own_work = own_work


async def ask_init(runtime: SlotRuntime, request: dict[str, Any], fds: Sequence[int] = ()) -> int:
    """Send init a request about a process tree, and wait for the answer.

    Args:
        runtime: the slot runtime of init.
        request: see `InitLink.ask`.
        fds: the descriptors that the request needs.

    Returns:
        The number that init answers with.

    Raises:
        Unanswered: init did not answer in time, or could not do it.
        OSError: the request could not be sent.
    """
    try:
        answer = await asyncio.wait_for(runtime.link.ask(request, fds), _ANSWER_WITHIN_S)
    except asyncio.TimeoutError:
        answer = await _ask_again(runtime, request, fds)
    if answer < 0:
        raise Unanswered("init could not fork the helper that sends signals", own_work=runtime.groups.find_usage_while_full() is None)
    return answer


async def _ask_again(runtime: SlotRuntime, request: dict[str, Any], fds: Sequence[int]) -> int:
    is_memory_full = runtime.groups.find_usage_while_full() is not None
    freed = await asyncio.get_running_loop().run_in_executor(None, _kill_stopped_children, runtime.init_pid)
    if freed or is_memory_full:
        with contextlib.suppress(asyncio.TimeoutError):
            return await asyncio.wait_for(runtime.link.ask(request, fds), _ANSWER_FREED_WITHIN_S)
    raise Unanswered("init did not answer within %g s" % _ANSWER_WITHIN_S, own_work=not is_memory_full)


def _kill_stopped_children(init_pid: int) -> int:
    """Kill the children of init that were stopped before they executed their program. Returns how many there were."""
    init_command_line = _command_line(init_pid)
    table = process_table.read_process_table()
    stopped = [pid for pid, (parent, _, _, state) in table.items() if parent == init_pid and state in _STOPPED and _command_line(pid) == init_command_line]
    process_table.send_signal(process_table.select_living(table, stopped), signal.SIGKILL)
    return len(stopped)


def _command_line(pid: int) -> bytes:
    try:
        with open("/proc/%d/cmdline" % pid, "rb") as file:
            return file.read()
    except OSError:
        return b""
