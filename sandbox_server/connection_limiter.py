"""Who may stand in the door: HTTP connections are counted, and those that never asked with a token make room for those that do.

A slot that shares the network can open as many connections as it likes. Without this, they would use up the service's descriptors, and no trainer could
get in. A connection that does not finish the head of a request in time is closed; when all places are taken, the one that has waited longest
without a valid token goes. Some places are kept for those that have not shown a token yet. When connections with a token have taken all others, the
tenant that has the most of them loses one, so that no tenant keeps another out.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import resource
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

log = logging.getLogger(__name__)

HEAD_WITHIN_S = 15.0
"""How long the head of a request may take, in seconds."""

WRITE_BUFFER_BYTES = 32 << 10
"""How much of an answer a connection holds, beside the piece written last, before the next piece waits."""
RESERVED_DESCRIPTORS = 512
"""What the service keeps for agents, state and files."""


NEWCOMERS_SHARE = 8
"""One of so many places is for connections that have not come with a token yet."""

LOOKED_AT_COUNT = 1000
"""Among so many connections of a tenant, the oldest ones, an idle one is looked for."""


@dataclass
class ConnectionLimiter:
    """The places there are.

    Args:
        places: how many connections may be open at once.
        tenant_of: whose valid token a request came with, as the application left its scope; None: it came without one.
        head_within_s: how long the head of a request may take, in seconds.
    """

    places: int
    tenant_of: Callable[[Mapping[str, Any]], str | None]
    head_within_s: float = HEAD_WITHIN_S
    strangers: OrderedDict[LimitedConnection, None] = field(default_factory=OrderedDict)
    #: the connections that came with a token, by the tenant of the first one that each showed, the oldest first
    friends: dict[str, OrderedDict[LimitedConnection, None]] = field(default_factory=dict)

    def enter(self, visitor: LimitedConnection) -> bool:
        """Let a connection in, if need be for a stranger that waits longer. Returns whether there is a place."""
        if len(self.strangers) + self._friend_count() >= self.places and not self._make_room():
            log.warning("a connection was refused: all %d places are taken by callers with a token", self.places)
            return False
        self.strangers[visitor] = None
        return True

    def leave(self, visitor: LimitedConnection) -> None:
        """Its place is free."""
        self.strangers.pop(visitor, None)
        if visitor.tenant is not None:
            own = self.friends[visitor.tenant]
            own.pop(visitor, None)
            if not own:
                del self.friends[visitor.tenant]
            visitor.tenant = None

    def recognise(self, visitor: LimitedConnection) -> None:
        """See whether a connection has come with a token. One more of them than there are places for ends one of the tenant that has the most."""
        scope = cast("Mapping[str, Any] | None", visitor.scope)
        tenant = None if scope is None else self.tenant_of(scope)
        if tenant is None or visitor not in self.strangers:
            return
        del self.strangers[visitor]
        visitor.tenant = tenant
        self.friends.setdefault(tenant, OrderedDict())[visitor] = None
        if self._friend_count() > max(1, self.places - max(1, self.places // NEWCOMERS_SHARE)):
            self._end_one(tenant)

    def _end_one(self, tenant: str) -> None:
        """End a connection of the tenant that has the most, of the given one where several have: an idle one, else the newest."""
        most = max(self.friends, key=lambda name: (len(self.friends[name]), name == tenant))
        own = self.friends[most]
        oldest = itertools.islice(own, LOOKED_AT_COUNT)
        visitor = next((visitor for visitor in oldest if visitor.is_idle), next(reversed(own)))
        log.warning("a connection is closed: its tenant has the most, and all places are taken", extra={"tenant": most, "connections": len(own)})
        self.leave(visitor)
        visitor.dismiss()

    def _friend_count(self) -> int:
        return sum(map(len, self.friends.values()))

    def _make_room(self) -> bool:
        while self.strangers:
            visitor = next(iter(self.strangers))
            self.recognise(visitor)
            if visitor in self.strangers:
                del self.strangers[visitor]
                visitor.dismiss()
                return True
            if len(self.strangers) + self._friend_count() < self.places:
                return True
        return False


class LimitedConnection(HttpToolsProtocol):
    """One connection, as uvicorn serves it, with an eye on the clock and on the door."""

    def __init__(self, *args: Any, limiter: ConnectionLimiter, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limiter = limiter
        #: by whose token it was let in
        self.tenant: str | None = None
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        cast(asyncio.Transport, transport).set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        if self._limiter.enter(self):
            self._expect_head()
        else:
            self.dismiss()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_here()
        self._limiter.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        cycle = cast("RequestResponseCycle | None", self.cycle)
        if self._head_timer is None and (cycle is None or cycle.response_complete):
            self._expect_head()
        super().data_received(data)

    def on_headers_complete(self) -> None:
        self._head_is_here()
        super().on_headers_complete()
        if self.tenant is None:
            # After the application has begun with this request: the first thing that it does is to look at the token.
            self.loop.call_soon(self._limiter.recognise, self)

    @property
    def is_idle(self) -> bool:
        """Whether no request is under way on it."""
        cycle = cast("RequestResponseCycle | None", self.cycle)
        return cycle is None or (cycle.response_complete and not self.pipeline)

    def send_400_response(self, msg: str) -> None:
        """Say as a problem document that this is no HTTP."""
        self._head_is_here()
        request_id = secrets.token_hex(8)
        problem = {"type": "urn:sandbox-pool:problem:invalid_request", "title": "Invalid request", "status": 400, "detail": msg, "code": "invalid_request"}
        body = json.dumps({**problem, "request_id": request_id}).encode()
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/problem+json\r\nx-request-id: {request_id}\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        self.transport.close()

    def dismiss(self) -> None:
        """Close the connection at once."""
        self._head_is_here()
        self.transport.abort()

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(self._limiter.head_within_s, self.dismiss)

    def _head_is_here(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def open_files_limit() -> int:
    """Raise the limit of open descriptors as far as it goes, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def places_for(descriptors: int) -> int:
    """How many connections a process with so many descriptors lets in."""
    return max(64, min(descriptors - RESERVED_DESCRIPTORS, 1 << 16))
