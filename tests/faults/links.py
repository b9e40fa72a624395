"""Cuts the service's connections to its agents, as a network would: neither end is asked."""

from __future__ import annotations

import ctypes
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

SYS_PIDFD_GETFD = 438  # the same number on every architecture: pidfd_getfd(2)
YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
DESCENDANTS = 1
_libc = ctypes.CDLL(None, use_errno=True)


def problem() -> str | None:
    """Why this process may not look into those it has started; None: it may."""
    try:
        scope = int(YAMA.read_text(encoding="ascii"))
    except FileNotFoundError:
        scope = 0
    if os.geteuid() == 0 or scope <= DESCENDANTS:
        return None
    return f"the connections of another process cannot be had: {YAMA} is {scope}, and this is not root"


def cut(pid: int, share: float, below: Path) -> int:
    """Shut down a share of a process's connections to sockets below a folder. Returns how many.

    Raises:
        PermissionError: this process may not look into that one.
    """
    links = list(_links(pid, below))
    victims = links[: max(1, round(len(links) * share))]
    for link in victims:
        with suppress(OSError):  # its other end was quicker
            link.shutdown(socket.SHUT_RDWR)
    for link in links:
        link.close()
    return len(victims)


def _links(pid: int, below: Path) -> Iterator[socket.socket]:
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        for number in _sockets(pid):
            found = _libc.syscall(SYS_PIDFD_GETFD, process, number, 0)
            if found < 0:
                if ctypes.get_errno() in (1, 13):
                    raise PermissionError(ctypes.get_errno(), "the service's connections cannot be had")
                continue  # closed meanwhile, or the process has ended
            link = socket.socket(fileno=found)
            if _leads_below(link, below):
                yield link
            else:
                link.close()
    finally:
        os.close(process)


def _sockets(pid: int) -> list[int]:
    numbers = []
    with suppress(FileNotFoundError, ProcessLookupError):
        for entry in sorted(os.listdir(f"/proc/{pid}/fd"), key=int):
            with suppress(FileNotFoundError):
                if stat.S_ISSOCK(os.stat(f"/proc/{pid}/fd/{entry}").st_mode):
                    numbers.append(int(entry))
    return numbers


def _leads_below(link: socket.socket, below: Path) -> bool:
    if link.family != socket.AF_UNIX:
        return False
    try:
        return str(link.getpeername()).startswith(f"{below}/")
    except OSError:
        return False  # it leads nowhere any more
