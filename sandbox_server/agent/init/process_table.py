"""Reads the processes of a slot from /proc and finds the ones that belong together: descendants and sessions.

It is used where no control group lists the processes of a call.
"""

from __future__ import annotations

import errno
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from typing import Dict, Iterable, List, Set, Tuple

    # Maps a pid to its parent, its session, its start time in clock ticks, and its state.
    ProcessTable = Dict[int, Tuple[int, int, int, bytes]]
    # Maps a pid to its start time. Both together identify a process, because the kernel reuses pids.
    Members = Dict[int, int]
else:
    import _signal as signal  # `signal` would import `enum`, for which every slot would need memory

_DEAD = (b"Z", b"X")
#: Processes can be forked while others are killed, so a slot without control groups is searched and killed at most so many times.
KILL_ROUNDS = 40
_PPID, _SESSION, _STATE, _START = 1, 3, 0, 19  # Positions of the fields after the process name in /proc/PID/stat.


def read_process_table() -> ProcessTable:
    """Return every visible process."""
    table = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open("/proc/" + name + "/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue  # The process has ended since the listing.
        table[int(name)] = (int(fields[_PPID]), int(fields[_SESSION]), int(fields[_START]), fields[_STATE])
    return table


def find_trees(table: ProcessTable, roots: Iterable[int]) -> Set[int]:
    """Return the processes `roots`, all members of the sessions that they lead, and all descendants of these."""
    children: Dict[int, List[int]] = {}
    sessions: Dict[int, List[int]] = {}
    for pid, (parent, session, _, _) in table.items():
        children.setdefault(parent, []).append(pid)
        sessions.setdefault(session, []).append(pid)
    members: Set[int] = set()
    pending = list(roots)
    while pending:
        pid = pending.pop()
        if pid not in members:
            members.add(pid)
            pending += children.get(pid, ())
            pending += sessions.get(pid, ())
    return members


def select_living(table: ProcessTable, pids: Iterable[int]) -> Members:
    """Return those of the processes that still run, that is, are neither zombies nor dead."""
    return {pid: table[pid][2] for pid in pids if pid in table and table[pid][3] not in _DEAD}


def send_signal(members: Members, which: int) -> None:
    """Send a signal to processes. A process whose pid has been reused since the table was read gets none.

    Args:
        members: the processes with their start times.
        which: the number of the signal.
    """
    for pid, start in members.items():
        _send_signal_to(pid, start, which)


def _send_signal_to(pid: int, start: int, which: int) -> None:
    fd = -1
    try:
        if hasattr(os, "pidfd_open") and hasattr(signal, "pidfd_send_signal"):
            fd = _open_pidfd(pid)
        with open("/proc/%d/stat" % pid, "rb") as file:
            if int(file.read().rpartition(b")")[2].split()[_START]) != start:
                return
        if fd >= 0:
            signal.pidfd_send_signal(fd, which)
        else:
            os.kill(pid, which)
    except (ProcessLookupError, FileNotFoundError, PermissionError):
        return  # The process has ended meanwhile.
    finally:
        if fd >= 0:
            os.close(fd)


def _open_pidfd(pid: int) -> int:
    """Return a descriptor of a process that the process table has listed.

    Raises:
        ProcessLookupError: the process has ended.
    """
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # Older kernels say so if the process was reaped, while its pid is still the number of a session or of a process group with living members.
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH)) from None
