"""The control groups that limit one slot, and the counters that prove that the slot reached a limit.

A counter of kills or refusals increases when the limit of the slot is reached, but also when a limit of a group around the slot is reached. Therefore a second
counter must show that it was the limit of the slot itself. Otherwise, if one slot fills the sandbox or the machine, its neighbours would be blamed.
"""

from __future__ import annotations

import os
from typing import Callable

SOCKETS_LIMIT, SOCKETS_USAGE = "memory.kmem.tcp.limit_in_bytes", "memory.kmem.tcp.usage_in_bytes"
_COUNTER_BYTES = 4096
_PERIOD_US = 100_000  # over which the kernel counts processor time against a quota
_NEAR_LIMIT_FRACTION = 0.75  # Of the limit. The usage may have fallen between the event and the reading.
_SOCKETS_FRACTION = 1 / 16
#: What an ended slot runtime may have left charged to a group that is used again. The kernel keeps a little for each group until it needs the memory.
_MOST_LEFT_BYTES, _MOST_LEFT_FRACTION = 4 << 20, 1 / 16
_AT_LIMIT_FRACTION = 0.9  # Of the limit. Memory is charged in batches, so the kernel can refuse memory slightly below the limit.


def write_control_file(path: str, text: str) -> None:
    """Write a value to a control file."""
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def find_number(content: bytes, name: bytes) -> int:
    """Return the number after a name in the lines of a control file; 0 if the name does not occur."""
    start = (b"\n" + content).find(b"\n" + name + b" ")
    if start < 0:
        return 0
    end = content.find(b"\n", start)
    return int(content[start + len(name) : end if end >= 0 else len(content)])


def open_procs(folder: str) -> int:
    """Open the file through which processes join a control group. The caller closes the descriptor."""
    return os.open(os.path.join(folder, "cgroup.procs"), os.O_RDWR | os.O_CLOEXEC)


def limit_sockets(folder: str, limit_bytes: int) -> None:
    """Limit the memory of socket buffers of a v1 group.

    With a limit the kernel counts this memory. At the limit, connections become slower and packets are dropped.
    """
    path = os.path.join(folder, SOCKETS_LIMIT)
    if os.path.exists(path):
        write_control_file(path, str(limit_bytes))


def _limit_processors(folder: str, processors: int) -> None:
    """Limit the processor time of a group to that of so many processors. A kernel without quotas has neither file."""
    quota_us = processors * _PERIOD_US
    for name, text in (("cpu.max", "%d %d" % (quota_us, _PERIOD_US)), ("cpu.cfs_quota_us", str(quota_us))):
        path = os.path.join(folder, name)
        if os.path.exists(path):
            write_control_file(path, text)


class _Counter:
    """A number in a control file that stays open.

    Args:
        path: the control file. If it does not exist, the number is 0.
        key: the name before the number; empty if the file contains only the number.
    """

    def __init__(self, path: str, key: bytes = b"") -> None:
        self._key = key
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if os.path.exists(path) else -1

    def read(self) -> int:
        if self.fd < 0:
            return 0
        content = os.pread(self.fd, _COUNTER_BYTES, 0)
        return find_number(content, self._key) if self._key else int(content)


class SlotLimitGroups:
    """The control groups that limit one slot, and their counters.

    Args:
        folders: the group for each controller.
        memory_bytes: the memory limit, in bytes.
        share_bytes: the memory that the kernel protects for the slot, in bytes, if the cgroup version supports this.
        processes: the maximum number of processes and threads.
        remove_group: removes a control group as soon as it is empty.
        processors: how many processors the slot may keep busy at a time; None for no limit.

    Attributes:
        limits_memory: whether these groups limit memory.
        limits_processes: whether these groups limit the number of processes.
        memory_folder: the group that limits memory; None if there is none.
    """

    def __init__(
        self,
        folders: dict[str, str],
        memory_bytes: int,
        share_bytes: int,
        processes: int,
        remove_group: Callable[[str], None],
        processors: int | None = None,
    ) -> None:
        self._remove_group = remove_group
        self._processors = processors
        self._folders = folders
        self.limits_memory = "memory" in folders
        self.limits_processes = "pids" in folders
        self.memory_folder = folders.get("memory")
        self._memory_limit_bytes = memory_bytes
        self._share_bytes = share_bytes
        self._process_limit = processes
        self._counters: dict[str, _Counter] = {}
        self._peak_fd = -1  # On v1: the highest usage since this process last reset it.

    def create_groups(self) -> None:
        """Create the groups, and write their limits.

        Raises:
            OSError: the kernel has refused it. Nothing is left of them.
        """
        try:
            self._create_groups()
        except OSError:
            self.remove_limits()
            raise

    def _create_groups(self) -> None:
        folders = self._folders
        for folder in set(folders.values()):
            os.mkdir(folder)
        if self.limits_memory:
            self._limit_memory(folders["memory"])
        if self.limits_processes:
            folder = folders["pids"]
            write_control_file(os.path.join(folder, "pids.max"), str(self._process_limit))
            self._open_counter("processes", folder, "pids.events", b"max")
            self._open_counter("alive", folder, "pids.current")
            self._open_counter("most_alive", folder, "pids.peak")
        if self._processors is not None and "cpu" in folders:
            _limit_processors(folders["cpu"], self._processors)

    def _open_counter(self, name: str, folder: str, file: str, key: bytes = b"") -> None:
        self._counters[name] = _Counter(os.path.join(folder, file), key)

    def _limit_memory(self, folder: str) -> None:
        if os.path.exists(os.path.join(folder, "memory.max")):
            write_control_file(os.path.join(folder, "memory.max"), str(self._memory_limit_bytes))
            if os.path.exists(os.path.join(folder, "memory.swap.max")):
                write_control_file(os.path.join(folder, "memory.swap.max"), "0")
            write_control_file(os.path.join(folder, "memory.low"), str(self._share_bytes))
            self._open_counter("oom", folder, "memory.events", b"oom_kill")
            self._open_counter("own_oom", folder, "memory.events", b"oom")
            self._open_counter("used_bytes", folder, "memory.current")
            return
        write_control_file(os.path.join(folder, "memory.limit_in_bytes"), str(self._memory_limit_bytes))
        write_control_file(os.path.join(folder, "memory.oom_control"), "0")  # The kernel kills at the slot's limit. In groups around it, processes wait.
        both = os.path.join(folder, "memory.memsw.limit_in_bytes")
        if os.path.exists(both):
            write_control_file(both, str(self._memory_limit_bytes))
        limit_sockets(folder, int(_SOCKETS_FRACTION * self._memory_limit_bytes))
        self._open_counter("oom", folder, "memory.oom_control", b"oom_kill")
        self._open_counter("used_bytes", folder, "memory.usage_in_bytes")
        self._peak_fd = os.open(os.path.join(folder, "memory.max_usage_in_bytes"), os.O_RDWR | os.O_CLOEXEC)  # New kernels do not update `memory.failcnt`.

    def are_as_new(self) -> bool:
        """Return whether the groups of an ended slot runtime can limit the next one: nothing is left in them, and none of their limits was ever reached."""
        if not self.limits_memory or not self.limits_processes or self.count_processes() or self._read("most_alive") >= self._process_limit:
            return False
        return (
            self._read("used_bytes") <= min(_MOST_LEFT_BYTES, self._memory_limit_bytes * _MOST_LEFT_FRACTION)
            and not self._read("oom")
            and not self._read("own_oom")
        )

    def renew_groups(self, share_bytes: int) -> SlotLimitGroups:
        """Return a new object for the same groups, for the next slot runtime. What still refers to this object can no longer reach the groups.

        Args:
            share_bytes: see above; the share may have changed.
        """
        renewed = SlotLimitGroups(self._folders, self._memory_limit_bytes, share_bytes, self._process_limit, self._remove_group, self._processors)
        renewed._counters, renewed._peak_fd = self._counters, self._peak_fd
        self._counters, self._peak_fd, self.memory_folder = {}, -1, None
        if renewed._peak_fd >= 0:
            os.pwrite(renewed._peak_fd, b"0", 0)  # What the ended runtime has used, files included, proves nothing against the next one.
        if share_bytes != self._share_bytes and renewed.memory_folder is not None:
            write_control_file(os.path.join(renewed.memory_folder, "memory.low"), str(share_bytes))
        return renewed

    def group_folders(self) -> list[str]:
        """Return the groups, each of which init joins."""
        return sorted(set(self._folders.values()))

    def _read(self, name: str) -> int:
        counter = self._counters.get(name)
        return counter.read() if counter is not None else 0

    def read_counters(self, alone: bool) -> dict[str, int]:
        """Read the counters, for later calls of `count_limit_hits` and `is_short_of_memory`.

        Args:
            alone: whether no other call of the slot is being measured, so that the highest usage can be reset.
        """
        if alone and self._peak_fd >= 0:
            os.pwrite(self._peak_fd, b"0", 0)
        return {name: self._read(name) for name in ("oom", "own_oom", "processes") if name in self._counters}

    def count_processes(self) -> int:
        """Return the number of processes and threads of the slot, including init; 0 if no control group counts them."""
        return self._read("alive")

    def is_short_of_memory(self, before: dict[str, int]) -> bool:
        """Return whether the limit of the slot has refused memory since `before` was read, or whether the slot is now close to its limit."""
        if not self.limits_memory:
            return False
        return self._hit_own_memory(before) or self._read("used_bytes") >= _NEAR_LIMIT_FRACTION * self._memory_limit_bytes

    def _hit_own_memory(self, before: dict[str, int]) -> bool:
        if self._peak_fd >= 0:
            return int(os.pread(self._peak_fd, _COUNTER_BYTES, 0)) >= _AT_LIMIT_FRACTION * self._memory_limit_bytes
        return self._read("own_oom") > before.get("own_oom", 0)

    def count_limit_hits(self, before: dict[str, int]) -> dict[str, int]:
        """Count how often the slot has reached its limits since `before` was read.

        Returns:
            `oom`: the number of processes killed at the memory limit of the slot. `oom_elsewhere`: the number of processes killed because memory was short
            while the slot was within its limit. `processes`: the number of refused processes. A key is missing if its number is 0.
        """
        hits = {}
        kills = self._read("oom") - before.get("oom", 0)
        if kills > 0:
            hits["oom" if self._hit_own_memory(before) else "oom_elsewhere"] = kills
        refused = self._read("processes") - before.get("processes", 0)
        if refused > 0:
            most_alive = self._read("most_alive")  # 0 if this kernel does not count it.
            if not most_alive or most_alive >= self._process_limit:
                hits["processes"] = refused
        return hits

    def remove_limits(self) -> None:
        """Close the counters and remove the groups of an ended slot."""
        for fd in (*(counter.fd for counter in self._counters.values()), self._peak_fd):
            if fd >= 0:
                os.close(fd)
        self._counters.clear()
        self._peak_fd = -1
        for folder in set(self._folders.values()):
            self._remove_group(folder)
