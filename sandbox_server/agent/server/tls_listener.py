"""Listens on a TCP port with TLS. The agent presents the certificate that was made for its sandbox; a client sends the agent's token in its first frame.

Not only the service can reach the port: slots that share the network of the sandbox can, too. So the number of unauthenticated connections and their
duration are limited, and the log contains nothing about them but their number.
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
from sandbox_server.agent.server.connections import HELLO_WITHIN_S, AgentServer, ServiceConnection

log = logging.getLogger(__name__)

MAX_UNAUTHENTICATED = 64
BACKLOG = 128
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
    """Listens on one port. Make it in the event loop that serves the connections.

    Args:
        server: the agent.
        listen: the address and port, the certificate and its key.
        folder: the agent's own folder, in which the certificate is stored for a moment.
        max_unauthenticated: how many unauthenticated connections there may be; for a further one, the oldest is dropped.
        hello_within_s: how long a connection may take to send the token, its TLS handshake included, in seconds.

    Raises:
        OSError: the certificate and the key do not belong together.
    """

    def __init__(
        self, server: AgentServer, listen: TlsListen, folder: str, *, max_unauthenticated: int = MAX_UNAUTHENTICATED, hello_within_s: float = HELLO_WITHIN_S
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

    def start_listening(self) -> Tuple[str, int]:
        """Listen.

        Returns:
            The address and the port.

        Raises:
            OSError: the address or the port cannot be used.
        """
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((self._listen.host, self._listen.port))
        self._socket.listen(BACKLOG)
        self._socket.setblocking(False)
        self._resume_accepting()
        return self._listen.host, self._socket.getsockname()[1]

    def stop_listening(self) -> None:
        """Close the port, and drop all unauthenticated connections."""
        self._is_closed = True
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        for pending in list(self._unauthenticated.values()):
            pending.drop_unauthenticated()

    def _resume_accepting(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._socket.fileno(), self._accept_one)

    def _accept_one(self) -> None:
        """Accept one connection. Only one is accepted in a turn of the event loop, so that existing connections are served in between."""
        try:
            sock, _ = self._socket.accept()
        except OSError as error:
            if error.errno in _OUT_OF_RESOURCES:
                log.error("no connection can be accepted for %g s: %s", _ACCEPT_AGAIN_S, error)
                self._loop.remove_reader(self._socket.fileno())
                self._loop.call_later(_ACCEPT_AGAIN_S, self._resume_accepting)
            return  # any other error: the client has closed the connection already
        sock.setblocking(False)
        for level, name, value in _KEEPALIVE:
            with contextlib.suppress(OSError):  # some kernels lack one of these options; then a machine that has vanished is noticed later
                sock.setsockopt(level, name, value)
        while len(self._unauthenticated) >= self._max_unauthenticated:
            next(iter(self._unauthenticated.values())).drop_unauthenticated()
        pending = self._unauthenticated[sock] = _UnauthenticatedConnection(self, sock)
        pending.task = self._loop.create_task(self._handshake(pending, sock))

    async def _handshake(self, pending: _UnauthenticatedConnection, sock: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: pending.connection, sock, ssl=self._context, ssl_handshake_timeout=self.hello_within_s)
        except OSError:  # the client does not speak TLS, or has closed the connection; asyncio has closed the socket
            pending.on_authentication(authenticated=False)

    def forget_unauthenticated(self, sock: socket.socket, *, authenticated: bool) -> None:
        """A connection has authenticated itself, or has ended."""
        if self._unauthenticated.pop(sock, None) is not None and not authenticated:
            if not self._refused_count:
                self._loop.call_later(_LOG_EVERY_S, self._log_refused)
            self._refused_count += 1

    def _log_refused(self) -> None:
        log.warning("%d connections ended without sending the agent's token, in %g s", self._refused_count, _LOG_EVERY_S)
        self._refused_count = 0


class _UnauthenticatedConnection:
    """A connection that has not sent the token yet.

    Args:
        listener: the listener that has accepted it.
        sock: its socket.
    """

    def __init__(self, listener: TlsListener, sock: socket.socket) -> None:
        self._listener = listener
        self._sock = sock
        self.connection = ServiceConnection(listener._server, self.on_authentication)
        self.task: asyncio.Task[None] | None = None
        self._timer = listener._loop.call_later(listener.hello_within_s, self.drop_unauthenticated)

    def drop_unauthenticated(self) -> None:
        """Close the connection, during its TLS handshake or after it."""
        with contextlib.suppress(OSError):  # the socket may be closed already
            self._sock.shutdown(socket.SHUT_RDWR)
        self.connection.drop_connection()
        self.on_authentication(authenticated=False)

    def on_authentication(self, *, authenticated: bool) -> None:
        """See `AuthenticationListener`."""
        self._timer.cancel()
        self._listener.forget_unauthenticated(self._sock, authenticated=authenticated)


def make_context(certificate: str, key: str, folder: str) -> ssl.SSLContext:
    """Make the TLS settings of the agent's side.

    Args:
        certificate: in PEM.
        key: its private key, in PEM.
        folder: a folder that only this user can read. Certificate and key are stored there for a moment, because the library reads them from files only.

    Raises:
        OSError: they are not a certificate and a key that belong together.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers("ECDHE+AESGCM:ECDHE+CHACHA20")  # for TLS 1.2; all ciphers of TLS 1.3 are good
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
