"""The processes of bubblewrap that set a slot up, found by the folders they were told to mount.

Bubblewrap's first process creates a second one, which waits on an eventfd until the first one writes to it. If the first one is killed in between, the
second one waits for ever: it has no parent-death signal yet, and holds the only descriptors of the eventfd itself. So it must be looked for.
"""

from __future__ import annotations

import os
import signal
import time

from sandbox_server.agent.kernel import procfs

END_WITHIN_S = 5.0
_LOOK_EVERY_S = 0.005


def find_bwrap_processes(folder: str) -> list[int]:
    """The processes that run bubblewrap itself and were told to mount something below `folder`. One that has executed the slot's init is none of them."""
    return [pid for pid in procfs.pids() if _sets_up(pid, folder)]


def kill_bwrap_processes(folder: str, within_s: float = END_WITHIN_S) -> None:
    """Kill the processes that `find_bwrap_processes` finds, and wait until none is left. Blocks: run it in a thread.

    Args:
        folder: whatever runs with a mount from below it is killed, so nothing may still be started there.
        within_s: how long they may take to end, in seconds.

    Raises:
        OSError: one has not ended.
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
        time.sleep(_LOOK_EVERY_S)


def _sets_up(pid: int, folder: str) -> bool:
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
        # Looked at again after it was opened: the handle is this process's, whatever becomes of the pid.
        if _sets_up(pid, folder):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it has ended by itself
    finally:
        os.close(handle)
