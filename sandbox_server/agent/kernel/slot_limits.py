"""What control groups limit one slot to, and the counters that prove what hit a limit.

A counter of kills or refusals rises whoever's limit was reached: the slot's, or one around all of them. So each is believed only with a second one
that tells of the slot's own limit. Else a slot that fills the sandbox, or the machine, would have its neighbours blamed.
"""

from __future__ import annotations

import os
from typing import Callable

SOCKETS_LIMIT, SOCKETS_USAGE = "memory.kmem.tcp.limit_in_bytes", "memory.kmem.tcp.usage_in_bytes"
_COUNTER_BYTES = 4096
_NEAR = 0.75  # of a limit: what is read after the fact has moved on
_SOCKETS_PART = 1 / 16
_AT_LIMIT = 0.9  # memory is charged in batches, so a limit that refuses may not quite be reached


def write_control_file(path: str, text: str) -> None:
    """Set a control file."""
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def find_number(content: bytes, name: bytes) -> int:
    """The number after a name in a control file of lines; 0: it is not there."""
    for line in content.splitlines():
        key, _, value = line.partition(b" ")
        if key == name:
            return int(value)
    return 0


def open_procs(folder: str) -> int:
    """Through what processes join a group."""
    return os.open(os.path.join(folder, "cgroup.procs"), os.O_RDWR | os.O_CLOEXEC)


def limit_sockets(folder: str, limit_bytes: int) -> None:
    """Limit the buffers of sockets of a v1 group: from then on the kernel counts them, and at the limit connections slow down and packets are dropped."""
    path = os.path.join(folder, SOCKETS_LIMIT)
    if os.path.exists(path):
        write_control_file(path, str(limit_bytes))


class _Counter:
    """A number in an open control file: the whole of it, or after a name. Missing files count 0."""

    def __init__(self, path: str, key: bytes = b"") -> None:
        self._key = key
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if os.path.exists(path) else -1

    def read(self) -> int:
        if self.fd < 0:
            return 0
        content = os.pread(self.fd, _COUNTER_BYTES, 0)
        return find_number(content, self._key) if self._key else int(content)


class SlotLimits:
    """What limits one slot, by which hierarchy, and its counters.

    Args:
        folders: hierarchy -> the group to make there.
        memory_bytes: the limit of memory.
        share_bytes: what is kept for the slot, where the hierarchy can keep something.
        processes: the limit of processes and threads.
        remove: takes a group away again.
    """

    def __init__(self, folders: dict[str, str], memory_bytes: int, share_bytes: int, processes: int, remove: Callable[[str], None]) -> None:
        self._remove = remove
        self._folders = folders
        self.memory = "memory" in folders
        self.processes = "pids" in folders
        self.memory_folder = folders.get("memory")
        self._most_bytes = memory_bytes
        self._share_bytes = share_bytes
        self._most_processes = processes
        self._counters: dict[str, _Counter] = {}
        self._peak_fd = -1  # where only the highest use is told, and since when is ours to say
        for folder in set(folders.values()):
            os.mkdir(folder)
        if self.memory:
            self._limit_memory(folders["memory"])
        if self.processes:
            folder = folders["pids"]
            write_control_file(os.path.join(folder, "pids.max"), str(processes))
            self._count("processes", folder, "pids.events", b"max")
            self._count("alive", folder, "pids.current")
            self._count("most_alive", folder, "pids.peak")

    def _count(self, name: str, folder: str, file: str, key: bytes = b"") -> None:
        self._counters[name] = _Counter(os.path.join(folder, file), key)

    def _limit_memory(self, folder: str) -> None:
        if os.path.exists(os.path.join(folder, "memory.max")):
            write_control_file(os.path.join(folder, "memory.max"), str(self._most_bytes))
            if os.path.exists(os.path.join(folder, "memory.swap.max")):
                write_control_file(os.path.join(folder, "memory.swap.max"), "0")
            write_control_file(os.path.join(folder, "memory.low"), str(self._share_bytes))
            self._count("oom", folder, "memory.events", b"oom_kill")
            self._count("own_oom", folder, "memory.events", b"oom")
            self._count("used_bytes", folder, "memory.current")
            return
        write_control_file(os.path.join(folder, "memory.limit_in_bytes"), str(self._most_bytes))
        write_control_file(os.path.join(folder, "memory.oom_control"), "0")  # at its own limit the kernel kills; the groups around it let their slots wait
        both = os.path.join(folder, "memory.memsw.limit_in_bytes")
        if os.path.exists(both):
            write_control_file(both, str(self._most_bytes))
        limit_sockets(folder, int(_SOCKETS_PART * self._most_bytes))
        self._count("oom", folder, "memory.oom_control", b"oom_kill")
        self._count("used_bytes", folder, "memory.usage_in_bytes")
        self._peak_fd = os.open(os.path.join(folder, "memory.max_usage_in_bytes"), os.O_RDWR | os.O_CLOEXEC)  # `memory.failcnt` stands still on new kernels

    def procs_fds(self) -> list[int]:
        """Open descriptors through which init joins; the caller closes them."""
        return [open_procs(folder) for folder in sorted(set(self._folders.values()))]

    def _read(self, name: str) -> int:
        counter = self._counters.get(name)
        return counter.read() if counter is not None else 0

    def read_counters(self, alone: bool) -> dict[str, int]:
        """What `rises` is to be told later. `alone`: nothing else of the slot runs that is measured already."""
        if alone and self._peak_fd >= 0:
            os.pwrite(self._peak_fd, b"0", 0)
        return {name: self._read(name) for name in ("oom", "own_oom", "processes") if name in self._counters}

    def count_processes(self) -> int:
        """How many processes and threads there are, init among them; 0 where nothing counts."""
        return self._read("alive")

    def is_short_of_memory(self, before: dict[str, int]) -> bool:
        """Whether the slot's own limit has refused memory since `start`, or its memory is almost used up."""
        if not self.memory:
            return False
        return self._hit_own_memory(before) or self._read("used_bytes") >= _NEAR * self._most_bytes

    def _hit_own_memory(self, before: dict[str, int]) -> bool:
        if self._peak_fd >= 0:
            return int(os.pread(self._peak_fd, _COUNTER_BYTES, 0)) >= _AT_LIMIT * self._most_bytes
        return self._read("own_oom") > before.get("own_oom", 0)

    def count_limit_hits(self, before: dict[str, int]) -> dict[str, int]:
        """How often since `start` the slot's own limits were hit: `oom` kills, `processes` refused; and `oom_elsewhere`: kills for want of
        memory while it was within its own limit.
        """
        rose = {}
        kills = self._read("oom") - before.get("oom", 0)
        if kills > 0:
            rose["oom" if self._hit_own_memory(before) else "oom_elsewhere"] = kills
        refused = self._read("processes") - before.get("processes", 0)
        most_alive = self._read("most_alive")  # 0: this kernel does not say
        if refused > 0 and (not most_alive or most_alive >= self._most_processes):
            rose["processes"] = refused
        return rose

    def remove(self) -> None:
        """The slot has ended: remove its groups."""
        for fd in (*(counter.fd for counter in self._counters.values()), self._peak_fd):
            if fd >= 0:
                os.close(fd)
        self._counters.clear()
        self._peak_fd = -1
        for folder in set(self._folders.values()):
            self._remove(folder)
