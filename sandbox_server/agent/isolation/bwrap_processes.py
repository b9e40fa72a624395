"""Finds and kills the processes of bubblewrap that set up a slot, by the folders in their command lines.

The first process of bubblewrap creates a second one, which waits on an eventfd until the first one writes to it. If the first one is killed before, the second
one waits for ever: it has no parent-death signal yet, and it holds the only descriptors of the eventfd. So these processes must be searched for.
"""

from __future__ import annotations

import os
import signal
import time

from sandbox_server.agent.kernel import procfs

END_WITHIN_S = 5.0
_CHECK_EVERY_S = 0.005


def find_bwrap_processes(folder: str) -> list[int]:
    """Return the processes that run bubblewrap with an argument below `folder`. A process that has already executed the init of its slot is not included."""
    return [pid for pid in procfs.pids() if _is_bwrap_below(pid, folder)]


def kill_bwrap_processes(folder: str, within_s: float = END_WITHIN_S) -> None:
    """Kill the processes that `find_bwrap_processes` finds, and wait until none is left. This blocks, so call it in a thread.

    Args:
        folder: processes that mount something below it are killed, so no slot may be starting there.
        within_s: how long they may take to end, in seconds.

    Raises:
        OSError: a process has not ended in time.
    """
    until = time.monotonic() + within_s
    while True:
        left = find_bwrap_processes(folder)
        if not left:
            return
        for pid in left:
            _kill(pid, folder)
        if time.monotonic() > until:
            raise OSError("process %d, which set up a slot below %s, has not ended within %g s of SIGKILL" % (left[0], folder, within_s))
        time.sleep(_CHECK_EVERY_S)


def _is_bwrap_below(pid: int, folder: str) -> bool:
    try:
        with open("/proc/%d/cmdline" % pid, "rb") as file:
            program, *arguments = file.read().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False
    below = os.fsencode(folder) + b"/"
    return os.path.basename(program) == b"bwrap" and any(argument.startswith(below) for argument in arguments)


def _kill(pid: int, folder: str) -> None:
    try:
        if not hasattr(os, "pidfd_open"):
            os.kill(pid, signal.SIGKILL)
            return
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        # Check the process again after opening the pidfd, because the pid could have been reused before. The pidfd cannot change.
        if _is_bwrap_below(pid, folder):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    except ProcessLookupError:
        pass  # It has ended by itself.
    finally:
        os.close(handle)
