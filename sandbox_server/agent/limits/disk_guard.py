"""Keeps space free on the file systems that slots and this agent write to. On the local backend that includes the file system of the state folder.

Every 250 ms the guard reads how much space is free, which is cheap. Only if that is too little, it measures the slots and ends the one that uses most. Agents
that share a file system do not communicate: the more space the largest slot of an agent uses, the earlier this agent acts, and each agent checks the free
space again before it acts. If slots have a limit of their own (`slot_disk_mb`), they are also measured every few seconds.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from typing import Callable, Sequence

from sandbox_server.agent.execution.limit_end import end_slot_for_limit
from sandbox_server.agent.execution.slot_runtime import LimitEnd, SlotRuntime
from sandbox_server.agent.kernel.measuring import pause_after_measurement_s
from sandbox_server.agent.kernel.memory_plan import MIB
from sandbox_server.agent.limits.disk_plan import Space, choose_slot_to_end, compute_reserve
from sandbox_server.agent.limits.disk_usage import DiskUsage, measure_disk

log = logging.getLogger(__name__)

CHECK_DISK_EVERY_S = 0.25
MEASURE_DISK_EVERY_S = 2.0
_MEASURE_WITHIN_S = 15.0  # One slot. What was not reached by then is not counted.
_OTHERS_FIRST_S = 0.5  # The less of the disk the largest slot of this agent uses, the longer it waits for other agents to act: at most so long.
_AGAIN_AFTER_S = 5.0  # After a slot was ended, or none used much, the slots of that file system are measured again only after this time.
_DELETED_WITHIN_S = 60.0  # While the files of an ended slot are being deleted, no other slot is ended, but at most for so long.


class SlotFolders:
    """A slot that may be ended, and the folders of the agent that it fills.

    Args:
        runtime: the runtime of the slot.
        folders: the paths of the folders.
    """

    def __init__(self, runtime: SlotRuntime, folders: Sequence[str]) -> None:
        self.runtime = runtime
        self.folders = folders


class DiskGuard:
    """Ends slots of one agent that use too much disk space.

    Args:
        base_dir: the folder of the agent. Its file system is guarded even if no slots are on it.
        slots: returns the slots that exist now.
        slot_bytes: how much one slot may use, in bytes; None if there is no limit.
        reserve_bytes: how much must stay free, in bytes; None for the default of `disk_plan`.
        is_deleting: returns whether the remains of slots are being deleted.
        space_of: returns the space of the file system of a path.
    """

    def __init__(
        self,
        base_dir: str,
        slots: Callable[[], Sequence[SlotFolders]],
        slot_bytes: int | None,
        reserve_bytes: int | None,
        is_deleting: Callable[[], bool],
        space_of: Callable[[str], Space] | None = None,
    ) -> None:
        self._base_dir = base_dir
        self._slots = slots
        self._slot_bytes = slot_bytes
        self._reserve_bytes = reserve_bytes
        self._is_deleting = is_deleting
        self._space_of = space_of if space_of is not None else space_of_path
        self._loop = asyncio.get_event_loop()
        self._task: asyncio.Task[None] | None = None
        self._stopped = threading.Event()
        self._not_before: dict[int, float] = {}  # Maps a device to the time from which its slots may be measured again.
        self._deleted_until = 0.0  # Until this time no slot is ended while an ended slot is being deleted.

    def start_checking(self) -> None:
        """Start to check the file systems periodically."""
        self._task = self._loop.create_task(self._check_periodically())

    async def stop_checking(self) -> None:
        """Stop checking."""
        self._stopped.set()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _check_periodically(self) -> None:
        due = self._loop.time() + MEASURE_DISK_EVERY_S
        while True:
            try:
                for device, path in self._file_systems().items():
                    await self._check_file_system(device, path)
                if self._slot_bytes is not None and self._loop.time() >= due:
                    began = self._loop.time()
                    await self._check_limits(self._slot_bytes)
                    due = self._loop.time() + pause_after_measurement_s(self._loop.time() - began, MEASURE_DISK_EVERY_S)
            except Exception:  # the guard must go on: no failure of one check, not even a defect, may leave the slots unguarded
                log.exception("the disk usage of slots could not be checked")
            await asyncio.sleep(CHECK_DISK_EVERY_S)

    def _file_systems(self) -> dict[int, str]:
        """Return one folder of the agent for each device that has one."""
        found = {os.stat(self._base_dir).st_dev: self._base_dir}
        for parent in {os.path.dirname(slot.runtime.dirs.root) for slot in self._slots()}:
            found.setdefault(os.stat(parent).st_dev, parent)
        return found

    async def _check_file_system(self, device: int, path: str) -> None:
        space = self._space_of(path)
        reserve = compute_reserve(space, self._reserve_bytes)
        now = self._loop.time()
        if not reserve.is_exceeded(space) or now < self._not_before.get(device, 0.0) or (now < self._deleted_until and self._is_deleting()):
            return
        uses = await self._measure(device)
        chosen = choose_slot_to_end(((slot, use.size_bytes, use.entries) for slot, use in uses), space, reserve)
        if chosen is None:
            self._not_before[device] = self._loop.time() + _AGAIN_AFTER_S
            log.warning("less than %d MiB or %d files are free in %s, and no slot of this agent uses much", reserve.size_bytes // MIB, reserve.files, path)
            return
        use = next(use for slot, use in uses if slot is chosen)
        used = max(1, space.size_bytes - space.free_bytes)
        await asyncio.sleep(_OTHERS_FIRST_S * (1 - min(1.0, use.size_bytes / used)))
        space = self._space_of(path)
        if not reserve.is_exceeded(space) or chosen.runtime.link.closed:
            return
        evidence = {
            "used_mb": use.size_bytes // MIB,
            "entries": use.entries,
            "free_mb": space.free_bytes // MIB,
            "must_stay_free_mb": reserve.size_bytes // MIB,
            "free_files": space.free_files,
        }
        text = "the disk was nearly full (%d MiB and %d files free), and this slot used most of it: %d MiB in %d files"
        error = text % (space.free_bytes // MIB, space.free_files, use.size_bytes // MIB, use.entries)
        self._not_before[device] = self._loop.time() + _AGAIN_AFTER_S  # Meanwhile the slot is reset, which deletes its files.
        self._deleted_until = self._loop.time() + _DELETED_WITHIN_S
        others = [(other.size_bytes, other.entries) for slot, other in uses if slot is not chosen]
        own_work = reserve.is_exceeded_by((use.size_bytes, use.entries), others, space)
        await end_slot_for_limit(chosen.runtime, LimitEnd("resource_limit", error, evidence, own_work))

    async def _measure(self, device: int | None) -> list[tuple[SlotFolders, DiskUsage]]:
        """Measure the disk usage of the slots, one after another in a thread.

        Args:
            device: the file system that counts; None for all.
        """
        found = []
        for slot in self._slots():
            if slot.runtime.link.closed:
                continue
            folders = [folder for folder in slot.folders if device is None or _device_of(folder) == device]
            until = time.monotonic() + _MEASURE_WITHIN_S
            use = await self._loop.run_in_executor(None, measure_disk, folders, slot.runtime.init_pid, until, self._stopped.is_set)
            found.append((slot, use))
        return found

    async def _check_limits(self, slot_bytes: int) -> None:
        for slot, use in await self._measure(None):
            if use.size_bytes > slot_bytes and not slot.runtime.link.closed:
                used, limit = use.size_bytes // MIB, slot_bytes // MIB
                error = "the slot used %d MiB of disk space, and its limit is %d MiB" % (used, limit)
                evidence = {"used_mb": used, "limit_mb": limit, "entries": use.entries, "measured_by": "accounting"}
                await end_slot_for_limit(slot.runtime, LimitEnd("resource_limit", error, evidence, own_work=True))


def space_of_path(path: str) -> Space:
    """Return the space of the file system that a folder is on."""
    figures = os.statvfs(path)
    return Space(figures.f_blocks * figures.f_frsize, figures.f_bavail * figures.f_frsize, figures.f_files, figures.f_favail)


def _device_of(folder: str) -> int:
    try:
        return os.lstat(folder).st_dev
    except OSError:
        return -1
