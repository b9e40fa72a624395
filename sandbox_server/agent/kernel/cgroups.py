"""Control groups: a leaf per call to kill exactly its tree, and limits per slot whose counters prove what hit them.

The kill needs cgroup v2 but no controller. The limits use v2 controllers where they can be switched on, else the v1 hierarchies, else nothing
(then rlimits do what they can). Everything is probed by doing it; what could not be done is said in `errors`.
"""

from __future__ import annotations

import os
import re
from typing import Iterator

from sandbox_server.agent.config import AgentConfig
from sandbox_server.agent.kernel.memory_groups import SLOT_PREFIX, MemoryGroups, machine_memory_bytes
from sandbox_server.agent.kernel.memory_plan import MIB, MemoryPlan
from sandbox_server.agent.kernel.slot_limits import SlotLimits, find, open_procs, write

_OWN = re.compile(r"sandbox-pool-(\d+)-[0-9a-f]+\Z")
_V1 = ("memory", "pids", "cpu")
#: All slots of a sandbox weigh as many ordinary sessions as they are, at most so many: agent and service, who claim 28, stay ahead.
_MOST_SESSIONS = 8
_SESSION_WEIGHT_V1, _SESSION_WEIGHT_V2 = 1024, 100


def _mounts() -> Iterator[tuple[str, str, set[str]]]:
    """(mount point, file system, options) of every cgroup mount."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            left, _, right = line.partition(" - ")
            kind, _, options = right.split(" ", 2)
            if kind in ("cgroup", "cgroup2"):
                yield left.split(" ")[4], kind, set(options.strip().split(","))


def _own_paths() -> dict[str, str]:
    """Controller (empty: v2) -> path of this process's group."""
    paths = {}
    with open("/proc/self/cgroup", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            for controller in controllers.split(","):
                paths[controller] = path
    return paths


def _read(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read()


def _counter(path: str, name: str) -> int:
    return find(_read(path).encode(), name.encode())


class Leaf:
    """The group of one call's tree."""

    __slots__ = ("live", "path", "procs_fd")

    def __init__(self, path: str) -> None:
        os.mkdir(path)
        self.path = path
        self.procs_fd = open_procs(path)
        self.live = True

    def pids(self) -> list[int]:
        """Who is in it."""
        os.lseek(self.procs_fd, 0, os.SEEK_SET)
        chunks: list[bytes] = []
        while True:
            chunk = os.read(self.procs_fd, 65536)
            if not chunk:
                return [int(word) for word in b"".join(chunks).split()]
            chunks.append(chunk)

    def populated(self) -> bool:
        """Whether any process is in it."""
        return _counter(os.path.join(self.path, "cgroup.events"), "populated") != 0

    def freeze(self, frozen: bool) -> None:
        """Stop everything in it, or let it go on."""
        write(os.path.join(self.path, "cgroup.freeze"), "1" if frozen else "0")

    def is_frozen(self) -> bool:
        """Whether the stop is complete."""
        return _counter(os.path.join(self.path, "cgroup.events"), "frozen") != 0

    def kill(self) -> None:
        """SIGKILL to everything in it, without a race."""
        write(os.path.join(self.path, "cgroup.kill"), "1")


class LeafBook:
    """The leaves of one slot. Init sits in the leaf of what it started last, because that is where its children are born.

    A move costs milliseconds (the kernel waits for all processors), so a leaf that holds nothing but init is used again as it is.
    """

    def __init__(self, owner: Cgroups, folder: str) -> None:
        self._owner = owner
        self._folder = folder
        os.mkdir(folder)
        self._made = 0
        self._home = self._make()
        self._home.live = False
        # Init is born into a leaf, so that the first call needs no move.
        self._current = self._make()
        self._current.live = False
        self._leaves = [self._current]

    def _make(self) -> Leaf:
        self._made += 1
        return Leaf(os.path.join(self._folder, str(self._made)))

    def first_fd(self) -> int:
        """Where init goes when it starts. The descriptor stays the book's."""
        return self._current.procs_fd

    def take(self) -> tuple[Leaf, int]:
        """A leaf for a new call.

        Returns:
            The leaf, and the descriptor through which init must move into it, or -1 when it is there already.
        """
        current = self._current
        if not current.live and current is not self._home and len(current.pids()) <= 1:
            current.live = True
            return current, -1
        for leaf in self._leaves:
            if not leaf.live and leaf is not current and not leaf.populated():
                leaf.live = True
                break
        else:
            leaf = self._make()
            self._leaves.append(leaf)
        self._current = leaf
        return leaf, leaf.procs_fd

    def leave(self, leaf: Leaf) -> int:
        """Make sure init is not in a leaf that is about to be killed.

        Returns:
            The descriptor through which init must move out, or -1 when it is elsewhere.
        """
        if self._current is not leaf:
            return -1
        self._current = self._home
        return self._home.procs_fd

    def paths(self) -> list[str]:
        """Every leaf there is."""
        return [leaf.path for leaf in [self._home, *self._leaves]]

    def kill_all(self) -> int:
        """SIGKILL to everything in every leaf; how many processes are still there."""
        left = 0
        for leaf in [self._home, *self._leaves]:
            if leaf.populated():
                leaf.kill()
                left += len(leaf.pids())
        return left

    def remove(self) -> None:
        """The slot has ended: remove its groups."""
        for leaf in [self._home, *self._leaves]:
            os.close(leaf.procs_fd)
            leaf.procs_fd = -1
            self._owner.remove(leaf.path)
        self._leaves.clear()
        self._owner.remove(self._folder)


class Groups:
    """Every control group of one body."""

    def __init__(self, leaves: LeafBook | None, limits: SlotLimits | None) -> None:
        self.leaves = leaves
        self.limits = limits
        self.memory = limits is not None and limits.memory
        self.processes = limits is not None and limits.processes
        self.join_fds: list[int] = limits.procs_fds() if limits is not None else []
        if leaves is not None:
            self.join_fds.append(os.dup(leaves.first_fd()))

    def close_join_fds(self) -> None:
        """Init has joined, or never will."""
        while self.join_fds:
            os.close(self.join_fds.pop())

    def remove(self) -> None:
        """The body has ended."""
        if self.leaves is not None:
            self.leaves.remove()
        if self.limits is not None:
            self.limits.remove()


class Cgroups:
    """What of control groups this agent can use.

    Args:
        boot: this agent's nonce, so that no two agents share a folder.
        config: the agent's, with the limits of its slots.
    """

    def __init__(self, boot: str, config: AgentConfig) -> None:
        self._config = config
        self._boot = boot
        self._processes = config.limits.processes
        self._name = "sandbox-pool-%d-%s" % (os.getpid(), boot[:8])
        self._tops: dict[str, str] = {}
        self._limit_tops: dict[str, str] = {}
        self._left: list[str] = []
        self.errors: dict[str, str] = {}
        self.memory = self.pids = "rlimit"
        #: What shares the processor out between slots; without a group of its own, the kernel shares it between sessions or threads.
        self.cpu = "none"
        self.kill = "scan"
        #: The groups of memory over all slots; None: none could be made.
        self.memory_groups: MemoryGroups | None = None
        #: Where they would lie, which can be read where it cannot be written; None: there is no such hierarchy.
        self.memory_domain: MemoryGroups | None = None
        self.plan = self._plan(None)
        self._probe()

    def _plan(self, around_bytes: int | None) -> MemoryPlan:
        """How memory is divided, where the closest limit around this process is `around_bytes`; None: it has none, or none is known."""
        config, told = self._config, self._config.machine_memory_mb
        machine = machine_memory_bytes() if told is None else told * MIB
        if around_bytes is not None:
            machine = min(machine, around_bytes)
        sandbox, slot = config.memory_mb, config.limits.memory_mb
        return MemoryPlan(
            machine_bytes=machine,
            slots=config.slots + config.wanted_spares,
            sandbox_bytes=None if sandbox is None else sandbox * MIB,
            slot_bytes=None if slot is None else slot * MIB,
        )

    def _probe(self) -> None:
        own = _own_paths()
        for mount, kind, options in _mounts():
            if kind == "cgroup2" and "2" not in self._tops:
                self._probe_v2(mount, own.get("", "/"))
            for controller in _V1:
                if kind == "cgroup" and controller in options and controller not in self._limit_tops:
                    self._probe_v1(controller, mount, own.get(controller, "/"))

    def _make_top(self, key: str, mount: str, path: str) -> str | None:
        for parent in (os.path.normpath(mount + path), mount):
            if os.path.isdir(parent):
                _sweep(parent)
                top = os.path.join(parent, self._name)
                if top in self._tops.values():
                    return top  # one hierarchy has several of the controllers
                try:
                    os.mkdir(top)
                except OSError as error:
                    self.errors[key] = str(error)
                    return None
                self._tops[key] = top
                return top
        return None

    def _probe_v2(self, mount: str, path: str) -> None:
        top = self._make_top("2", mount, path)
        if top is None:
            return
        if os.path.exists(os.path.join(top, "cgroup.kill")):
            self.kill = "cgroup2"
        if "memory" not in _read(os.path.join(mount, "cgroup.controllers")).split():
            return  # another hierarchy has it
        groups = self._make_memory_groups(2, mount, path)
        if groups is not None:
            # One group a slot, for all that this hierarchy limits: a process is in one only.
            for name in groups.controllers:
                self._limit_tops[name] = groups.own
                self._said(name, "cgroup2")
            if "cpu" in groups.controllers:
                write(os.path.join(groups.own, "cpu.weight"), str(self._sessions() * _SESSION_WEIGHT_V2))

    def _probe_v1(self, controller: str, mount: str, path: str) -> None:
        if controller == "memory":
            groups = self._make_memory_groups(1, mount, path)
            top = groups.own if groups is not None else None
        else:
            top = self._make_top("1" + controller, mount, path)
        if top is not None and controller == "cpu":
            write(os.path.join(top, "cpu.shares"), str(self._sessions() * _SESSION_WEIGHT_V1))
        if top is not None:
            self._limit_tops[controller] = top
            self._said(controller, "cgroup1")

    def _make_memory_groups(self, version: int, mount: str, path: str) -> MemoryGroups | None:
        groups = self.memory_domain = MemoryGroups.around(version, mount, path)
        self.plan = self._plan(groups.domain_bytes)
        try:
            groups.make(self.plan, self._config.slots_group, self._boot)
        except OSError as error:
            self.errors["memory"] = str(error)
            return None
        self.memory_groups = groups
        return groups

    def _sessions(self) -> int:
        return min(self._config.slots, _MOST_SESSIONS)

    def _said(self, controller: str, version: str) -> None:
        if controller == "memory":
            self.memory = version
        elif controller == "pids":
            self.pids = version
        else:
            self.cpu = version

    def make_groups(self, name: str) -> Groups:
        """The groups of a new body."""
        limits = self._make_limits(name)  # first: on a machine with cgroup v2 alone, the leaves lie in the group that limits the slot
        return Groups(self._make_leaves(name), limits)

    def _make_limits(self, name: str) -> SlotLimits | None:
        """The limits of a new body, or None where no hierarchy can be written.

        Its group of the processor needs no number: every new group has the same weight, so that slots have equal parts, however many sessions they have.
        """
        if not self._limit_tops:
            return None
        folders = {key: os.path.join(top, SLOT_PREFIX + name) for key, top in self._limit_tops.items()}
        share = self.memory_groups.share_bytes() if self.memory_groups is not None else 0
        return SlotLimits(folders, self.plan.ceiling_bytes, share, self._processes, self.remove)

    def _make_leaves(self, name: str) -> LeafBook | None:
        """The leaves of a new body, or None where trees must be found by scanning."""
        if self.kill != "cgroup2":
            return None
        if self.memory == "cgroup2":
            return LeafBook(self, os.path.join(self._limit_tops["memory"], SLOT_PREFIX + name, "calls"))
        return LeafBook(self, os.path.join(self._tops["2"], "slot-" + name))

    def no_kill(self, why: str) -> None:
        """The first init could not move: trees are found by scanning from now on."""
        self.kill = "scan"
        self.errors["kill"] = why

    def remove(self, path: str) -> None:
        """Remove a group now, or when what is in it has gone."""
        self._left.append(path)
        self._left = [left for left in self._left if not _rmdir(left)]

    def close(self) -> None:
        """Remove everything this agent made; every slot has ended."""
        for path in [*self._left, *self._tops.values()]:
            _rmdir(path)
        if self.memory_groups is not None:
            self.memory_groups.close()


def _rmdir(path: str) -> bool:
    try:
        os.rmdir(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False  # a process of it is still being reaped
    return True


def _sweep(parent: str) -> None:
    """Remove what agents that were killed have left."""
    for name in os.listdir(parent):
        match = _OWN.match(name)
        if match is None or os.path.exists("/proc/" + match.group(1)):
            continue
        for folder, _, _ in os.walk(os.path.join(parent, name), topdown=False):
            _rmdir(folder)
