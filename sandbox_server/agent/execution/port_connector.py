"""Connects to a port of a slot that has a network namespace of its own.

A forked child of init connects, because it is in the slot's network and has no other rights than the slot, and sends the connection over a unix socket.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from typing import Any, Sequence

from sandbox_server.agent.errors import Refused
from sandbox_server.agent.execution.background_tasks import BackgroundTasks
from sandbox_server.agent.execution.processes.descriptor_waits import wait_readable
from sandbox_server.agent.execution.processes.process_kill import kill_process
from sandbox_server.agent.execution.processes.spawn_spec import forked_tool_spec
from sandbox_server.agent.execution.reply_parser import ReplyParser
from sandbox_server.agent.execution.slot_runtime import SlotRuntime

REPLY_WITHIN_S = 8.0
"""Longer than the child waits for its connection. The slot may have stopped the child."""
_END_WITHIN_S = 2.0
_REPLY_BYTES = 4096
_DESCRIPTOR = struct.Struct("i")
_LOOPBACK = ("127.0.0.1", "::1")


class _NoContent:
    """Receives what follows the header of the reply: nothing that is used."""

    is_full = True

    def write(self, data: bytes) -> None:
        """See `Writable`."""


class _Child:
    """The child that connects, from the request to init on."""

    def __init__(self, runtime: SlotRuntime, port: int, reply_socket: socket.socket) -> None:
        self._runtime = runtime
        self._over: asyncio.Future[str] = asyncio.get_event_loop().create_future()
        request = forked_tool_spec("route_connect", {"port": port}).request
        self._spawn_id = runtime.link.start_process({**request, "fds": ["out"]}, [reply_socket.fileno()], self)

    def on_process_ended(self, status: int, cpu_s: float, max_rss_bytes: int) -> None:
        """See `init_link.SpawnListener`."""
        self._set_over("the process that connects has ended early")

    def on_process_refused(self, errno: int, step: str) -> None:
        """See `init_link.SpawnListener`."""
        self._set_over("the slot cannot start anything: %s" % os.strerror(errno))

    def on_init_lost(self, detail: str) -> None:
        """See `init_link.SpawnListener`."""
        self._set_over("the slot's init has ended: %s" % detail)

    def _set_over(self, detail: str) -> None:
        if not self._over.done():
            self._over.set_result(detail)

    async def describe_end(self) -> str:
        """Wait for the report of init, and return why there is no reply."""
        await self.wait_until_over(_END_WITHIN_S)
        return self._over.result() if self._over.done() else "the process that connects was interrupted"

    async def wait_until_over(self, timeout_s: float) -> bool:
        """Wait until init has reported the end of the child. Returns False if that takes more than `timeout_s` seconds."""
        await asyncio.wait([self._over], timeout=timeout_s)
        return self._over.done()

    async def kill(self) -> None:
        """Kill the child if it still runs."""
        if not self._over.done():
            await kill_process(self._runtime, self._spawn_id, self.wait_until_over, _END_WITHIN_S)


async def connect_to_port(runtime: SlotRuntime, tasks: BackgroundTasks, port: int, reply_within_s: float = REPLY_WITHIN_S) -> socket.socket:
    """Connect to a program that listens on a port of the slot's loopback interface.

    Args:
        runtime: the slot runtime; it must have a network namespace of its own.
        tasks: the background tasks of the slot.
        port: the TCP port.
        reply_within_s: how long to wait for the child, in seconds.

    Returns:
        The connection, which does not block. The caller closes it.

    Raises:
        Refused: port_closed, because nobody listens or accepts; internal, if the reply from the slot is not valid.
        OSError: the agent has no descriptors left, or the request could not be sent.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = None
    has_replied = False
    try:
        ours.setblocking(False)
        try:
            child = _Child(runtime, port, theirs)
        finally:
            theirs.close()
        if not await wait_readable(ours.fileno(), reply_within_s):
            raise Refused("port_closed", "port %d of the slot could not be connected to within %g s" % (port, reply_within_s))
        data, fds = _receive(ours)
        has_replied = bool(data)
        if not has_replied:
            raise Refused("port_closed", "port %d of the slot cannot be connected to: %s" % (port, await child.describe_end()))
        return _read_reply(data, fds, port)
    finally:
        ours.close()
        if child is not None and not has_replied:
            tasks.start_task(child.kill())


def _receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    """Receive the reply and the descriptors that came with it."""
    try:
        data, ancillary, _, _ = sock.recvmsg(_REPLY_BYTES, socket.CMSG_SPACE(_DESCRIPTOR.size), socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        return b"", []
    packed = b"".join(content for _, kind, content in ancillary if kind == socket.SCM_RIGHTS)
    return data, [number for (number,) in _DESCRIPTOR.iter_unpack(packed[: len(packed) // _DESCRIPTOR.size * _DESCRIPTOR.size])]


def _read_reply(data: bytes, fds: Sequence[int], port: int) -> socket.socket:
    """Return the connection of a reply. What the reply says and carries is checked, although the slot should be unable to change it."""
    parser = ReplyParser(_NoContent())
    parser.write(data)
    header: dict[str, Any] = parser.header or {}
    sockets = []
    for fd in fds:
        try:
            sockets.append(socket.socket(fileno=fd))
        except OSError:  # it is none
            os.close(fd)
    if len(fds) == len(sockets) == 1 and header.get("ok") is True and _is_connection_to(sockets[0], port):
        sockets[0].setblocking(False)
        sockets[0].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sockets[0]
    for sock in sockets:
        sock.close()
    if header.get("ok") is False and header.get("code") == "port_closed":
        errno = header.get("errno")
        raise Refused("port_closed", str(header.get("detail")), errno if isinstance(errno, str) else None)
    raise Refused("internal", "the reply of the process that connects to port %d is not valid: %s" % (port, ascii(header.get("detail"))))


def _is_connection_to(sock: socket.socket, port: int) -> bool:
    try:
        if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type & ~(socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) != socket.SOCK_STREAM:
            return False
        address, peer_port = sock.getpeername()[:2]
    except OSError:
        return False
    return address in _LOOPBACK and peer_port == port
