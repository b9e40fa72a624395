"""The control groups that limit memory: one for all slots of the machine, inside it one for the slots of each agent, and inside those one for each slot.

The group of the machine has a fixed name and lies in the closest group around this process that has a memory limit, else at the top of the hierarchy. So the
agents of several sandboxes and services find the same group without communicating. The name of an agent's group contains the process that created it and its
number of slots. A group whose process no longer runs is ignored, and every agent removes such groups.

On cgroup v1 the kernel does not kill a process when the group of the machine or of an agent is full. Processes that request more memory wait until the agent
has ended the slot that exceeds its share by most. When the group of a slot is full, the kernel kills a process of that slot.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import re
import stat
from typing import Iterator

from sandbox_server.agent.kernel.memory_plan import MemoryPlan, MemoryUsage, full_threshold_bytes
from sandbox_server.agent.kernel.slot_limit_groups import SOCKETS_USAGE, find_number, limit_sockets, write_control_file

SLOTS_GROUP = "sandbox-pool-slots"
SLOT_PREFIX = "limits-"
_MEMORY_GROUP_NAME = re.compile(r"sandbox-pool-(\d+)-[0-9a-f]+-(\d+)-(\d+)-(\d+)\Z")
_UNLIMITED_BYTES = 1 << 60
_MAKE_ROUNDS = 5
_NEEDED = ("memory", "pids")
_OPTIONAL = "cpu"  # The kernel can refuse this controller if real-time threads run.
_READ_BYTES = 16384


@dataclasses.dataclass(frozen=True)
class SlotMemoryGroup:
    """The memory group of one slot of this or of another agent.

    Args:
        path: the folder of the group.
        is_own: whether the slot belongs to this agent.
    """

    path: str
    is_own: bool


@dataclasses.dataclass(frozen=True)
class _Files:
    """The file names and keys of one cgroup version."""

    usage: str
    limit: str
    file_lines: tuple[bytes, ...]  # Keys in `memory.stat` of memory that the kernel can reclaim, such as pages of files.


_V1 = _Files("memory.usage_in_bytes", "memory.limit_in_bytes", (b"total_inactive_file", b"total_active_file"))
_V2 = _Files("memory.current", "memory.max", (b"inactive_file", b"active_file", b"slab_reclaimable"))


def read_number(path: str) -> int | None:
    """Return the number in a control file; None if the file does not exist, has no number, or the number means that there is no limit."""
    try:
        with open(path, "rb") as file:
            word = file.read(_READ_BYTES).strip()
    except OSError:
        return None
    if not word.isdigit():
        return None
    number = int(word)
    return number if number < _UNLIMITED_BYTES else None


def machine_memory_bytes() -> int:
    """Return the memory of this machine, in bytes."""
    with open("/proc/meminfo", "rb") as file:
        return find_number(file.read().replace(b":", b" ").replace(b" kB", b""), b"MemTotal") << 10


def start_ticks(pid: int) -> int | None:
    """Return when a process was started, in clock ticks since boot; None if there is no such process."""
    try:
        with open("/proc/%d/stat" % pid, "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError):
        return None


class MemoryGroups:
    """The memory groups of one agent.

    Args:
        version: the cgroup version of the hierarchy, 1 or 2.
        domain: the folder of the group that contains the group of the machine.
        domain_bytes: the memory limit of that group, in bytes; None if it has none, so that the memory of the machine is the limit.

    Attributes:
        machine: the folder of the group for all slots of the machine.
        own: the folder of the group for the slots of this agent.
        controllers: the controllers that limit slots through these groups. On v1 it is memory alone.
    """

    def __init__(self, version: int, domain: str, domain_bytes: int | None) -> None:
        self.version = version
        self._files = _V1 if version == 1 else _V2
        self.domain = domain
        self.domain_bytes = domain_bytes
        self.machine = ""
        self.own = ""
        self.plan: MemoryPlan | None = None
        self.controllers: tuple[str, ...] = ("memory",)
        self._usage_fds: dict[str, tuple[int, ...]] = {}

    @classmethod
    def find_domain(cls, version: int, mount: str, own_path: str) -> MemoryGroups:
        """Find the group that contains the group of the machine.

        It is the closest group around this process that has a memory limit, else the top of the hierarchy.

        Args:
            version: the cgroup version, 1 or 2.
            mount: where the hierarchy is mounted.
            own_path: the group of this process, relative to the mount.
        """
        files = _V1 if version == 1 else _V2
        path = os.path.normpath(mount + own_path)
        if not os.path.isdir(path):
            path = mount  # The container of this process does not show its own group.
        while True:
            limit = read_number(os.path.join(path, files.limit))
            if limit is not None or os.path.normpath(path) == os.path.normpath(mount):
                return cls(version, path, limit)
            path = os.path.dirname(path)

    def create_groups(self, plan: MemoryPlan, group: str, boot: str) -> None:
        """Create the group of this agent, and the group of the machine if no other agent has created it.

        Args:
            plan: how memory is divided between slots.
            group: the name of the group of the machine.
            boot: the nonce of this agent.

        Raises:
            OSError: groups cannot be created here, or the hierarchy does not have the memory controller.
        """
        self.plan = plan
        self.machine = os.path.join(self.domain, group)
        name = "sandbox-pool-%d-%s-%d-%d-%d" % (os.getpid(), boot[:8], start_ticks(os.getpid()) or 0, plan.slots, plan.share_bytes(plan.slots))
        self.own = os.path.join(self.machine, name)
        for _ in range(_MAKE_ROUNDS):
            try:
                self._create_machine_group(plan)
                os.mkdir(self.own)
            except FileNotFoundError:
                continue  # Another agent has removed the group of the machine at this moment, because it was the last one that used it.
            break
        else:
            raise OSError(errno.ENOENT, "other agents keep removing %s" % self.machine)
        try:
            self._set_limit(self.own, plan.sandbox_hard_limit_bytes, plan.sandbox_limit_bytes)
            if self.version == 2:
                self._enable_controllers(self.own)
                self.controllers = (*_NEEDED, _OPTIONAL) if self._enable_cpu_controller() else _NEEDED
        except OSError:
            os.rmdir(self.own)
            raise
        self.remove_abandoned_groups()

    def _create_machine_group(self, plan: MemoryPlan) -> None:
        if self.version == 2:
            self._enable_controllers(self.domain)
        if not os.path.isdir(self.machine):
            try:
                os.mkdir(self.machine)
            except FileExistsError:
                pass  # Another agent has created it at the same time.
        self._set_limit(self.machine, plan.machine_limit_bytes, plan.machine_limit_bytes)
        if self.version == 2:
            self._enable_controllers(self.machine)

    @staticmethod
    def _enable_controllers(folder: str) -> None:
        with open(os.path.join(folder, "cgroup.subtree_control"), encoding="ascii") as file:
            given = file.read().split()
        for name in _NEEDED:
            if name not in given:
                write_control_file(os.path.join(folder, "cgroup.subtree_control"), "+" + name)

    def _enable_cpu_controller(self) -> bool:
        """Enable the cpu controller for the groups. Returns whether the kernel permits it."""
        try:
            for folder in (self.domain, self.machine, self.own):
                write_control_file(os.path.join(folder, "cgroup.subtree_control"), "+" + _OPTIONAL)
        except OSError:
            return False
        return True

    def _set_limit(self, folder: str, hard_limit_bytes: int, limit_bytes: int) -> None:
        write_control_file(os.path.join(folder, self._files.limit), str(hard_limit_bytes))
        if self.version == 1:
            # Processes that request more memory wait, and the agent decides which slot is ended. New groups below inherit this setting, see `slot_limits`.
            write_control_file(os.path.join(folder, "memory.oom_control"), "1")
            limit_sockets(folder, limit_bytes)
        else:
            # Above this, the kernel slows down processes that request more memory, so that the agent can act before the limit is reached.
            write_control_file(os.path.join(folder, "memory.high"), str(full_threshold_bytes(limit_bytes)))

    def allow_kernel_kill(self, folder: str, allowed: bool) -> None:
        """Set whether the kernel kills processes when a group is full. On v2 it always does."""
        if self.version == 1:
            write_control_file(os.path.join(folder, "memory.oom_control"), "0" if allowed else "1")

    def _charged_bytes(self, folder: str) -> int | None:
        """Return the memory that the kernel has charged to a group and all groups below it, in bytes; None if the group no longer exists.

        On v1 the buffers of sockets have a separate counter, which is added.
        """
        used = read_number(os.path.join(folder, self._files.usage))
        if used is None or self.version != 1:
            return used
        return used + (read_number(os.path.join(folder, SOCKETS_USAGE)) or 0)

    def used_bytes(self, folder: str) -> int:
        """Return how much memory a group and all groups below it use that the kernel cannot reclaim, in bytes; 0 if the group no longer exists."""
        used = self._charged_bytes(folder)
        if used is None:
            return 0
        try:
            with open(os.path.join(folder, "memory.stat"), "rb") as file:
                lines = file.read(_READ_BYTES)
        except OSError:
            return 0
        return max(0, used - sum(find_number(lines, line) for line in self._files.file_lines))

    def _charged_bytes_of_all(self, folder: str) -> int:
        """Return the memory that the kernel has charged to the group of this agent or of the machine, in bytes; 0 if it no longer exists.

        They are read ten times a second and exist as long as this agent, so their files stay open.
        """
        fds = self._usage_fds.get(folder)
        if fds is None:
            paths = [os.path.join(folder, name) for name in ((self._files.usage, SOCKETS_USAGE) if self.version == 1 else (self._files.usage,))]
            fds = self._usage_fds[folder] = tuple(os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in paths if os.path.exists(path))
        try:
            return sum(int(os.pread(fd, _READ_BYTES, 0)) for fd in fds)
        except OSError:
            return 0  # The group no longer exists.

    def is_full(self, folder: str, limit_bytes: int) -> bool:
        """Return whether the group of this agent or of the machine uses so much memory that a slot must be ended."""
        if self._charged_bytes_of_all(folder) < full_threshold_bytes(limit_bytes):
            return False
        return self.is_under_oom(folder) or self.used_bytes(folder) >= full_threshold_bytes(limit_bytes)

    def find_usage_while_full(self, slot_folder: str) -> MemoryUsage | None:
        """Return the memory of a slot of this agent if slots have to wait for memory now; None if neither the sandbox nor the machine is full.

        Args:
            slot_folder: the group of the slot.
        """
        plan = self.plan
        if plan is None or not (self.is_full(self.own, plan.sandbox_limit_bytes) or self.is_full(self.machine, plan.machine_limit_bytes)):
            return None
        return MemoryUsage(self.used_bytes(slot_folder), self.share_bytes())

    def is_under_oom(self, folder: str) -> bool:
        """Return whether a process waits for memory because the group is full. This is always False on v2, where the kernel kills instead."""
        if self.version != 1:
            return False
        try:
            with open(os.path.join(folder, "memory.oom_control"), "rb") as file:
                return find_number(file.read(), b"under_oom") != 0
        except OSError:
            return False

    def _list_agent_groups(self) -> Iterator[tuple[str, bool, int, int]]:
        """Yield the folder of each agent's group, whether its agent runs, its number of slots, and the share of a slot within its sandbox in bytes."""
        try:
            names = os.listdir(self.machine)
        except OSError:
            return
        for name in names:
            match = _MEMORY_GROUP_NAME.match(name)
            if match is not None:
                pid, started, slots, share = (int(word) for word in match.groups())
                yield os.path.join(self.machine, name), start_ticks(pid) == started, slots, share

    def machine_slots(self) -> int:
        """Return how many slots all running agents of this machine have together."""
        return sum(slots for _, lives, slots, _ in self._list_agent_groups() if lives)

    def share_bytes(self) -> int:
        """Return the present share of each slot of this agent, in bytes."""
        return self.plan.share_bytes(self.machine_slots()) if self.plan is not None else 0

    def protected_bytes(self) -> int:
        """Return how much memory the kernel is to protect for a new slot, in bytes: its present share; 0 on v1, which has no such protection."""
        return self.share_bytes() if self.version == 2 else 0

    def measure_usages(self, all_agents: bool) -> list[tuple[SlotMemoryGroup, MemoryUsage]]:
        """Measure the memory of each slot.

        Args:
            all_agents: whether the slots of all running agents of the machine are measured, or only those of this agent.
        """
        if self.plan is None:
            return []
        agents = [agent for agent in self._list_agent_groups() if agent[1]]
        each = full_threshold_bytes(self.plan.machine_limit_bytes) // max(1, sum(slots for _, _, slots, _ in agents))
        found = []
        for path, _, _, most in agents:
            if all_agents or path == self.own:
                share = min(each, most)
                found += [(SlotMemoryGroup(slot, path == self.own), MemoryUsage(self.used_bytes(slot), share)) for slot in _list_slot_groups(path)]
        return found

    def list_processes(self, folder: str) -> list[int]:
        """Return all processes in a group and in the groups below it."""
        found: list[int] = []
        for path, _, _ in os.walk(folder):
            try:
                with open(os.path.join(path, "cgroup.procs"), "rb") as file:
                    found += [int(word) for word in file.read().split()]
            except OSError:
                continue  # The group has been removed meanwhile.
        return found

    def remove_abandoned_groups(self) -> None:
        """Remove the groups of agents that no longer run, if they contain no processes."""
        for path, lives, _, _ in self._list_agent_groups():
            if not lives:
                _remove_tree(path)

    def remove_groups(self) -> None:
        """Remove the group of this agent, and the group of the machine if no other agent uses it."""
        for fds in self._usage_fds.values():
            for fd in fds:
                os.close(fd)
        self._usage_fds.clear()
        for path in (self.own, self.machine):
            if path:
                _remove_tree(path) if path == self.own else _remove_group(path)


def mark_slot_ended(folder: str, own_work: bool) -> None:
    """Mark the group of a slot of another agent, so that this agent knows that its slot was ended because memory was short.

    The mark is the sticky bit of the folder, and also its set-group-ID bit if the slot had filled the memory alone. (A file would need memory.)
    """
    with contextlib.suppress(FileNotFoundError):
        os.chmod(folder, stat.S_IMODE(os.stat(folder).st_mode) | stat.S_ISVTX | (stat.S_ISGID if own_work else 0))


def was_ended_by_another_agent(folder: str) -> bool:
    """Return whether another agent has ended the slot of this group, according to its mark."""
    try:
        return bool(os.stat(folder).st_mode & stat.S_ISVTX)
    except OSError:
        return False


def had_filled_group_alone(folder: str) -> bool:
    """Return whether the slot of this group had filled the memory alone, according to the mark of the agent that has ended it."""
    try:
        return bool(os.stat(folder).st_mode & stat.S_ISGID)
    except OSError:
        return False


def _list_slot_groups(agent: str) -> list[str]:
    try:
        return [os.path.join(agent, name) for name in os.listdir(agent) if name.startswith(SLOT_PREFIX)]
    except OSError:
        return []


def _remove_tree(path: str) -> None:
    for folder, _, _ in os.walk(path, topdown=False):
        _remove_group(folder)


def _remove_group(path: str) -> None:
    try:
        os.rmdir(path)
    except OSError:
        return  # It no longer exists, or a process in it has not ended yet. The next agent that starts tries again.
