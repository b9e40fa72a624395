"""What /proc says, seen by the agent."""

from __future__ import annotations

import os
from typing import Iterator


def pids() -> Iterator[int]:
    """Every process that can be seen."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            yield int(name)


def _status_uids(pid: int) -> frozenset[int]:
    """Real, effective, saved and file system uid of a process; empty when it is gone, or dead and only not yet reaped."""
    try:
        with open("/proc/%d/status" % pid, "rb") as file:
            for line in file:
                if line.startswith(b"State:") and line.split()[1] in (b"Z", b"X"):
                    break
                if line.startswith(b"Uid:"):
                    return frozenset(int(word) for word in line.split()[1:])
    except (FileNotFoundError, ProcessLookupError):
        return frozenset()
    return frozenset()


def threads_of(pid: int) -> int:
    """How many threads a process has; 0 when it is gone."""
    try:
        return len(os.listdir("/proc/%d/task" % pid))
    except OSError:
        return 0


def uids_in_use() -> frozenset[int]:
    """Every uid that some process has."""
    found: set[int] = set()
    for pid in pids():
        found |= _status_uids(pid)
    return frozenset(found)


def pids_of_uid(*uids: int) -> list[int]:
    """The processes that have one of these uids as any of theirs."""
    return [pid for pid in pids() if not _status_uids(pid).isdisjoint(uids)]


def pids_in_group(path: str) -> list[int]:
    """The processes in a control group; none when it is gone."""
    try:
        with open(os.path.join(path, "cgroup.procs"), encoding="ascii") as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return []


def has_argument(pid: int, part: str) -> bool:
    """Whether this is in a process's command line."""
    try:
        with open("/proc/%d/cmdline" % pid, "rb") as file:
            return part.encode() in file.read()
    except OSError:
        return False


def inode_of(path: str) -> int:
    """The inode behind a path; 0 when it is gone or not to be seen."""
    try:
        return os.stat(path).st_ino
    except OSError:
        return 0


def has_line(path: str, column: int, word: bytes) -> bool:
    """Whether a table of the kernel has this word in this column."""
    with open(path, "rb") as file:
        return any(line.split()[column : column + 1 or None] == [word] for line in file)


def mounts_under(path: str) -> list[str]:
    """What is mounted at or below a folder, as this process sees it."""
    found = []
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            target = line.split(" ", 5)[4]
            if target == path or target.startswith(path + "/"):
                found.append(target)
    return found


def pss_bytes(pid: int) -> int:
    """The memory a process takes, shared pages counted by their share; 0 when it is gone or not to be read."""
    try:
        with open("/proc/%d/smaps_rollup" % pid, "rb") as file:
            for line in file:
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) << 10
    except OSError:
        return 0
    return 0
