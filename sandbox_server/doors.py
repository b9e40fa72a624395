"""Who may stand in the door: HTTP connections are counted, and those that never asked with a token make room for those that do.

A slot that shares the network can open as many connections as it likes. Without this, they would use up the service's descriptors, and no trainer could
get in. A connection that does not finish the head of a request in time is closed; when all places are taken, the one that has waited longest
without a valid token goes.
"""

from __future__ import annotations

import asyncio
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


@dataclass
class Doors:
    """The places there are.

    Args:
        places: how many connections may be open at once.
        trusted: whether a request, as the application left its scope, came with a valid token.
        head_within_s: how long the head of a request may take, in seconds.
    """

    places: int
    trusted: Callable[[Mapping[str, Any]], bool]
    head_within_s: float = HEAD_WITHIN_S
    strangers: OrderedDict[Visitor, None] = field(default_factory=OrderedDict)
    friends: set[Visitor] = field(default_factory=set)

    def enter(self, visitor: Visitor) -> bool:
        """Let a connection in, if need be for a stranger that waits longer. Returns whether there is a place."""
        if len(self.strangers) + len(self.friends) >= self.places and not self._make_room():
            log.warning("a connection was refused: all %d places are taken by callers with a token", self.places)
            return False
        self.strangers[visitor] = None
        return True

    def leave(self, visitor: Visitor) -> None:
        """Its place is free."""
        self.strangers.pop(visitor, None)
        self.friends.discard(visitor)

    def _make_room(self) -> bool:
        while self.strangers:
            visitor, _ = self.strangers.popitem(last=False)
            scope = cast("Mapping[str, Any] | None", visitor.scope)
            if scope is None or not self.trusted(scope):
                visitor.dismiss()
                return True
            self.friends.add(visitor)
        return False


class Visitor(HttpToolsProtocol):
    """One connection, as uvicorn serves it, with an eye on the clock and on the door."""

    def __init__(self, *args: Any, doors: Doors, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._doors = doors
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        cast(asyncio.Transport, transport).set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        if self._doors.enter(self):
            self._expect_head()
        else:
            self.dismiss()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_here()
        self._doors.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        cycle = cast("RequestResponseCycle | None", self.cycle)
        if self._head_timer is None and (cycle is None or cycle.response_complete):
            self._expect_head()
        super().data_received(data)

    def on_headers_complete(self) -> None:
        self._head_is_here()
        super().on_headers_complete()

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
        self._head_timer = self.loop.call_later(self._doors.head_within_s, self.dismiss)

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
