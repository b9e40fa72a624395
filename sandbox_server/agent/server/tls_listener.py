"""TCP with TLS: the agent shows the certificate that was made for its sandbox, and whoever connects shows the token in the first frame.

The port can be reached by more than the service, say by slots that share the sandbox's network. So connections that have not shown the token are
few, have little time and leave nothing in the log but their number.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import ssl
import tempfile
from collections import OrderedDict
from typing import Tuple

from sandbox_server.agent.config import TlsListen
from sandbox_server.agent.server.connections import HELLO_WITHIN_S, Connection, Server

log = logging.getLogger(__name__)

MAX_UNAUTHENTICATED = 64
_BACKLOG = 128
_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_ACCEPT_AGAIN_S = 1.0
_LOG_EVERY_S = 60.0
# A service whose machine has vanished is noticed by the kernel, so that a service that is merely slow keeps its connection.
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000),
)


class TlsListener:
    """Listens on one port. Call `start` in the loop that serves.

    Args:
        server: what a connection needs of the agent.
        listen: where, and with which certificate and key.
        folder: the agent's own, for the moment in which the certificate must be a file.
        max_unauthenticated: how many connections may be without a shown token at once; for one more, the oldest goes.
        hello_within_s: how long a connection may take to show the token, its handshake included, in seconds.
    """

    def __init__(
        self, server: Server, listen: TlsListen, folder: str, *, max_unauthenticated: int = MAX_UNAUTHENTICATED, hello_within_s: float = HELLO_WITHIN_S
    ) -> None:
        self._server = server
        self._listen = listen
        self._context = make_context(listen.certificate, listen.key, folder)
        self._loop = asyncio.get_event_loop()
        self._unauthenticated: OrderedDict[socket.socket, _UnauthenticatedConnection] = OrderedDict()
        self._max_unauthenticated = max_unauthenticated
        self.hello_within_s = hello_within_s
        self._refused_count = 0
        self._is_closed = False
        family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)

    def start(self) -> Tuple[str, int]:
        """Listen; the address and port.

        Raises:
            OSError: the address or port cannot be had.
        """
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((self._listen.host, self._listen.port))
        self._socket.listen(_BACKLOG)
        self._socket.setblocking(False)
        self._accept_more()
        return self._listen.host, self._socket.getsockname()[1]

    def close(self) -> None:
        """Stop listening, and drop whoever has not shown the token."""
        self._is_closed = True
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        for pending in list(self._unauthenticated.values()):
            pending.drop()

    def _accept_more(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._socket.fileno(), self._accept)

    def _accept(self) -> None:
        """One connection a turn of the loop: those that are served go on meanwhile."""
        try:
            sock, _ = self._socket.accept()
        except OSError as error:
            if error.errno in _OUT_OF_RESOURCES:
                log.error("no connection can be accepted for %g s: %s", _ACCEPT_AGAIN_S, error)
                self._loop.remove_reader(self._socket.fileno())
                self._loop.call_later(_ACCEPT_AGAIN_S, self._accept_more)
            return  # else: whoever wanted to connect has gone again
        sock.setblocking(False)
        for level, name, value in _KEEPALIVE:
            with contextlib.suppress(OSError):  # some sandboxes' kernels lack one; without it a vanished service is noticed later
                sock.setsockopt(level, name, value)
        while len(self._unauthenticated) >= self._max_unauthenticated:
            next(iter(self._unauthenticated.values())).drop()
        pending = self._unauthenticated[sock] = _UnauthenticatedConnection(self, sock)
        pending.task = self._loop.create_task(self._handshake(pending, sock))

    async def _handshake(self, pending: _UnauthenticatedConnection, sock: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: pending.connection, sock, ssl=self._context, ssl_handshake_timeout=self.hello_within_s)
        except OSError:  # it was no TLS, or the other side went away; asyncio has closed the socket
            pending.settled(authenticated=False)

    def settled(self, sock: socket.socket, *, authenticated: bool) -> None:
        """A connection has shown the token, or is gone."""
        if self._unauthenticated.pop(sock, None) is not None and not authenticated:
            if not self._refused_count:
                self._loop.call_later(_LOG_EVERY_S, self._log_refused)
            self._refused_count += 1

    def _log_refused(self) -> None:
        log.warning("%d connections ended without showing the agent's token, in %g s", self._refused_count, _LOG_EVERY_S)
        self._refused_count = 0


class _UnauthenticatedConnection:
    """A connection that has not shown the token yet."""

    def __init__(self, listener: TlsListener, sock: socket.socket) -> None:
        self._listener = listener
        self._sock = sock
        self.connection = Connection(listener._server, self.settled)
        self.task: asyncio.Task[None] | None = None
        self._timer = listener._loop.call_later(listener.hello_within_s, self.drop)

    def drop(self) -> None:
        """End it, in the middle of its handshake or after it."""
        with contextlib.suppress(OSError):  # it may be closed already
            self._sock.shutdown(socket.SHUT_RDWR)
        self.connection.drop()
        self.settled(authenticated=False)

    def settled(self, *, authenticated: bool) -> None:
        """It has shown the token, or is gone."""
        self._timer.cancel()
        self._listener.settled(self._sock, authenticated=authenticated)


def make_context(certificate: str, key: str, folder: str) -> ssl.SSLContext:
    """The TLS of the agent's side.

    Args:
        certificate: in PEM.
        key: its private key, in PEM.
        folder: nobody else may look into it. The library reads files only, so both are in one there for a moment.

    Raises:
        OSError: they are no certificate and key, or do not belong together.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers("ECDHE+AESGCM:ECDHE+CHACHA20")  # for TLS 1.2; 1.3 has no others than good ones
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_TICKET
    context.num_tickets = 0
    descriptor, path = tempfile.mkstemp(dir=folder)  # readable by this user alone
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(certificate + "\n" + key)
        context.load_cert_chain(path)
    finally:
        os.unlink(path)
    return context
