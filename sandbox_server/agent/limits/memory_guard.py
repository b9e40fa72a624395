"""Ends the slot that exceeds its share of memory by most, before the group of all slots of the machine or of this sandbox is full.

The guard checks the groups every 100 ms, and at once when the kernel reports that a group is almost full. All agents of a machine see the same groups and
choose the same slot. The agent that owns the slot ends it. If that agent does not do so within a second, because it was stopped or hangs, another agent that
is permitted to signal the processes of the slot kills them.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
from typing import Callable, Sequence

from sandbox_server.agent.execution.limit_end import end_slot_for_limit
from sandbox_server.agent.execution.slot_runtime import LimitEnd, SlotRuntime
from sandbox_server.agent.kernel.memory_groups import MemoryGroups, SlotMemoryGroup, mark_slot_ended, was_ended_by_another_agent
from sandbox_server.agent.kernel.memory_plan import MIB, MemoryUsage, fills_group_alone, find_furthest_above_share, full_threshold_bytes
from sandbox_server.agent.kernel.slot_limit_groups import write_control_file

log = logging.getLogger(__name__)

CHECK_MEMORY_EVERY_S = 0.1
_UPDATE_SHARE_EVERY_S = 1.0  # To count the slots of all agents costs more than to check whether a group is full, and no slot is ended by the count.
OWNER_WITHIN_S = 1.0  # After this time another agent than the owner kills the processes of the chosen slot.
_FREED_WITHIN_S = 2.0  # While the processes of an ended slot still end, no other slot is ended, but at most for so long.
_STUCK_WITHIN_S = 2.0  # After this time in a full group in which every slot is within its share, the kernel may kill processes.
_SETTLE_S = 0.3  # The kernel frees the last memory of a slot slightly after its last process.
_EFD_CLOEXEC, _EFD_NONBLOCK = 0o2000000, 0o4000
_libc = ctypes.CDLL(None, use_errno=True)


class MemoryGuard:
    """The memory guard of one agent.

    Args:
        groups: the memory groups of all slots.
        runtimes: returns the slot runtimes that exist now, including prepared ones.
        on_share: called when the share of the slots of this agent has changed.
    """

    def __init__(self, groups: MemoryGroups, runtimes: Callable[[], Sequence[SlotRuntime]], on_share: Callable[[], None]) -> None:
        self._groups = groups
        self._runtimes = runtimes
        self._on_share = on_share
        self._loop = asyncio.get_event_loop()
        self._fds: list[int] = []
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._ending: dict[str, float] = {}  # Maps the group of an ended slot to the time until which its memory is expected back.
        self._settled_at = 0.0
        self._chosen: tuple[str, float] | None = None  # The group of another agent's slot, and since when it should have been ended.
        self._stuck_since: dict[str, float] = {}
        self._share_bytes = groups.share_bytes()
        self._share_due_at = 0.0

    def start_checking(self) -> None:
        """Start to check the groups periodically."""
        plan = self._groups.plan
        if plan is not None and self._groups.version == 1:
            for folder, limit in ((self._groups.machine, plan.machine_limit_bytes), (self._groups.own, plan.sandbox_limit_bytes)):
                self._register_notification(folder, "memory.usage_in_bytes", str(full_threshold_bytes(limit)))
                self._register_notification(folder, "memory.oom_control", "")
        self._task = self._loop.create_task(self._check_periodically())

    def _register_notification(self, folder: str, name: str, argument: str) -> None:
        """Register for a notification of the kernel (cgroup v1). If this is not possible, the guard still checks every 100 ms.

        Args:
            folder: the control group.
            name: the control file that is observed.
            argument: the threshold, or empty if the file has none.
        """
        event_fd = int(_libc.eventfd(0, _EFD_CLOEXEC | _EFD_NONBLOCK))
        if event_fd < 0:
            return
        self._fds.append(event_fd)
        file_fd = os.open(os.path.join(folder, name), os.O_RDONLY | os.O_CLOEXEC)
        self._fds.append(file_fd)
        try:
            write_control_file(os.path.join(folder, "cgroup.event_control"), " ".join(filter(None, (str(event_fd), str(file_fd), argument))))
        except OSError as error:
            log.info("the kernel sends no notifications for %s: %s", name, error)
            return
        self._loop.add_reader(event_fd, self._on_notification, event_fd)

    def _on_notification(self, event_fd: int) -> None:
        os.read(event_fd, 8)
        self._wake.set()

    async def stop_checking(self) -> None:
        """Stop checking."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        for fd in self._fds:
            self._loop.remove_reader(fd)
            os.close(fd)
        self._fds.clear()

    async def _check_periodically(self) -> None:
        while True:
            try:
                await self._check_groups()
            except Exception:  # the guard must go on: no failure of one check, not even a defect, may leave the slots unguarded
                log.exception("the memory of slots could not be checked")
            timer = self._loop.call_later(CHECK_MEMORY_EVERY_S, self._wake.set)  # cheaper than `asyncio.wait_for`, which starts a task each time
            try:
                await self._wake.wait()
            finally:
                timer.cancel()
            self._wake.clear()

    async def _check_groups(self) -> None:
        plan = self._groups.plan
        if plan is None:
            return
        self._update_share()
        for folder, limit, all_agents in ((self._groups.own, plan.sandbox_limit_bytes, False), (self._groups.machine, plan.machine_limit_bytes, True)):
            if self._groups.is_full(folder, limit):
                await self._end_one_slot(folder, limit, all_agents)
            else:
                self._forbid_kernel_kill(folder)
                if all_agents:
                    self._chosen = None  # Its memory is there again. Later another holder of that slot may be chosen, whose agent then gets its second, too.

    def _update_share(self) -> None:
        now = self._loop.time()
        if now < self._share_due_at:
            return
        self._share_due_at = now + _UPDATE_SHARE_EVERY_S
        share = self._groups.share_bytes()
        if share != self._share_bytes:
            self._share_bytes = share
            self._on_share()

    async def _end_one_slot(self, folder: str, limit: int, all_agents: bool) -> None:
        now = self._loop.time()
        if self._is_freeing_memory(now):
            return
        usages = self._groups.measure_usages(all_agents)
        # A marked slot is being ended by the agent that marked it: ending it here, too, would overwrite what its calls report.
        remaining = [(slot, usage) for slot, usage in usages if slot.path not in self._ending and not was_ended_by_another_agent(slot.path)]
        chosen = find_furthest_above_share(remaining)
        if chosen is None:
            self._allow_kernel_if_stuck(folder, now)
            return
        slot, usage = chosen
        group_bytes = self._groups.used_bytes(folder)
        others = [other.used_bytes for other_slot, other in usages if other_slot is not slot]
        left_bytes = max(0, group_bytes - usage.used_bytes - sum(others))
        own_work = fills_group_alone(usage.used_bytes, [*others, left_bytes], limit)
        runtime = self._find_runtime(slot.path)
        if runtime is not None:
            self._record_ended(slot.path, now)
            await end_slot_for_limit(runtime, self._describe_end(folder, limit, usage, group_bytes, own_work))
        elif not slot.is_own:
            self._end_if_owner_does_not(slot, now, own_work)

    def _is_freeing_memory(self, now: float) -> bool:
        """Return whether the memory of an ended slot is still being freed."""
        for path, until in list(self._ending.items()):
            if not self._groups.list_processes(path):
                del self._ending[path]
            elif now <= until:
                self._settled_at = now + _SETTLE_S
        return now < self._settled_at

    def _record_ended(self, path: str, now: float) -> None:
        self._ending[path] = now + _FREED_WITHIN_S
        self._settled_at = now + _SETTLE_S

    def _find_runtime(self, path: str) -> SlotRuntime | None:
        for runtime in self._runtimes():
            if runtime.groups.limits is not None and runtime.groups.limits.memory_folder == path and not runtime.link.closed:
                return runtime
        return None

    def _describe_end(self, folder: str, limit: int, usage: MemoryUsage, group_bytes: int, own_work: bool) -> LimitEnd:
        whose = "the machine's" if folder == self._groups.machine else "the sandbox's"
        evidence = {
            "used_mb": usage.used_bytes // MIB,
            "share_mb": usage.share_bytes // MIB,
            "group": "machine" if folder == self._groups.machine else "sandbox",
            "group_used_mb": group_bytes // MIB,
            "group_limit_mb": limit // MIB,
        }
        text = "%s memory for slots was full, and this slot exceeded its share by most: it used %d MiB, and its share is %d MiB"
        return LimitEnd("oom", text % (whose, evidence["used_mb"], evidence["share_mb"]), evidence, own_work)

    def _end_if_owner_does_not(self, slot: SlotMemoryGroup, now: float, own_work: bool) -> None:
        """Give the agent that owns the slot a second to end it, and else end it from here.

        The mark on its group then tells the other agent that its calls ended because memory was short.
        """
        if self._chosen is None or self._chosen[0] != slot.path:
            self._chosen = (slot.path, now)
        elif now - self._chosen[1] > OWNER_WITHIN_S:
            log.warning("ending a slot of another agent because memory is short and that agent does not end it: %s", slot.path)
            mark_slot_ended(slot.path, own_work)
            self._record_ended(slot.path, now)
            for pid in self._groups.list_processes(slot.path):
                _kill_member(pid, slot.path, self._groups)

    def _allow_kernel_if_stuck(self, folder: str, now: float) -> None:
        """Handle a group that is full although every slot is within its share.

        Then memory that ended slots have left fills the group, for example a memory file that was passed to another slot. Processes in the group would wait
        for ever, so the kernel is allowed to kill processes in it until it is no longer full.
        """
        since = self._stuck_since.setdefault(folder, now)
        if now - since > _STUCK_WITHIN_S and self._groups.is_under_oom(folder):
            log.warning("a group is full although every slot is within its share: allowing the kernel to kill processes in %s", folder)
            self._groups.allow_kernel_kill(folder, True)

    def _forbid_kernel_kill(self, folder: str) -> None:
        if self._stuck_since.pop(folder, None) is not None:
            self._groups.allow_kernel_kill(folder, False)


def _kill_member(pid: int, folder: str, groups: MemoryGroups) -> None:
    """Kill a process if it is still in a group. A pidfd makes sure that its pid has not been reused."""
    try:
        if not hasattr(os, "pidfd_open") or not hasattr(signal, "pidfd_send_signal"):
            os.kill(pid, signal.SIGKILL)
            return
        fd = os.pidfd_open(pid)
        try:
            if pid in groups.list_processes(folder):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        finally:
            os.close(fd)
    except ProcessLookupError:
        return  # It has ended by itself.
