"""Keeps the machine's table of open files from being filled by a slot, where the machine limits it (`fs.file-max`).

When the table is full, only root can open files: commands of all slots fail, and so does an agent that is not root. Every 250 ms the guard reads how many files
are open, which is cheap. Only if these are too many, it counts the descriptors of the slots and ends the slot that has most. Descriptors of forked processes
count for each of them, although they share their open files, and descriptors in transit on sockets are not counted.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Callable, Dict, NamedTuple, Sequence

from sandbox_server.agent.execution.limit_end import end_slot_for_limit
from sandbox_server.agent.execution.slot_runtime import LimitEnd, SlotRuntime
from sandbox_server.agent.init import process_table

log = logging.getLogger(__name__)

CHECK_EVERY_S = 0.25
_FULL_FRACTION = 0.8  # Of the table. The rest is what slots can open until the guard has acted.
_RELEVANT_FRACTION = 1 / 16  # Of the table. To end a slot that has fewer open files would not help.
_AGAIN_AFTER_S = 2.0  # The files of an ended slot are closed by then.


class FileTable(NamedTuple):
    """The table of open files of the machine: how many are open, and how many there can be."""

    open_count: int
    most: int

    @property
    def is_nearly_full(self) -> bool:
        """Whether a slot has to be ended."""
        return self.open_count >= _FULL_FRACTION * self.most


def read_file_table(most: int | None = None) -> FileTable:
    """Read the table of the machine.

    Args:
        most: how many open files there can be; None for what the kernel reports.
    """
    with open("/proc/sys/fs/file-nr", "rb") as file:
        allocated, _, limit = map(int, file.read().split())
    return FileTable(allocated, limit if most is None else most)


def count_descriptors(init_pids: Sequence[int]) -> Dict[int, int]:
    """Count the descriptors of slots. This reads /proc for all their processes, so call it in a thread.

    Args:
        init_pids: the first process of each slot.

    Returns:
        The number of descriptors of each slot, by its first process.
    """
    table = process_table.read_process_table()
    return {init_pid: sum(map(_count_descriptors_of, process_table.find_trees(table, [init_pid]))) for init_pid in init_pids}


def _count_descriptors_of(pid: int) -> int:
    """Return how many descriptors a process has; before Linux 6.2, how many its table has room for. 0 if it has ended."""
    try:
        count = os.stat("/proc/%d/fd" % pid).st_size
        if count:
            return count
        with open("/proc/%d/status" % pid, "rb") as file:
            return next((int(line.split()[1]) for line in file if line.startswith(b"FDSize:")), 0)
    except (FileNotFoundError, ProcessLookupError):
        return 0


def choose_slot(counts: Dict[int, int], table: FileTable) -> tuple[int, bool] | None:
    """Choose the slot to end.

    Args:
        counts: the number of descriptors of each slot, by its first process.
        table: the table of the machine, which is nearly full.

    Returns:
        The first process of the slot, and whether the slot has filled the table alone: it has that many descriptors, and no other slot has many. None if no
        slot has many.
    """
    if not counts:
        return None
    chosen = max(counts, key=lambda pid: counts[pid])
    relevant = _RELEVANT_FRACTION * table.most
    if counts[chosen] < relevant:
        return None
    others = [count for pid, count in counts.items() if pid != chosen]
    return chosen, FileTable(counts[chosen], table.most).is_nearly_full and all(count < relevant for count in others)


class OpenFilesGuard:
    """Ends slots of one agent that fill the table of open files.

    Args:
        runtimes: returns the slot runtimes that exist now.
        read_table: returns the table of the machine.
    """

    def __init__(self, runtimes: Callable[[], Sequence[SlotRuntime]], read_table: Callable[[], FileTable]) -> None:
        self._runtimes = runtimes
        self._read_table = read_table
        self._loop = asyncio.get_event_loop()
        self._task: asyncio.Task[None] | None = None

    def start_checking(self) -> None:
        """Start to check the table periodically."""
        self._task = self._loop.create_task(self._check_periodically())

    async def stop_checking(self) -> None:
        """Stop checking."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _check_periodically(self) -> None:
        while True:
            pause_s = CHECK_EVERY_S
            try:
                table = self._read_table()
                if table.is_nearly_full:
                    await self._end_largest_slot(table)
                    pause_s = _AGAIN_AFTER_S
            except Exception:  # the guard must go on: no failure of one check, not even a defect, may leave the slots unguarded
                log.exception("the open files of slots could not be checked")
            await asyncio.sleep(pause_s)

    async def _end_largest_slot(self, table: FileTable) -> None:
        runtimes = {runtime.init_pid: runtime for runtime in self._runtimes() if not runtime.link.closed}
        counts = await self._loop.run_in_executor(None, count_descriptors, list(runtimes))
        chosen = choose_slot(counts, table)
        if chosen is None:
            log.warning("%d of the machine's %d open files are open, and no slot of this agent has many", table.open_count, table.most)
            return
        pid, own_work = chosen
        if runtimes[pid].link.closed:
            return
        evidence = {"open_files": counts[pid], "machine_open_files": table.open_count, "machine_most_open_files": table.most}
        text = "the machine had %d of its %d open files open, and this slot had most of them: %d"
        await end_slot_for_limit(runtimes[pid], LimitEnd("resource_limit", text % (table.open_count, table.most, counts[pid]), evidence, own_work))
