"""Limits how many connections the HTTP server holds, so that connections without a valid token cannot use up its file descriptors.

A slot that shares the network can open as many connections to the service as it likes, and without this limit no trainer could connect any more.
These are the rules:

- A connection that does not finish the head of a request in time is closed.
- When all places are taken, a new connection takes the place of the oldest unauthenticated one.
- Some places are kept for connections that have not carried a valid token yet. When authenticated connections have taken all others, the tenant
  with the most of them loses one, so that no tenant can keep another one out.
- A WebSocket connection keeps the place of the HTTP connection that it was upgraded from, until it is closed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import resource
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from sandbox_server.api.problems import problem_of
from sandbox_server.core.errors import InvalidRequest
from sandbox_server.response_writer import ResponseWriter

log = logging.getLogger(__name__)

HEAD_WITHIN_S = 15.0
"""How long the head of a request may take, in seconds."""

WRITE_BUFFER_BYTES = 32 << 10
"""How much of a response a connection buffers, beside the part written last, before the next part waits."""
RESERVED_DESCRIPTORS = 512
"""How many file descriptors are kept for agents, state and files."""

UNAUTHENTICATED_SHARE = 8
"""One of this many places is kept for connections that have not carried a valid token yet."""

SEARCHED_COUNT = 1000
"""Among how many of a tenant's oldest connections an idle one is searched."""


@dataclass
class ConnectionLimiter:
    """Counts the open connections of the server, and decides which one is closed when there is no place for another.

    Args:
        places: how many connections may be open at once.
        tenant_of: gives, for the scope of a request, the tenant of its token, as the application noted it there; None: it had no valid token.
        head_within_s: how long the head of a request may take, in seconds.

    Attributes:
        unauthenticated: the connections that have not carried a valid token yet, the oldest first.
        authenticated: the others, the oldest first, by the tenant of the first token that each carried.
    """

    places: int
    tenant_of: Callable[[Mapping[str, Any]], str | None]
    head_within_s: float = HEAD_WITHIN_S
    unauthenticated: OrderedDict[LimitedConnection, None] = field(default_factory=OrderedDict)
    authenticated: dict[str, OrderedDict[LimitedConnection, None]] = field(default_factory=dict)

    def add_connection(self, connection: LimitedConnection) -> bool:
        """Give a new connection a place, if need be that of an unauthenticated one, which is closed. Returns whether it has one."""
        if self._connection_count() >= self.places and not self._free_a_place():
            log.warning("a connection was refused: all %d places are taken by authenticated connections", self.places)
            return False
        self.unauthenticated[connection] = None
        return True

    def remove_connection(self, connection: LimitedConnection) -> None:
        """Free the place of a connection. Does nothing for a connection that has none."""
        self.unauthenticated.pop(connection, None)
        if connection.tenant is not None:
            connections = self.authenticated[connection.tenant]
            connections.pop(connection, None)
            if not connections:
                del self.authenticated[connection.tenant]
            connection.tenant = None

    def update_authentication(self, connection: LimitedConnection) -> None:
        """Count a connection as authenticated once its request has carried a valid token.

        If authenticated connections then take places that are kept for others, one of the tenant with the most is closed.
        """
        scope = connection.request_scope
        tenant = None if scope is None else self.tenant_of(scope)
        if tenant is None or connection not in self.unauthenticated:
            return
        del self.unauthenticated[connection]
        connection.tenant = tenant
        self.authenticated.setdefault(tenant, OrderedDict())[connection] = None
        kept_places = max(1, self.places // UNAUTHENTICATED_SHARE)
        if self._authenticated_count() > max(1, self.places - kept_places):
            self._close_one_of_largest_tenant(tenant)

    def _close_one_of_largest_tenant(self, preferred: str) -> None:
        """Close a connection of the tenant that has the most, of the preferred tenant where several have: an idle one, else the newest."""
        largest = max(self.authenticated, key=lambda name: (len(self.authenticated[name]), name == preferred))
        connections = self.authenticated[largest]
        oldest = itertools.islice(connections, SEARCHED_COUNT)
        connection = next((connection for connection in oldest if connection.is_idle), next(reversed(connections)))
        extra = {"tenant": largest, "connections": len(connections)}
        log.warning("a connection is closed: its tenant has the most connections, and all places are taken", extra=extra)
        self.remove_connection(connection)
        connection.abort()

    def _authenticated_count(self) -> int:
        return sum(map(len, self.authenticated.values()))

    def _connection_count(self) -> int:
        return len(self.unauthenticated) + self._authenticated_count()

    def _free_a_place(self) -> bool:
        """Close the oldest unauthenticated connection. Returns whether a place is free now."""
        while self.unauthenticated:
            connection = next(iter(self.unauthenticated))
            self.update_authentication(connection)
            if connection in self.unauthenticated:
                del self.unauthenticated[connection]
                connection.abort()
                return True
            if self._connection_count() < self.places:
                return True
        return False


class LimitedConnection(HttpToolsProtocol):
    """One connection of the server: uvicorn's, with a place of the limiter and a time limit for the head of a request.

    Args:
        limiter: gives the connection its place.
        args: those of uvicorn's connection.
        kwargs: those of uvicorn's connection.

    Attributes:
        tenant: the tenant of the first valid token that it carried; None: it has carried none.
    """

    def __init__(self, *args: Any, limiter: ConnectionLimiter, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limiter = limiter
        self.tenant: str | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._websocket: asyncio.Protocol | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        cast(asyncio.Transport, transport).set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        if self._limiter.add_connection(self):
            self._start_head_timer()
        else:
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._limiter.remove_connection(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        cycle = cast("RequestResponseCycle | None", self.cycle)
        if self._head_timer is None and (cycle is None or cycle.response_complete):
            self._start_head_timer()
        super().data_received(data)

    def on_headers_complete(self) -> None:
        self._stop_head_timer()
        cycle = cast("RequestResponseCycle | None", self.cycle)
        super().on_headers_complete()
        if self.cycle is not cycle:  # there is none for a request to upgrade the connection
            # uvicorn starts the application's task with this, and the task has not run yet.
            self.cycle.transport = ResponseWriter(self.transport, self.loop)
        self._check_authentication_soon()

    def handle_websocket_upgrade(self) -> None:
        """Pass the connection to the WebSocket protocol. It keeps its place until it has ended."""
        super().handle_websocket_upgrade()
        websocket = cast("asyncio.Protocol", self.transport.get_protocol())
        if not getattr(websocket, "handshake_initiated", True) and not self.transport.is_closing():
            # The WebSocket library cannot read this head. uvicorn would leave the connection open, and fail over it when the server stops.
            self.connections.discard(websocket)
            self.transport.set_protocol(self)
            self.send_400_response("Invalid WebSocket handshake received: it is malformed, or has a header too large or too many headers.")
            return
        self._websocket = websocket
        self.transport.set_protocol(_UpgradedConnection(websocket, self._free_place_of_websocket))
        self._check_authentication_soon()

    def _free_place_of_websocket(self) -> None:
        self._limiter.remove_connection(self)

    def _check_authentication_soon(self) -> None:
        if self.tenant is None:
            # The application's task has been created before this, so it runs first; and the first thing it does is to check the token.
            self.loop.call_soon(self._limiter.update_authentication, self)

    @property
    def request_scope(self) -> Mapping[str, Any] | None:
        """The scope of the last request, or of the WebSocket handshake; None before the first request."""
        scope = getattr(self._websocket, "scope", None) if self._websocket is not None else self.scope
        return cast("Mapping[str, Any] | None", scope)

    @property
    def is_idle(self) -> bool:
        """Whether no request is in progress on it. A WebSocket connection is never idle."""
        cycle = cast("RequestResponseCycle | None", self.cycle)
        return self._websocket is None and (cycle is None or (cycle.response_complete and not self.pipeline))

    def send_400_response(self, msg: str) -> None:
        """Respond with a problem document to bytes that are not an HTTP request."""
        self._stop_head_timer()
        request_id = secrets.token_hex(8)
        problem = problem_of(InvalidRequest(msg), request_id, status=400)
        headers = {**problem.headers, "x-request-id": request_id, "content-length": str(len(problem.body)), "connection": "close"}
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.transport.write(f"HTTP/1.1 400 Bad Request\r\n{head}\r\n".encode() + problem.body)
        self.transport.close()

    def abort(self) -> None:
        """Close the connection at once."""
        self._stop_head_timer()
        self.transport.abort()

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(self._limiter.head_within_s, self.abort)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class _UpgradedConnection(asyncio.Protocol):
    """Passes the events of a transport on to uvicorn's WebSocket protocol, and reports the end of the connection.

    Args:
        websocket: uvicorn's protocol.
        ended: called when the connection has ended.
    """

    def __init__(self, websocket: asyncio.Protocol, ended: Callable[[], None]) -> None:
        self._websocket = websocket
        self._ended = ended

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended()
        self._websocket.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._websocket.data_received(data)

    def eof_received(self) -> bool | None:
        return self._websocket.eof_received()

    def pause_writing(self) -> None:
        self._websocket.pause_writing()

    def resume_writing(self) -> None:
        self._websocket.resume_writing()


def raise_descriptor_limit() -> int:
    """Raise the process's limit of open file descriptors as far as allowed, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def places_for(descriptor_count: int) -> int:
    """How many connections a process with so many file descriptors may hold."""
    return max(64, min(descriptor_count - RESERVED_DESCRIPTORS, 1 << 16))
