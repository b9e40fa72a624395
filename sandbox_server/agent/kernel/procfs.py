"""Reads processes, mounts and tables of the kernel from /proc."""

from __future__ import annotations

import os
import re
from typing import Iterator


def pids() -> Iterator[int]:
    """Yield the id of every visible process."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            yield int(name)


def _status_uids(pid: int) -> frozenset[int]:
    """Return the real, effective, saved and file system uid of a process. The result is empty if it has ended, even if it has not been reaped yet."""
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


def status_fields(pid: int) -> dict[str, str]:
    """Return the fields of `/proc/PID/status` by their names."""
    with open("/proc/%d/status" % pid, encoding="utf-8", errors="surrogateescape") as file:
        return {name: value.strip() for name, _, value in (line.partition(":") for line in file)}


def children_of(parent: int) -> dict[int, bytes]:
    """Return the child processes of a process that have not been reaped, with their names."""
    found = {}
    for pid in pids():
        try:
            with open("/proc/%d/stat" % pid, "rb") as file:
                left, _, right = file.read().rpartition(b")")
        except (FileNotFoundError, ProcessLookupError):
            continue  # It has ended since the listing.
        if int(right.split()[1]) == parent:
            found[pid] = left.partition(b"(")[2]
    return found


def threads_of(pid: int) -> int:
    """Return how many threads a process has; 0 if it no longer exists."""
    try:
        return len(os.listdir("/proc/%d/task" % pid))
    except OSError:
        return 0


def uids_in_use() -> frozenset[int]:
    """Return all uids of all processes."""
    found: set[int] = set()
    for pid in pids():
        found |= _status_uids(pid)
    return frozenset(found)


def pids_of_uid(*uids: int) -> list[int]:
    """Return the processes that have one of these uids as real, effective, saved or file system uid."""
    return [pid for pid in pids() if not _status_uids(pid).isdisjoint(uids)]


def pids_in_group(path: str) -> list[int]:
    """Return the processes in a control group; none if the group no longer exists."""
    try:
        with open(os.path.join(path, "cgroup.procs"), encoding="ascii") as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return []


def has_argument(pid: int, part: str) -> bool:
    """Return whether the command line of a process contains `part`."""
    try:
        with open("/proc/%d/cmdline" % pid, "rb") as file:
            return part.encode() in file.read()
    except OSError:
        return False


def inode_of(path: str) -> int:
    """Return the inode number of a path; 0 if it does not exist or cannot be accessed."""
    try:
        return os.stat(path).st_ino
    except OSError:
        return 0


def has_line(path: str, column: int, word: bytes) -> bool:
    """Return whether a line of a table in /proc has this word in this column. Column -1 is the last one."""
    with open(path, "rb") as file:
        return any(line.split()[column : column + 1 or None] == [word] for line in file)


def _unescape(word: bytes) -> str:
    """Decode a path of mountinfo, which has blanks, tabs, newlines and backslashes as octal numbers."""
    return os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda found: bytes([int(found.group(1), 8)]), word))


def find_other_path(path: str) -> str | None:
    """Find a second path by which a folder, or a part of it, can be reached, because its file system is mounted more than once.

    Args:
        path: an absolute path without symbolic links.

    Returns:
        The other path; None if there is none.
    """
    with open("/proc/self/mountinfo", "rb") as file:
        mounts = [(words[2], _unescape(words[3]).rstrip("/"), _unescape(words[4]).rstrip("/")) for words in map(bytes.split, file)]
    own = max((mount for mount in enumerate(mounts) if _lies_below(path, mount[1][2])), key=lambda mount: (len(mount[1][2]), mount[0]))
    device, root, target = own[1]
    inner = root + path[len(target) :]
    for number, (other_device, other_root, other_target) in enumerate(mounts):
        if number == own[0] or other_device != device:
            continue
        if _lies_below(inner, other_root):
            other = other_target + inner[len(other_root) :]
            if other != path and _is_same_file(other, path):
                return other
        elif _lies_below(other_root, inner):
            return other_target or "/"
    return None


def _lies_below(path: str, folder: str) -> bool:
    return (path + "/").startswith(folder + "/")


def _is_same_file(path: str, other: str) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.lstat(other))
    except OSError:
        return False  # One of them is hidden by another mount.


def mounts_under(path: str) -> list[str]:
    """Return the mount points at and below a folder, as this process sees them."""
    with open("/proc/self/mountinfo", "rb") as file:
        content = file.read()
    if os.fsencode(path) not in content:
        return []  # Every reset asks this, and on some machines the file has many lines.
    targets = [os.fsdecode(line.split(b" ", 5)[4]) for line in content.splitlines()]
    return [target for target in targets if target == path or target.startswith(path + "/")]
