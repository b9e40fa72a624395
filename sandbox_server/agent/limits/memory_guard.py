"""Ends the slot that is furthest above its share of memory, before the group over all slots of the machine, or over those of this sandbox, is full.

It looks every 100 ms, and at once when the kernel says that a group is almost full. All agents of a machine see the same groups and choose the same slot; the
agent whose slot it is ends it. If that agent does not (it was stopped, or hangs), another one that may does so a second later.
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
from sandbox_server.agent.kernel.memory_groups import MemoryGroups, SlotGroup, mark_ended
from sandbox_server.agent.kernel.memory_plan import MIB, Usage, fills_group_alone, find_furthest_above_share, full_threshold_bytes
from sandbox_server.agent.kernel.slot_limits import write_control_file

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.1
OTHERS_WITHIN_S = 1.0
_GONE_WITHIN_S = 2.0
_STUCK_WITHIN_S = 2.0
_SETTLE_S = 0.3
_EFD_CLOEXEC, _EFD_NONBLOCK = 0o2000000, 0o4000
_libc = ctypes.CDLL(None, use_errno=True)


class MemoryGuard:
    """The guard of one agent.

    Args:
        groups: the groups of memory over all slots.
        bodies: gives what slots run on now, those kept prepared among them.
        on_share: called when the share of this agent's slots has changed.
    """

    def __init__(self, groups: MemoryGroups, bodies: Callable[[], Sequence[SlotRuntime]], on_share: Callable[[], None]) -> None:
        self._groups = groups
        self._bodies = bodies
        self._on_share = on_share
        self._loop = asyncio.get_event_loop()
        self._fds: list[int] = []
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._ending: dict[str, float] = {}  # a slot that was ended -> until when its end is waited for
        self._settled_at = 0.0
        self._chosen: tuple[str, float] | None = None  # another agent's slot, and since when it should be ended
        self._stuck_since: dict[str, float] = {}
        self._share_bytes = groups.share_bytes()

    def start(self) -> None:
        """Begin to look."""
        plan = self._groups.plan
        if plan is not None and self._groups.version == 1:
            for folder, limit in ((self._groups.machine, plan.machine_limit_bytes), (self._groups.own, plan.sandbox_limit_bytes)):
                self._be_told(folder, "memory.usage_in_bytes", str(full_threshold_bytes(limit)))
                self._be_told(folder, "memory.oom_control", "")
        self._task = self._loop.create_task(self._run())

    def _be_told(self, folder: str, name: str, argument: str) -> None:
        """Have the kernel wake this process. Without, it still looks every 100 ms."""
        event_fd = int(_libc.eventfd(0, _EFD_CLOEXEC | _EFD_NONBLOCK))
        if event_fd < 0:
            return
        self._fds.append(event_fd)
        file_fd = os.open(os.path.join(folder, name), os.O_RDONLY | os.O_CLOEXEC)
        self._fds.append(file_fd)
        try:
            write_control_file(os.path.join(folder, "cgroup.event_control"), " ".join(filter(None, (str(event_fd), str(file_fd), argument))))
        except OSError as error:
            log.info("the kernel does not tell when %s of a group rises: %s", name, error)
            return
        self._loop.add_reader(event_fd, self._told, event_fd)

    def _told(self, event_fd: int) -> None:
        os.read(event_fd, 8)
        self._wake.set()

    async def close(self) -> None:
        """Look no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        for fd in self._fds:
            self._loop.remove_reader(fd)
            os.close(fd)
        self._fds.clear()

    async def _run(self) -> None:
        while True:
            try:
                await self._look()
            except Exception:
                log.exception("the memory of slots could not be looked at")
            try:
                await asyncio.wait_for(self._wake.wait(), LOOK_EVERY_S)
            except asyncio.TimeoutError:
                continue
            self._wake.clear()

    async def _look(self) -> None:
        plan = self._groups.plan
        if plan is None:
            return
        share = self._groups.share_bytes()
        if share != self._share_bytes:
            self._share_bytes = share
            self._on_share()
        for folder, limit, everybody in ((self._groups.own, plan.sandbox_limit_bytes, False), (self._groups.machine, plan.machine_limit_bytes, True)):
            if self._groups.is_full(folder, limit):
                await self._relieve(folder, limit, everybody)
            else:
                self._not_stuck(folder)

    async def _relieve(self, folder: str, limit: int, everybody: bool) -> None:
        now = self._loop.time()
        if self._is_awaited(now):
            return
        usages = self._groups.usages(everybody)
        chosen = find_furthest_above_share((slot, usage) for slot, usage in usages if slot.path not in self._ending)
        if chosen is None:
            self._nobody(folder, now)
            return
        slot, usage = chosen
        group_bytes = self._groups.used_bytes(folder)
        others = [other.used_bytes for other_slot, other in usages if other_slot is not slot]
        left_bytes = max(0, group_bytes - usage.used_bytes - sum(others))
        self_inflicted = fills_group_alone(usage.used_bytes, [*others, left_bytes], limit)
        body = self._body_of(slot.path)
        if body is not None:
            self._await_end(slot.path, now)
            await end_slot_for_limit(body, self._end_of(folder, limit, usage, group_bytes, self_inflicted))
        elif not slot.own:
            self._leave_to_others(slot, now, self_inflicted)

    def _is_awaited(self, now: float) -> bool:
        """Whether the memory of a slot that was ended is still being given back."""
        for path, until in list(self._ending.items()):
            if not self._groups.processes(path):
                del self._ending[path]
            elif now <= until:
                self._settled_at = now + _SETTLE_S  # its tmpfs goes a little after its last process
        return now < self._settled_at

    def _await_end(self, path: str, now: float) -> None:
        self._ending[path] = now + _GONE_WITHIN_S
        self._settled_at = now + _SETTLE_S

    def _body_of(self, path: str) -> SlotRuntime | None:
        for body in self._bodies():
            if body.groups.limits is not None and body.groups.limits.memory_folder == path and not body.link.closed:
                return body
        return None

    def _end_of(self, folder: str, limit: int, usage: Usage, group_bytes: int, self_inflicted: bool) -> LimitEnd:
        whose = "the machine's" if folder == self._groups.machine else "the sandbox's"
        evidence = {
            "used_mb": usage.used_bytes // MIB,
            "share_mb": usage.share_bytes // MIB,
            "group": "machine" if folder == self._groups.machine else "sandbox",
            "group_used_mb": group_bytes // MIB,
            "group_limit_mb": limit // MIB,
        }
        text = "%s memory for slots was full, and this slot was furthest above its share: %d MiB of %d MiB"
        return LimitEnd("oom", text % (whose, evidence["used_mb"], evidence["share_mb"]), evidence, self_inflicted)

    def _leave_to_others(self, slot: SlotGroup, now: float, self_inflicted: bool) -> None:
        """Its own agent looks, too. Only if it does nothing, the slot is ended from here, so that its calls end as those of a slot ended for memory."""
        if self._chosen is None or self._chosen[0] != slot.path:
            self._chosen = (slot.path, now)
        elif now - self._chosen[1] > OTHERS_WITHIN_S:
            log.warning("a slot of another agent is ended for want of memory, because that agent does not: %s", slot.path)
            mark_ended(slot.path, self_inflicted)
            self._await_end(slot.path, now)
            for pid in self._groups.processes(slot.path):
                _kill_member(pid, slot.path, self._groups)

    def _nobody(self, folder: str, now: float) -> None:
        """The group is full, and every slot keeps to its share: what fills it was left by slots that have ended (say, a memory file that was passed on).

        Then nothing would ever go on, so the kernel may choose for as long as it is full.
        """
        since = self._stuck_since.setdefault(folder, now)
        if now - since > _STUCK_WITHIN_S and self._groups.is_stuck(folder):
            log.warning("a group of slots is full, though every slot keeps to its share: the kernel chooses what to end in %s", folder)
            self._groups.let_kernel_kill(folder, True)

    def _not_stuck(self, folder: str) -> None:
        if self._stuck_since.pop(folder, None) is not None:
            self._groups.let_kernel_kill(folder, False)


def _kill_member(pid: int, folder: str, groups: MemoryGroups) -> None:
    """Kill a process if it still is in a group when nobody else can get its pid any more."""
    try:
        if not hasattr(os, "pidfd_open") or not hasattr(signal, "pidfd_send_signal"):
            os.kill(pid, signal.SIGKILL)
            return
        fd = os.pidfd_open(pid)
        try:
            if pid in groups.processes(folder):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        finally:
            os.close(fd)
    except ProcessLookupError:
        return  # it has ended by itself
