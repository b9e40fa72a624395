"""Requests to init with a time limit, and what the agent does when init does not answer. A slot cannot delay the service by blocking its init.

A slot cannot stop its init. But if init runs as the slot's user, the slot can stop (SIGSTOP) a child that init has just forked, and the kernel lets init wait
until that child has executed its program. So the agent first kills such children. If init still does not answer, the agent ends all processes of the slot.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import Any, Sequence

from sandbox_server.agent.execution.slot_runtime import SlotRuntime
from sandbox_server.agent.init import process_table
from sandbox_server.agent.kernel.uids import kill_uid

_ANSWER_WITHIN_S = 1.0
_ANSWER_FREED_WITHIN_S = 0.5  # After the stopped children of init were killed.
_STOPPED = (b"T", b"t")


class Unanswered(Exception):
    """Init did not answer a request, or could not do what it asks for."""


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
        raise Unanswered("init could not fork the helper that sends signals")
    return answer


async def _ask_again(runtime: SlotRuntime, request: dict[str, Any], fds: Sequence[int]) -> int:
    freed = await asyncio.get_running_loop().run_in_executor(None, _kill_stopped_children, runtime.init_pid)
    if freed:
        with contextlib.suppress(asyncio.TimeoutError):
            return await asyncio.wait_for(runtime.link.ask(request, fds), _ANSWER_FREED_WITHIN_S)
    raise Unanswered("init did not answer within %g s" % _ANSWER_WITHIN_S)


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


async def end_slot(runtime: SlotRuntime, detail: str, own_work: bool = True) -> None:
    """End all processes of a slot: because its init does not answer, or because the slot used too much of something that slots share.

    Args:
        runtime: the slot runtime.
        detail: why, as a sentence.
        own_work: whether it is proven that the slot itself caused it. Only processes of the slot can keep its init from answering.
    """
    runtime.link.own_work = own_work
    runtime.link.stop_reading()
    loop = asyncio.get_running_loop()
    has_namespace = runtime.init_pid != runtime.process.pid  # the kernel ends all processes of a pid namespace when its init ends
    if not has_namespace and runtime.uid is None:
        await loop.run_in_executor(None, _kill_descendants, runtime.init_pid)  # while init is alive, all of them descend from it
    if runtime.init_pidfd >= 0 and hasattr(signal, "pidfd_send_signal"):
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(runtime.init_pidfd, signal.SIGKILL)
    else:
        runtime.process.kill()
    if not has_namespace and runtime.uid is not None:
        await loop.run_in_executor(None, kill_uid, runtime.uid)
    runtime.link.close_as_lost("%s, so the slot was ended" % detail)


def _kill_descendants(init_pid: int) -> None:
    for _ in range(process_table.KILL_ROUNDS):
        table = process_table.read_process_table()
        members = process_table.select_living(table, process_table.find_trees(table, [init_pid]) - {init_pid})
        if not members:
            return
        process_table.send_signal(members, signal.SIGKILL)
