"""Killing all processes of a slot, which ends the slot until its next reset."""

from __future__ import annotations

import asyncio
import contextlib
import signal

from sandbox_server.agent.execution.slot_runtime import SlotRuntime
from sandbox_server.agent.init import process_table
from sandbox_server.agent.kernel.uids import kill_uid


async def kill_slot_processes(runtime: SlotRuntime, detail: str, own_work: bool = True) -> None:
    """Kill all processes of a slot, its init included: because its init does not answer, or because the slot used too much of something that slots share.

    Args:
        runtime: the slot runtime.
        detail: why, as a sentence.
        own_work: whether it is proven that the slot itself caused it. Only processes of the slot can keep its init from answering.
    """
    runtime.link.own_work = own_work
    runtime.link.stop_reading()
    loop = asyncio.get_running_loop()
    if not runtime.has_pid_namespace and runtime.uid is None:
        await loop.run_in_executor(None, _kill_descendants, runtime.init_pid)  # while init is alive, all of them descend from it
    if runtime.init_pidfd >= 0 and hasattr(signal, "pidfd_send_signal"):
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(runtime.init_pidfd, signal.SIGKILL)
    else:
        runtime.process.kill()
    if not runtime.has_pid_namespace and runtime.uid is not None:
        await loop.run_in_executor(None, kill_uid, runtime.uid)
    runtime.link.close_as_lost("%s, so the slot was ended" % detail)


def _kill_descendants(init_pid: int) -> None:
    for _ in range(process_table.KILL_ROUNDS):
        table = process_table.read_process_table()
        members = process_table.select_living(table, process_table.find_trees(table, [init_pid]) - {init_pid})
        if not members:
            return
        process_table.send_signal(members, signal.SIGKILL)
