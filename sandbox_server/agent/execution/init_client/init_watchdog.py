"""Asking init, and what to do when it does not answer: whatever a slot did to it, no call of the service waits for that.

Nothing stops init itself. But where it has the slot's user, the slot can stop a process that init is just starting, and until that has become another
program, the kernel lets init wait for it. So that one is killed first, and only if that does not help, the slot.
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
_ANSWER_FREED_WITHIN_S = 0.5
_ROUNDS = 40
_STOPPED = (b"T", b"t")


class Unanswered(Exception):
    """Init did not do what it was asked to."""


async def ask_init(body: SlotRuntime, request: dict[str, Any], fds: Sequence[int] = ()) -> int:
    """Ask init about a run.

    Raises:
        Unanswered: it did not answer in time, or cannot.
    """
    try:
        answer = await asyncio.wait_for(body.link.ask(request, fds), _ANSWER_WITHIN_S)
    except asyncio.TimeoutError:
        answer = await _ask_again(body, request, fds)
    if answer < 0:
        raise Unanswered("init could not start what it signals with")
    return answer


async def _ask_again(body: SlotRuntime, request: dict[str, Any], fds: Sequence[int]) -> int:
    freed = await asyncio.get_running_loop().run_in_executor(None, _kill_stopped_starts, body.init_pid)
    if freed:
        with contextlib.suppress(asyncio.TimeoutError):
            return await asyncio.wait_for(body.link.ask(request, fds), _ANSWER_FREED_WITHIN_S)
    raise Unanswered("init did not answer within %g s" % _ANSWER_WITHIN_S)


def _kill_stopped_starts(init_pid: int) -> int:
    """Kill the children of init that were stopped before they became another program; how many that were."""
    mine = _command_line(init_pid)
    table = process_table.read_process_table()
    starts = [pid for pid, (parent, _, _, state) in table.items() if parent == init_pid and state in _STOPPED and _command_line(pid) == mine]
    process_table.send_signal(process_table.select_living(table, starts), signal.SIGKILL)
    return len(starts)


def _command_line(pid: int) -> bytes:
    try:
        with open("/proc/%d/cmdline" % pid, "rb") as file:
            return file.read()
    except OSError:
        return b""


async def end_slot(body: SlotRuntime, detail: str, self_inflicted: bool = True) -> None:
    """End all of a slot, because its init does not end a tree (nothing else runs beside init that keeps it busy), or because it took too much of something.

    Args:
        body: what it runs on.
        detail: why.
        own_work: whether that is proven to be the slot's own doing.
    """
    body.link.self_inflicted = self_inflicted
    body.link.stop_hearing()
    loop = asyncio.get_running_loop()
    has_namespace = body.init_pid != body.process.pid  # that ends with init
    if not has_namespace and body.uid is None:
        await loop.run_in_executor(None, _kill_descendants, body.init_pid)  # while init still is their ancestor
    if body.init_pidfd >= 0 and hasattr(signal, "pidfd_send_signal"):
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(body.init_pidfd, signal.SIGKILL)
    else:
        body.process.kill()
    if not has_namespace and body.uid is not None:
        await loop.run_in_executor(None, kill_uid, body.uid)
    body.link.lose("%s, so the slot was ended" % detail)


def _kill_descendants(init_pid: int) -> None:
    for _ in range(_ROUNDS):
        table = process_table.read_process_table()
        members = process_table.select_living(table, process_table.find_trees(table, [init_pid]) - {init_pid})
        if not members:
            return
        process_table.send_signal(members, signal.SIGKILL)
