"""Which slot has filled the count of descriptors that are under way on unix sockets. All slots of an agent without root share it with the agent."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Callable, Mapping

from sandbox_server.agent.execution.init_client.descriptors import agent_limit
from sandbox_server.agent.execution.init_client.init_watchdog import end_slot
from sandbox_server.agent.execution.slot_runtime import SlotRuntime
from sandbox_server.agent.init import process_table

log = logging.getLogger(__name__)

_LEAST = 64  # programs that pass descriptors to each other have a few under way
_WAITING = b"scm_fds:"
_LOOK_EVERY_S = 0.2


def waiting_in(pid: int) -> dict[str, int]:
    """The unix sockets that a process has open and that hold descriptors nobody has received: socket -> how many."""
    found: dict[str, int] = {}
    try:
        names = os.listdir("/proc/%d/fd" % pid)
    except OSError:
        return found  # it has ended, or hides itself
    for name in names:
        try:
            target = os.readlink("/proc/%d/fd/%s" % (pid, name))
            if target.startswith("socket:"):
                with open("/proc/%d/fdinfo/%s" % (pid, name), "rb") as file:
                    found[target] = _number(file.read())
        except OSError:
            continue  # closed meanwhile
    return {target: count for target, count in found.items() if count}


def _number(fdinfo: bytes) -> int:
    for line in fdinfo.splitlines():
        if line.startswith(_WAITING):
            return int(line[len(_WAITING) :])
    return 0


def count_in_flight(inits: Mapping[str, int]) -> dict[str, int]:
    """How many descriptors are under way in each slot, as far as it can be seen.

    Args:
        inits: slot -> the pid of its first process.
    """
    table = process_table.read_process_table()
    counts = {}
    for slot_id, init_pid in inits.items():
        sockets: dict[str, int] = {}
        for pid in process_table.find_trees(table, [init_pid]):
            sockets.update(waiting_in(pid))
        counts[slot_id] = sum(sockets.values())
    return counts


def who_fills(counts: Mapping[str, int], limit: int) -> str | None:
    """The slot that the refusal of one more descriptor is to be blamed on; None where no slot has its part of the limit under way.

    Args:
        counts: slot -> how many descriptors it has under way.
        limit: how many of one user the agent's own limit allows.
    """
    if not counts:
        return None
    worst = max(counts, key=lambda slot_id: counts[slot_id])
    return worst if counts[worst] >= max(_LEAST, limit // (2 * len(counts))) else None


class InFlightBlame:
    """Finds the slot that keeps the agent from passing descriptors to its inits, and ends it.

    Args:
        bodies: gives the body of every slot that has one.
    """

    def __init__(self, bodies: Callable[[], Mapping[str, SlotRuntime]]) -> None:
        self._bodies = bodies
        self._task: asyncio.Task[None] | None = None

    def look(self) -> None:
        """The agent could not pass a descriptor on: find out why, behind, unless that is being done already."""
        if self._task is None or self._task.done():
            self._task = asyncio.get_event_loop().create_task(self._look())

    async def _look(self) -> None:
        bodies = self._bodies()
        inits = {slot_id: body.init_pid for slot_id, body in bodies.items()}
        counts = await asyncio.get_running_loop().run_in_executor(None, count_in_flight, inits)
        slot_id = who_fills(counts, agent_limit())
        if slot_id is None:
            log.warning("too many descriptors are under way on unix sockets, and no slot can be seen to have sent them")
        elif not bodies[slot_id].link.closed:
            log.warning("a slot is ended for its descriptors under way", extra={"slot_id": slot_id, "detail": "%d descriptors" % counts[slot_id]})
            await end_slot(bodies[slot_id], "it has %d descriptors under way on unix sockets, which left none to others" % counts[slot_id])
        await asyncio.sleep(_LOOK_EVERY_S)
