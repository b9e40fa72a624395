"""Finds the slot that has used up the descriptors that may be in flight on unix sockets.

The kernel limits that number per user. The slots of an agent that is not root have the same user as the agent, so one slot can keep the agent from sending
descriptors to any init.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Callable, Mapping

from sandbox_server.agent.execution.init_client.descriptors import agent_limit
from sandbox_server.agent.execution.processes.slot_kill import kill_slot_processes
from sandbox_server.agent.execution.slot_runtime import SlotRuntime
from sandbox_server.agent.init import process_table

log = logging.getLogger(__name__)

_MIN_COUNT = 64  # programs that pass descriptors to each other always have a few in flight
_FDINFO_KEY = b"scm_fds:"
_PAUSE_S = 0.2


def count_in_sockets(pid: int) -> dict[str, int]:
    """Return for each unix socket that a process has open how many descriptors were sent over it and not yet received. Sockets without any are left out."""
    found: dict[str, int] = {}
    try:
        names = os.listdir("/proc/%d/fd" % pid)
    except OSError:
        return found  # the process has ended, or may not be inspected
    for name in names:
        try:
            target = os.readlink("/proc/%d/fd/%s" % (pid, name))
            if target.startswith("socket:"):
                with open("/proc/%d/fdinfo/%s" % (pid, name), "rb") as file:
                    found[target] = _parse_count(file.read())
        except OSError:
            continue  # closed since the folder was listed
    return {target: count for target, count in found.items() if count}


def _parse_count(fdinfo: bytes) -> int:
    for line in fdinfo.splitlines():
        if line.startswith(_FDINFO_KEY):
            return int(line[len(_FDINFO_KEY) :])
    return 0


def count_in_flight(inits: Mapping[str, int]) -> dict[str, int]:
    """Return for each slot how many descriptors its processes have in flight, as far as /proc shows it.

    Args:
        inits: slot id -> process id of the slot's init.
    """
    table = process_table.read_process_table()
    counts = {}
    for slot_id, init_pid in inits.items():
        sockets: dict[str, int] = {}
        for pid in process_table.find_trees(table, [init_pid]):
            sockets.update(count_in_sockets(pid))
        counts[slot_id] = sum(sockets.values())
    return counts


def find_slot_to_blame(counts: Mapping[str, int], limit: int) -> str | None:
    """Return the slot that has caused the kernel to refuse more descriptors; None if no slot has a considerable part of the limit in flight.

    Args:
        counts: slot id -> how many descriptors it has in flight.
        limit: how many open files the agent may have.
    """
    if not counts:
        return None
    worst = max(counts, key=lambda slot_id: counts[slot_id])
    return worst if counts[worst] >= max(_MIN_COUNT, limit // (2 * len(counts))) else None


class InFlightGuard:
    """Ends the slot that keeps the agent from sending descriptors.

    Args:
        running: returns the running slot runtimes by slot id.
    """

    def __init__(self, running: Callable[[], Mapping[str, SlotRuntime]]) -> None:
        self._running = running
        self._task: asyncio.Task[None] | None = None

    def start_search(self) -> None:
        """Search for the slot in the background, and end it. Does nothing while a search is under way."""
        if self._task is None or self._task.done():
            self._task = asyncio.get_event_loop().create_task(self._end_slot_to_blame())

    async def _end_slot_to_blame(self) -> None:
        runtimes = self._running()
        inits = {slot_id: runtime.init_pid for slot_id, runtime in runtimes.items()}
        counts = await asyncio.get_running_loop().run_in_executor(None, count_in_flight, inits)
        slot_id = find_slot_to_blame(counts, agent_limit())
        if slot_id is None:
            log.warning("too many descriptors are in flight on unix sockets, and /proc shows no slot that has sent them")
        elif not runtimes[slot_id].link.closed:
            log.warning(
                "all processes of a slot are ended because of its descriptors in flight",
                extra={"slot_id": slot_id, "detail": "%d descriptors" % counts[slot_id]},
            )
            await kill_slot_processes(runtimes[slot_id], "it has %d descriptors in flight on unix sockets, which left none to others" % counts[slot_id])
        await asyncio.sleep(_PAUSE_S)
