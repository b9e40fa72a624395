"""Starts, checks and ends processes that are identified by pid and start time, because the pid alone may be used again by another process.

The processes need not be children of this one.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if there is no such process, or it has ended and was not reaped yet."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else int(fields[19])


def is_running(pid: int, started: int) -> bool:
    """Whether a process runs. Reaps it if it has ended and is a child of this process.

    Args:
        pid: its process id.
        started: its start time, see `start_time`. A process with another start time is another process.
    """
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    return start_time(pid) == started


def spawn(argv: list[str], env: Mapping[str, str], stdin: int, output: int) -> tuple[int, int]:
    """Start a program in a session of its own, with default signal handlers, no blocked signals, and no other open descriptors.

    Args:
        argv: the path of the program and its arguments.
        env: its environment.
        stdin: the descriptor of its standard input.
        output: the descriptor of its standard output and standard error.

    Returns:
        Its pid and start time.

    Raises:
        OSError: the program could not be started.
    """
    pid = os.posix_spawn(
        argv[0],
        argv,
        env,
        file_actions=[(os.POSIX_SPAWN_DUP2, stdin, 0), (os.POSIX_SPAWN_DUP2, output, 1), (os.POSIX_SPAWN_DUP2, output, 2)],
        setsid=True,
        setsigmask=(),
        setsigdef=[number for number in signal.valid_signals() if number not in (signal.SIGKILL, signal.SIGSTOP) and number < 32],
    )
    return pid, start_time(pid) or 0


async def end_process(pid: int, started: int, term_s: float, kill_s: float) -> None:
    """Send SIGTERM to a process, and SIGKILL if it does not end.

    Args:
        pid: its process id.
        started: its start time. If the process has another start time, it is another process, and nothing is done.
        term_s: how long it may take to end after SIGTERM, in seconds.
        kill_s: how long it may take to end after SIGKILL, in seconds.

    Raises:
        OSError: it has not ended after both.
    """
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        # The handle is opened before the start time is compared, so that it cannot refer to a later process that uses the pid again.
        if not is_running(pid, started):
            return
        for number, wait_s in ((signal.SIGTERM, term_s), (signal.SIGKILL, kill_s)):
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, number)
            if await _wait_until_readable(handle, wait_s):
                is_running(pid, started)  # reaps it
                return
    finally:
        os.close(handle)
    raise OSError(f"process {pid} has not ended {kill_s:g} s after SIGKILL")


async def wait_for_end(pid: int, started: int, wait_s: float) -> bool:
    """Wait for the end of a process, and reap it if it is a child of this process.

    Args:
        pid: its process id.
        started: its start time.
        wait_s: the longest time to wait, in seconds.

    Returns:
        Whether it has ended.
    """
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        if is_running(pid, started):
            await _wait_until_readable(handle, wait_s)
        return not is_running(pid, started)
    finally:
        os.close(handle)


async def _wait_until_readable(handle: int, wait_s: float) -> bool:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(handle, ended.set)
    try:
        async with asyncio.timeout(wait_s):
            await ended.wait()
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(handle)
    return True
