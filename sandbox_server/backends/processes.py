"""Processes that may not be ours, named by pid and start time, so that a recycled pid is never taken for what it was."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path


def start_time(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None if there is no such process or it is only waiting to be reaped."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else int(fields[19])


def is_running(pid: int, started: int) -> bool:
    """Whether this very process runs. Reaps it if it was a child of ours and has ended."""
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    return start_time(pid) == started


def spawn(argv: list[str], env: Mapping[str, str], stdin: int, output: int) -> tuple[int, int]:
    """Start a program in a session of its own, with nothing of ours but these descriptors, and with signals as a new login has them.

    Returns:
        Its pid and start time.

    Raises:
        OSError: it could not be started.
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
    """Ask a process to end, and make it.

    Args:
        pid: which.
        started: its start time; if that is not the process's, nothing is done.
        term_s: how long it may take over SIGTERM, in seconds.
        kill_s: how long SIGKILL may take, in seconds.

    Raises:
        OSError: it is still there.
    """
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        # Opened first, compared after: from here on the handle is this process's whatever becomes of the pid.
        if not is_running(pid, started):
            return
        for number, wait_s in ((signal.SIGTERM, term_s), (signal.SIGKILL, kill_s)):
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, number)
            if await _readable(handle, wait_s):
                is_running(pid, started)  # reaps it
                return
    finally:
        os.close(handle)
    raise OSError(f"process {pid} has not ended {kill_s:g} s after SIGKILL")


async def ended_within(pid: int, started: int, wait_s: float) -> bool:
    """Whether a process ends, and is reaped if it is our child, within `wait_s` seconds."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        if is_running(pid, started):
            await _readable(handle, wait_s)
        return not is_running(pid, started)
    finally:
        os.close(handle)


async def _readable(handle: int, wait_s: float) -> bool:
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
