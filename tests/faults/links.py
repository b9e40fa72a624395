"""Cuts the service's connections to its agents from outside, as a network would: sockets are shut down, and relay processes are killed."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

SYS_PIDFD_GETFD = 438  # the same number on every architecture: pidfd_getfd(2)
YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
DESCENDANTS = 1
_libc = ctypes.CDLL(None, use_errno=True)


def permission_problem() -> str | None:
    """Return why this process may not read the connections of its children, or None where it may."""
    try:
        scope = int(YAMA.read_text(encoding="ascii"))
    except FileNotFoundError:
        scope = 0
    if os.geteuid() == 0 or scope <= DESCENDANTS:
        return None
    return f"the connections of another process cannot be had: {YAMA} is {scope}, and this is not root"


def cut(pid: int, share: float, below: Path) -> int:
    """Cut a share of a process's connections to the agents of a state folder.

    Args:
        pid: the process of the service.
        share: which share of the connections, from 0 to 1; at least one.
        below: the state folder.

    Returns:
        How many connections were cut.

    Raises:
        PermissionError: this process may not read the connections of that one.
    """
    links = list(_links(pid, below))
    victims = links[: max(1, round(len(links) * share))]
    for link in victims:
        with suppress(OSError):  # the other end has closed it already
            link.shutdown(socket.SHUT_RDWR)
    for link in links:
        link.close()
    relays = list(_relays(pid, below))
    ended = relays[: max(1, round(len(relays) * share))]
    for relay in ended:
        with suppress(ProcessLookupError):  # it has ended already
            os.kill(relay, signal.SIGKILL)
    return len(victims) + len(ended)


def _relays(pid: int, below: Path) -> Iterator[int]:
    """Yield the children of a process that relay to an agent of this folder."""
    with suppress(FileNotFoundError, ProcessLookupError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split():
            with suppress(FileNotFoundError, ProcessLookupError):
                arguments = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
                if b"connect" in arguments and any(one.startswith(f"{below}/".encode()) for one in arguments):
                    yield int(child)


def _ports(below: Path) -> set[int]:
    """Return the ports of the folder's agents that are reached over TLS."""
    ports = set()
    for record in below.glob("sandboxes/*/handle.json"):
        with suppress(FileNotFoundError):
            scheme, _, rest = (json.loads(record.read_text(encoding="utf-8"))["address"] or "").partition(":")
            if scheme == "tls":
                ports.add(int(rest.rpartition(":")[2]))
    return ports


def _links(pid: int, below: Path) -> Iterator[socket.socket]:
    ports = _ports(below)
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
            if _leads_below(link, below) or _leads_to(link, ports):
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
        return False  # it is not connected any more


def _leads_to(link: socket.socket, ports: set[int]) -> bool:
    if link.family != socket.AF_INET or link.type != socket.SOCK_STREAM:
        return False
    try:
        return link.getpeername()[1] in ports
    except OSError:
        return False  # it listens, or is not connected any more
