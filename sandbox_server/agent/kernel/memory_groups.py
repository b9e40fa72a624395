"""The control groups of memory: one over all slots of the machine, in it one over each agent's slots, in those one for each slot.

The machine's group has a fixed name and lies in the closest group around this process that has a limit of memory, else at the top of the hierarchy. So agents
of several sandboxes and services find it without asking anybody. The name of an agent's group says which process made it and how many slots it has; a group
whose process is gone counts for nothing and is removed by whoever meets it.

On cgroup v1 the kernel kills nobody when the group of a machine or an agent is full: what asks for more memory waits, until the agent has ended the slot
that is furthest above its share. A slot's own group does kill, inside that slot.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import re
import stat
from typing import Iterator

from sandbox_server.agent.kernel.memory_plan import MemoryPlan, Usage, full_at
from sandbox_server.agent.kernel.slot_limits import SOCKETS_USAGE, find, limit_sockets, write

SLOTS_GROUP = "sandbox-pool-slots"
SLOT_PREFIX = "limits-"
_AGENT = re.compile(r"sandbox-pool-(\d+)-[0-9a-f]+-(\d+)-(\d+)-(\d+)\Z")
_UNLIMITED_BYTES = 1 << 60
_MAKE_ROUNDS = 5
_NEEDED = ("memory", "pids")
_WELCOME = "cpu"  # a kernel may refuse it, where real-time threads run
_READ_BYTES = 16384


@dataclasses.dataclass(frozen=True)
class SlotGroup:
    """A slot's group, whoever's it is."""

    path: str
    own: bool


@dataclasses.dataclass(frozen=True)
class _Files:
    """What a hierarchy calls things."""

    usage: str
    limit: str
    file_lines: tuple[bytes, ...]  # of `memory.stat`: pages of files, which the kernel takes back by itself


_V1 = _Files("memory.usage_in_bytes", "memory.limit_in_bytes", (b"total_inactive_file", b"total_active_file"))
_V2 = _Files("memory.current", "memory.max", (b"inactive_file", b"active_file", b"slab_reclaimable"))


def read_number(path: str) -> int | None:
    """The number in a control file; None: there is none, or it means no limit."""
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
    """The memory of this machine."""
    with open("/proc/meminfo", "rb") as file:
        return find(file.read().replace(b":", b" ").replace(b" kB", b""), b"MemTotal") << 10


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None: there is no such process."""
    try:
        with open("/proc/%d/stat" % pid, "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError):
        return None


class MemoryGroups:
    """The groups of one agent.

    Args:
        version: 1 or 2, of the hierarchy.
        domain: the group in which the machine's group lies.
        domain_bytes: the limit of that group; None: it has none, and the machine's memory is what there is.
    """

    def __init__(self, version: int, domain: str, domain_bytes: int | None) -> None:
        self.version = version
        self._files = _V1 if version == 1 else _V2
        self.domain = domain
        self.domain_bytes = domain_bytes
        self.machine = ""
        self.own = ""
        self.plan: MemoryPlan | None = None
        #: What the groups of slots limit, on v2; on v1 it is memory alone.
        self.controllers: tuple[str, ...] = ("memory",)

    @classmethod
    def around(cls, version: int, mount: str, own_path: str) -> MemoryGroups:
        """Find where the machine's group belongs: in the closest group around this process that has a limit, else at the top of the hierarchy."""
        files = _V1 if version == 1 else _V2
        path = os.path.normpath(mount + own_path)
        if not os.path.isdir(path):
            path = mount  # a container that does not see its own group
        while True:
            limit = read_number(os.path.join(path, files.limit))
            if limit is not None or os.path.normpath(path) == os.path.normpath(mount):
                return cls(version, path, limit)
            path = os.path.dirname(path)

    def make(self, plan: MemoryPlan, group: str, boot: str) -> None:
        """Make the machine's group, where no other agent has, and this agent's own.

        Raises:
            OSError: it is not allowed here, or the hierarchy has no controller of memory to give.
        """
        self.plan = plan
        self.machine = os.path.join(self.domain, group)
        name = "sandbox-pool-%d-%s-%d-%d-%d" % (os.getpid(), boot[:8], start_ticks(os.getpid()) or 0, plan.slots, plan.share_bytes(plan.slots))
        self.own = os.path.join(self.machine, name)
        for _ in range(_MAKE_ROUNDS):
            try:
                self._make_machine(plan)
                os.mkdir(self.own)
            except FileNotFoundError:
                continue  # the last agent of before has just removed the machine's group
            break
        else:
            raise OSError(errno.ENOENT, "other agents keep removing %s" % self.machine)
        try:
            self._limit(self.own, plan.sandbox_limit_bytes)
            if self.version == 2:
                self._give_controllers(self.own)
                self.controllers = (*_NEEDED, _WELCOME) if self._give_processor() else _NEEDED
        except OSError:
            os.rmdir(self.own)
            raise
        self.sweep()

    def _make_machine(self, plan: MemoryPlan) -> None:
        if self.version == 2:
            self._give_controllers(self.domain)
        if not os.path.isdir(self.machine):
            try:
                os.mkdir(self.machine)
            except FileExistsError:
                pass  # another agent was quicker
        self._limit(self.machine, plan.machine_limit_bytes)
        if self.version == 2:
            self._give_controllers(self.machine)

    @staticmethod
    def _give_controllers(folder: str) -> None:
        with open(os.path.join(folder, "cgroup.subtree_control"), encoding="ascii") as file:
            given = file.read().split()
        for name in _NEEDED:
            if name not in given:
                write(os.path.join(folder, "cgroup.subtree_control"), "+" + name)

    def _give_processor(self) -> bool:
        """Have the groups share out the processor, too. Returns whether they do."""
        try:
            for folder in (self.domain, self.machine, self.own):
                write(os.path.join(folder, "cgroup.subtree_control"), "+" + _WELCOME)
        except OSError:
            return False
        return True

    def _limit(self, folder: str, limit_bytes: int) -> None:
        write(os.path.join(folder, self._files.limit), str(limit_bytes))
        if self.version == 1:
            # Who asks for more waits; the agent decides which slot goes. Groups made below begin with this setting, see `slot_limits`.
            write(os.path.join(folder, "memory.oom_control"), "1")
            limit_sockets(folder, limit_bytes)
        else:
            write(os.path.join(folder, "memory.high"), str(full_at(limit_bytes)))  # slows down who asks for more, so that the agent comes first

    def let_kernel_kill(self, folder: str, allowed: bool) -> None:
        """Whether the kernel may kill in a full group (v1; on v2 it always may)."""
        if self.version == 1:
            write(os.path.join(folder, "memory.oom_control"), "0" if allowed else "1")

    # Looking.

    def _charged_bytes(self, folder: str) -> int | None:
        """What the kernel has counted for a group and all below it; None: the group is gone. On v1 the buffers of sockets have a counter of their own."""
        used = read_number(os.path.join(folder, self._files.usage))
        if used is None or self.version != 1:
            return used
        return used + (read_number(os.path.join(folder, SOCKETS_USAGE)) or 0)

    def used_bytes(self, folder: str) -> int:
        """What a group and all below it use that the kernel cannot take back by itself; 0: the group is gone."""
        used = self._charged_bytes(folder)
        if used is None:
            return 0
        try:
            with open(os.path.join(folder, "memory.stat"), "rb") as file:
                lines = file.read(_READ_BYTES)
        except OSError:
            return 0
        return max(0, used - sum(find(lines, line) for line in self._files.file_lines))

    def is_full(self, folder: str, limit_bytes: int) -> bool:
        """Whether a group uses so much that a slot must go."""
        used = self._charged_bytes(folder)
        if used is None or used < full_at(limit_bytes):
            return False
        return self.is_stuck(folder) or self.used_bytes(folder) >= full_at(limit_bytes)

    def is_stuck(self, folder: str) -> bool:
        """Whether something waits for memory in a full group (v1)."""
        if self.version != 1:
            return False
        try:
            with open(os.path.join(folder, "memory.oom_control"), "rb") as file:
                return find(file.read(), b"under_oom") != 0
        except OSError:
            return False

    def _agents(self) -> Iterator[tuple[str, bool, int, int]]:
        """Path, whether its agent lives, slots, and share of slots by its sandbox, of every agent's group."""
        try:
            names = os.listdir(self.machine)
        except OSError:
            return
        for name in names:
            match = _AGENT.match(name)
            if match is not None:
                pid, started, slots, share = (int(word) for word in match.groups())
                yield os.path.join(self.machine, name), start_ticks(pid) == started, slots, share

    def machine_slots(self) -> int:
        """How many slots the living agents of this machine have."""
        return sum(slots for _, lives, slots, _ in self._agents() if lives)

    def share_bytes(self) -> int:
        """The share of each of this agent's slots now."""
        return self.plan.share_bytes(self.machine_slots()) if self.plan is not None else 0

    def usages(self, everybody: bool) -> list[tuple[SlotGroup, Usage]]:
        """What each slot uses: of this agent, or of all living agents of the machine."""
        if self.plan is None:
            return []
        agents = [agent for agent in self._agents() if agent[1]]
        each = full_at(self.plan.machine_limit_bytes) // max(1, sum(slots for _, _, slots, _ in agents))
        found = []
        for path, _, _, most in agents:
            if everybody or path == self.own:
                share = min(each, most)
                found += [(SlotGroup(slot, path == self.own), Usage(self.used_bytes(slot), share)) for slot in _slots_of(path)]
        return found

    def processes(self, folder: str) -> list[int]:
        """Every process in a slot's group and below."""
        found: list[int] = []
        for path, _, _ in os.walk(folder):
            try:
                with open(os.path.join(path, "cgroup.procs"), "rb") as file:
                    found += [int(word) for word in file.read().split()]
            except OSError:
                continue  # it has ended meanwhile
        return found

    # The end.

    def sweep(self) -> None:
        """Remove the groups of agents that were killed, as far as what was in them has ended."""
        for path, lives, _, _ in self._agents():
            if not lives:
                _remove_tree(path)

    def close(self) -> None:
        """Remove this agent's group, and the machine's when no other agent has one."""
        for path in (self.own, self.machine):
            if path:
                _remove_tree(path) if path == self.own else _rmdir(path)


def mark_ended(folder: str, self_inflicted: bool) -> None:
    """Leave a mark for its own agent on a slot's group: its slot was ended by another for want of memory. (A file would take memory.)

    That is the sticky bit, and the bit for the group's id too where the slot had filled the memory alone.
    """
    with contextlib.suppress(FileNotFoundError):
        os.chmod(folder, stat.S_IMODE(os.stat(folder).st_mode) | stat.S_ISVTX | (stat.S_ISGID if self_inflicted else 0))


def was_ended(folder: str) -> bool:
    """Whether another agent has ended the slot of this group."""
    try:
        return bool(os.stat(folder).st_mode & stat.S_ISVTX)
    except OSError:
        return False


def had_filled_alone(folder: str) -> bool:
    """Whether the slot of this group had filled the memory alone, by the mark of the agent that has ended it."""
    try:
        return bool(os.stat(folder).st_mode & stat.S_ISGID)
    except OSError:
        return False


def _slots_of(agent: str) -> list[str]:
    try:
        return [os.path.join(agent, name) for name in os.listdir(agent) if name.startswith(SLOT_PREFIX)]
    except OSError:
        return []


def _remove_tree(path: str) -> None:
    for folder, _, _ in os.walk(path, topdown=False):
        _rmdir(folder)


def _rmdir(path: str) -> None:
    try:
        os.rmdir(path)
    except OSError:
        return  # gone already, or a process of it has not ended yet: whoever starts next tries again
