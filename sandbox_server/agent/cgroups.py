"""Control groups: a leaf per call to kill exactly its tree, and limits per slot whose counters prove what hit them.

The kill needs cgroup v2 but no controller. The limits use v2 controllers where they can be switched on, else the v1 hierarchies, else nothing
(then rlimits do what they can). Everything is probed by doing it; what could not be done is said in `errors`.
"""

from __future__ import annotations

import os
import re
from typing import Iterator

_OWN = re.compile(r"sandbox-pool-(\d+)-[0-9a-f]+\Z")
_COUNTER_BYTES = 4096
_V1 = ("memory", "pids")


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


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def _read(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read()


def _find(content: bytes, name: bytes) -> int:
    for line in content.splitlines():
        key, _, value = line.partition(b" ")
        if key == name:
            return int(value)
    return 0


def _counter(path: str, name: str) -> int:
    return _find(_read(path).encode(), name.encode())


def _open_procs(folder: str) -> int:
    return os.open(os.path.join(folder, "cgroup.procs"), os.O_RDWR | os.O_CLOEXEC)


class Leaf:
    """The group of one call's tree."""

    __slots__ = ("live", "path", "procs_fd")

    def __init__(self, path: str) -> None:
        os.mkdir(path)
        self.path = path
        self.procs_fd = _open_procs(path)
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
        _write(os.path.join(self.path, "cgroup.freeze"), "1" if frozen else "0")

    def is_frozen(self) -> bool:
        """Whether the stop is complete."""
        return _counter(os.path.join(self.path, "cgroup.events"), "frozen") != 0

    def kill(self) -> None:
        """SIGKILL to everything in it, without a race."""
        _write(os.path.join(self.path, "cgroup.kill"), "1")


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


class SlotLimits:
    """What limits one slot, by which hierarchy, and its counters."""

    def __init__(self, owner: Cgroups, folders: dict[str, str], memory_mb: int | None, processes: int) -> None:
        self._owner = owner
        self._folders = folders
        self.memory = "memory" in folders and memory_mb is not None
        self.processes = "pids" in folders
        self._counters: dict[str, tuple[int, bytes]] = {}
        self._alive_fd = -1
        for folder in set(folders.values()):
            os.mkdir(folder)
        if self.memory and memory_mb is not None:
            self._limit_memory(folders["memory"], memory_mb << 20)
        if self.processes:
            _write(os.path.join(folders["pids"], "pids.max"), str(processes))
            self._count("processes", os.path.join(folders["pids"], "pids.events"), b"max")
            self._alive_fd = os.open(os.path.join(folders["pids"], "pids.current"), os.O_RDONLY | os.O_CLOEXEC)

    def _count(self, name: str, path: str, key: bytes) -> None:
        self._counters[name] = os.open(path, os.O_RDONLY | os.O_CLOEXEC), key

    def _limit_memory(self, folder: str, limit: int) -> None:
        if os.path.exists(os.path.join(folder, "memory.max")):
            _write(os.path.join(folder, "memory.max"), str(limit))
            if os.path.exists(os.path.join(folder, "memory.swap.max")):
                _write(os.path.join(folder, "memory.swap.max"), "0")
            self._count("oom", os.path.join(folder, "memory.events"), b"oom_kill")
            return
        _write(os.path.join(folder, "memory.limit_in_bytes"), str(limit))
        both = os.path.join(folder, "memory.memsw.limit_in_bytes")
        if os.path.exists(both):
            _write(both, str(limit))
        self._count("oom", os.path.join(folder, "memory.oom_control"), b"oom_kill")

    def procs_fds(self) -> list[int]:
        """Open descriptors through which init joins; the caller closes them."""
        return [_open_procs(folder) for folder in sorted(set(self._folders.values()))]

    def read(self) -> dict[str, int]:
        """The counters as they stand: `oom` kills, `processes` refused."""
        return {name: _find(os.pread(fd, _COUNTER_BYTES, 0), key) for name, (fd, key) in self._counters.items()}

    def alive(self) -> int:
        """How many processes and threads there are, init among them; 0 where nothing counts."""
        return int(os.pread(self._alive_fd, _COUNTER_BYTES, 0)) if self._alive_fd >= 0 else 0

    def rises(self, before: dict[str, int]) -> dict[str, int]:
        """Which counters rose since they were read, and by how much."""
        return {name: count - before.get(name, 0) for name, count in self.read().items() if count > before.get(name, 0)}

    def remove(self) -> None:
        """The slot has ended: remove its groups."""
        for fd, _ in self._counters.values():
            os.close(fd)
        self._counters.clear()
        if self._alive_fd >= 0:
            os.close(self._alive_fd)
            self._alive_fd = -1
        for folder in set(self._folders.values()):
            self._owner.remove(folder)


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
        memory_mb: the limit each slot gets, None for none.
        processes: the limit each slot gets.
    """

    def __init__(self, boot: str, memory_mb: int | None, processes: int) -> None:
        self._memory_mb = memory_mb
        self._processes = processes
        self._name = "sandbox-pool-%d-%s" % (os.getpid(), boot[:8])
        self._tops: dict[str, str] = {}
        self._limit_tops: dict[str, str] = {}
        self._left: list[str] = []
        self.errors: dict[str, str] = {}
        self.memory = self.pids = "rlimit"
        self.kill = "scan"
        self._probe()

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
        wanted = [name for name in _V1 if name in _read(os.path.join(os.path.dirname(top), "cgroup.controllers")).split()]
        for name in wanted:
            try:
                for folder in (os.path.dirname(top), top):
                    _write(os.path.join(folder, "cgroup.subtree_control"), "+" + name)
            except OSError as error:
                self.errors[name] = str(error)
                continue
            self._limit_tops[name] = top
            self._said(name, "cgroup2")

    def _probe_v1(self, controller: str, mount: str, path: str) -> None:
        top = self._make_top("1" + controller, mount, path)
        if top is not None:
            self._limit_tops[controller] = top
            self._said(controller, "cgroup1")

    def _said(self, controller: str, version: str) -> None:
        if controller == "memory":
            self.memory = version
        else:
            self.pids = version

    def make_groups(self, name: str) -> Groups:
        """The groups of a new body."""
        return Groups(self._make_leaves(name), self._make_limits(name))

    def _make_limits(self, name: str) -> SlotLimits | None:
        """The limits of a new body, or None where no hierarchy can be written."""
        wanted = {key: top for key, top in self._limit_tops.items() if key != "memory" or self._memory_mb is not None}
        if not wanted:
            return None
        return SlotLimits(self, {key: os.path.join(top, "limits-" + name) for key, top in wanted.items()}, self._memory_mb, self._processes)

    def _make_leaves(self, name: str) -> LeafBook | None:
        """The leaves of a new body, or None where trees must be found by scanning."""
        return LeafBook(self, os.path.join(self._tops["2"], "slot-" + name)) if self.kill == "cgroup2" else None

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
