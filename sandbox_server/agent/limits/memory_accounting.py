"""Measures the memory of slots from their processes where no control group counts it, and ends slots that use too much.

Anonymous pages, mapped shared memory, open memory files, and the private `/dev/shm` of a slot are counted. Memory that no process shows is not counted: memory
files whose only descriptor is in flight on a socket, detached System V segments, and the buffers of pipes and sockets.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Callable, Dict, Mapping, Sequence, Tuple

from sandbox_server.agent.execution.limit_end import end_slot_for_limit
from sandbox_server.agent.execution.slot_runtime import LimitEnd, SlotRuntime
from sandbox_server.agent.init import process_table
from sandbox_server.agent.kernel.measuring import MAX_DESCRIPTORS, STAT_BLOCK_BYTES, pause_after_measurement_s
from sandbox_server.agent.kernel.memory_groups import MemoryGroups
from sandbox_server.agent.kernel.memory_plan import MIB, MemoryPlan, MemoryUsage, fills_group_alone, find_furthest_above_share, full_threshold_bytes
from sandbox_server.agent.kernel.slot_limit_groups import find_number
from sandbox_server.agent.limits.memory_guard import CHECK_MEMORY_EVERY_S

log = logging.getLogger(__name__)

MEASURE_MEMORY_EVERY_S = 1.0
_MEMORY_FILES = ("/memfd:", "/SYSV", "/dev/zero", "/dev/shm/")

NOT_COUNTED = "memory held only by descriptors in flight on sockets, by detached System V segments, or by buffers of pipes and sockets"


def available_bytes() -> int:
    """Return how much memory of the machine is available, in bytes."""
    with open("/proc/meminfo", "rb") as file:
        return find_number(file.read().replace(b":", b" ").replace(b" kB", b""), b"MemAvailable") << 10


def measure_slots(init_pids: Sequence[int]) -> Dict[int, int]:
    """Measure the memory of slots. This reads files of all their processes, so call it in a thread.

    Args:
        init_pids: the first process of each slot.

    Returns:
        The memory of each slot in bytes, by its first process.
    """
    table = process_table.read_process_table()
    return {init_pid: _measure(init_pid, process_table.find_trees(table, [init_pid])) for init_pid in init_pids}


def _measure(init_pid: int, pids: set[int]) -> int:
    anonymous = mapped = 0
    files: Dict[Tuple[int, int], int] = {}
    left = MAX_DESCRIPTORS
    for pid in pids:
        process_anonymous, process_mapped = _read_process_memory(pid)
        anonymous += process_anonymous
        mapped += process_mapped
        left = _add_memory_files(pid, files, left)
    return anonymous + max(mapped, sum(files.values()) + _private_shm_bytes(init_pid))


def _read_process_memory(pid: int) -> Tuple[int, int]:
    """Return the anonymous and the mapped shared memory of a process, in bytes. A page that several processes share is counted in parts."""
    try:
        with open("/proc/%d/smaps_rollup" % pid, "rb") as file:
            lines = file.read().replace(b":", b" ").replace(b" kB", b"")
    except OSError:
        return 0, 0  # The process has ended, or the kernel is older than 4.14.
    whole = find_number(lines, b"Pss")
    shared = find_number(lines, b"Pss_Shmem")
    anonymous = find_number(lines, b"Pss_Anon") if b"Pss_Anon" in lines else whole
    return anonymous << 10, shared << 10


def _add_memory_files(pid: int, files: Dict[Tuple[int, int], int], left: int) -> int:
    folder = "/proc/%d/fd" % pid
    try:
        names = os.listdir(folder)
    except OSError:
        return left
    for name in names[: max(0, left)]:
        path = os.path.join(folder, name)
        try:
            if not os.readlink(path).startswith(_MEMORY_FILES):
                continue
            info = os.stat(path)  # Information about the open file; no path that the slot has chosen is used.
        except OSError:
            continue
        files[info.st_dev, info.st_ino] = info.st_blocks * STAT_BLOCK_BYTES
    return left - len(names)


def _private_shm_bytes(init_pid: int) -> int:
    path = "/proc/%d/root/dev/shm" % init_pid
    try:
        if os.stat(path).st_dev == os.stat("/dev/shm").st_dev:
            return 0  # It is the /dev/shm of the machine, which all slots share.
        figures = os.statvfs(path)
    except OSError:
        return 0
    return (figures.f_blocks - figures.f_bfree) * figures.f_frsize


class AccountingGuard:
    """Measures slots periodically and ends the ones that use too much memory.

    Args:
        plan: how memory is divided between slots.
        domain: the group around this process, whose limit counts like that of the machine; None if there is none.
        runtimes: returns the slot runtimes that exist now.
        measure: returns the memory of slots in bytes, by their first processes.
        available: returns how much memory of the machine is available, in bytes.
    """

    def __init__(
        self,
        plan: MemoryPlan,
        domain: MemoryGroups | None,
        runtimes: Callable[[], Sequence[SlotRuntime]],
        measure: Callable[[Sequence[int]], Mapping[int, int]] = measure_slots,
        available: Callable[[], int] = available_bytes,
    ) -> None:
        self._plan = plan
        self._domain = domain
        self._runtimes = runtimes
        self._measure = measure
        self._available = available
        self._loop = asyncio.get_event_loop()
        self._task: asyncio.Task[None] | None = None

    def start_checking(self) -> None:
        """Start to measure periodically."""
        self._task = self._loop.create_task(self._check_periodically())

    async def stop_checking(self) -> None:
        """Stop measuring."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _check_periodically(self) -> None:
        due = 0.0
        while True:
            try:
                if self._loop.time() >= due or self._is_machine_full():
                    began = self._loop.time()
                    await self._check_slots()
                    due = self._loop.time() + pause_after_measurement_s(self._loop.time() - began, MEASURE_MEMORY_EVERY_S)
            except Exception:  # the guard must go on: no failure of one check, not even a defect, may leave the slots unguarded
                log.exception("the memory of slots could not be measured")
            await asyncio.sleep(CHECK_MEMORY_EVERY_S)

    def _is_machine_full(self) -> bool:
        reserve = self._plan.machine_bytes - self._plan.machine_limit_bytes
        if self._available() < reserve:
            return True
        domain = self._domain
        return domain is not None and domain.domain_bytes is not None and domain.domain_bytes - domain.used_bytes(domain.domain) < reserve

    async def _check_slots(self) -> None:
        runtimes = {runtime.init_pid: runtime for runtime in self._runtimes() if not runtime.link.closed}
        used = await self._loop.run_in_executor(None, self._measure, list(runtimes))
        over = {pid: size for pid, size in used.items() if size > self._plan.ceiling_bytes}
        for pid, size in over.items():
            await end_slot_for_limit(runtimes[pid], self._over_ceiling(size))
        kept = {pid: size for pid, size in used.items() if pid not in over and not runtimes[pid].link.closed}
        is_sandbox_full = sum(kept.values()) >= full_threshold_bytes(self._plan.sandbox_limit_bytes)
        if over or not (is_sandbox_full or self._is_machine_full()):
            return
        share = self._plan.share_bytes(self._plan.slots)
        chosen = find_furthest_above_share((pid, MemoryUsage(size, share)) for pid, size in kept.items())
        if chosen is not None:
            others = [size for pid, size in kept.items() if pid != chosen[0]]
            await end_slot_for_limit(runtimes[chosen[0]], self._above_share(chosen[1], others, "sandbox" if is_sandbox_full else "machine"))

    def _over_ceiling(self, size: int) -> LimitEnd:
        used, limit = size // MIB, self._plan.ceiling_bytes // MIB
        evidence = {"used_mb": used, "limit_mb": limit, "measured_by": "accounting"}
        return LimitEnd("oom", "the slot used %d MiB of memory, and its limit is %d MiB" % (used, limit), evidence, own_work=True)

    def _above_share(self, usage: MemoryUsage, others: Sequence[int], what: str) -> LimitEnd:
        used, share = usage.used_bytes // MIB, usage.share_bytes // MIB
        evidence = {"used_mb": used, "share_mb": share, "group": what, "measured_by": "accounting"}
        text = "the %s's memory for slots was full, and this slot exceeded its share by most: it used %d MiB, and its share is %d MiB"
        limit_bytes = self._plan.sandbox_limit_bytes if what == "sandbox" else self._plan.machine_limit_bytes
        return LimitEnd("oom", text % (what, used, share), evidence, fills_group_alone(usage.used_bytes, others, limit_bytes))
