"""Which processes of a slot belong to one run, found by looking: descendants, sessions, orphans. For where there is no cgroup to ask."""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Dict, Iterable, List, Set, Tuple

    # pid -> parent, session, start, state
    Table = Dict[int, Tuple[int, int, int, bytes]]
    # pid -> start: a process, not just a number that somebody else may have by now
    Members = Dict[int, int]

_DEAD = (b"Z", b"X")
_PPID, _SESSION, _STATE, _START = 1, 3, 0, 19  # of what follows the name in /proc/PID/stat


def read_process_table() -> Table:
    """Every process that can be seen."""
    seen = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open("/proc/" + name + "/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue  # gone since the listing
        seen[int(name)] = (int(fields[_PPID]), int(fields[_SESSION]), int(fields[_START]), fields[_STATE])
    return seen


def find_trees(table: Table, roots: Iterable[int]) -> Set[int]:
    """`roots`, the sessions they lead, and every descendant of those."""
    children: Dict[int, List[int]] = {}
    sessions: Dict[int, List[int]] = {}
    for pid, (parent, session, _, _) in table.items():
        children.setdefault(parent, []).append(pid)
        sessions.setdefault(session, []).append(pid)
    found: Set[int] = set()
    todo = list(roots)
    while todo:
        pid = todo.pop()
        if pid not in found:
            found.add(pid)
            todo += children.get(pid, ())
            todo += sessions.get(pid, ())
    return found


def select_living(table: Table, pids: Iterable[int]) -> Members:
    """Those of the processes that can still do something."""
    return {pid: table[pid][2] for pid in pids if pid in table and table[pid][3] not in _DEAD}


def send_signal(members: Members, which: int) -> None:
    """Signal processes, each only if it is still the one that was seen."""
    for pid, start in members.items():
        _send_one(pid, start, which)


def _send_one(pid: int, start: int, which: int) -> None:
    fd = -1
    try:
        if hasattr(os, "pidfd_open") and hasattr(signal, "pidfd_send_signal"):
            fd = os.pidfd_open(pid)
        with open("/proc/%d/stat" % pid, "rb") as file:
            if int(file.read().rpartition(b")")[2].split()[_START]) != start:
                return
        if fd >= 0:
            signal.pidfd_send_signal(fd, which)
        else:
            os.kill(pid, which)
    except (ProcessLookupError, FileNotFoundError, PermissionError):
        return  # it has ended meanwhile
    finally:
        if fd >= 0:
            os.close(fd)
