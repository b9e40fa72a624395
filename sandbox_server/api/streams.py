"""Responses that are sent in parts at the pace of the client: bytes, and server-sent events."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from sandbox_server.api.body import ClientDisconnected, ClientStalled
from sandbox_server.api.contract.render import dumps
from sandbox_server.api.limits import Limits, text_of, too_many_at_once
from sandbox_server.api.request_context import Service
from sandbox_server.core.errors import QuotaExceeded

EVENT_STREAM_TYPE = "text/event-stream"
HEARTBEAT_S = 15.0
COMMENT = b":\n\n"
EVENT_END = b"\n\n"
MISSED_EVENT = "missed"
"""The name of an event that reports what the stream has left out."""
PART_BYTES = 16 << 10
"""Smaller chunks are collected to parts of at least this size, unless no more follows at once."""


def body_part(chunk: bytes, *, more: bool = True) -> Message:
    """The ASGI message that sends one part of a response's body."""
    return {"type": "http.response.body", "body": chunk, "more_body": more}


async def wait_for_disconnect(receive: Receive) -> None:
    """Wait until the client has closed the connection. Discard everything that it sends until then."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_part(send: Send, chunk: bytes, stall_s: float, *, more: bool = True) -> None:
    """Send one part of a body at the pace of the client.

    Args:
        send: the send function of the ASGI application.
        chunk: the part. It is held in memory until the client has read most of it, so it should be small.
        stall_s: for how long the client may read nothing of what was sent before, in seconds.
        more: whether more parts follow.

    Raises:
        ClientStalled: the client has read nothing for that long.
    """
    try:
        async with asyncio.timeout(stall_s):
            await send(body_part(chunk, more=more))
    except TimeoutError:
        raise ClientStalled(f"the client has not read a part of its response within the {stall_s:g} s of `limits.answer_stall_s`") from None
    # Sending to a client that reads fast enough never waits, and without this no other request would run until the whole body is sent.
    if more:
        await asyncio.sleep(0)


class StreamResponse(Response):
    """A response whose body is sent as it comes, at the pace of the client.

    The head is sent with the first chunk: an error before that can still be reported by a problem document.

    Args:
        chunks: the body.
        media_type: the media type of the body.
        headers: further headers.
        stall_s: for how long the client may read nothing, in seconds.
        on_end: called once the chunks are needed no more, however the response ended.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[bytes, None],
        media_type: str,
        headers: dict[str, str] | None = None,
        *,
        stall_s: float,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(media_type=media_type, headers=headers)
        del self.headers["content-length"]
        self._chunks = chunks
        self._stall_s = stall_s
        self._on_end = on_end

    def announce_size(self, size_bytes: int) -> None:
        """Set the size of the whole body. It can be set until the first chunk is returned, and the chunks must have it together."""
        self.headers["content-length"] = str(size_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        disconnected = asyncio.create_task(wait_for_disconnect(receive))
        try:
            async with aclosing(self._chunks) as chunks:
                part = await anext(chunks, b"")
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                async for chunk in chunks:
                    if len(part) >= PART_BYTES:
                        await self._send(send, part, disconnected)
                        part = b""
                    part += chunk
            if len(part) >= PART_BYTES:
                await self._send(send, part, disconnected)
                part = b""
            await self._send(send, part, disconnected, more=False)
        finally:
            disconnected.cancel()
            self._on_end()

    async def _send(self, send: Send, part: bytes, disconnected: asyncio.Task[None], *, more: bool = True) -> None:
        if disconnected.done():
            raise ClientDisconnected
        await send_part(send, part, self._stall_s, more=more)


def event_block(data: object, *, event: str, event_id: int | None = None) -> bytes:
    """One server-sent event. Its data is JSON, which has no line ends of its own."""
    head = f"event: {event}\n" if event_id is None else f"id: {event_id}\nevent: {event}\n"
    return head.encode() + b"data: " + dumps(data) + EVENT_END


def check_stream_limit(service: Service, tenant: str) -> None:
    """Refuse an event stream beyond `limits.streams`, of which one tenant may have half. To be called before anything is started for the stream.

    Raises:
        QuotaExceeded: too many streams are open, of all tenants or of this one.
    """
    check_open_at_once(service.limits, "streams", service.stream_counts, tenant)


def check_open_at_once(limits: Limits, name: str, counts: Counter[str], tenant: str) -> None:
    """Refuse what would exceed a limit of what is open at once, of which one tenant may have half.

    Args:
        limits: the limits.
        name: the limit.
        counts: how many of what it counts are open, by tenant.
        tenant: the tenant that opens another one.

    Raises:
        QuotaExceeded: too many are open, of all tenants or of this one.
    """
    most: int = getattr(limits, name)
    if counts.total() >= most:
        raise too_many_at_once(limits, name)
    most_of_tenant = (most + 1) // 2
    if counts[tenant] >= most_of_tenant:
        share = f"more than {most_of_tenant} {text_of(name).replace(' open', ' of one tenant open')}: that is half of `limits.{name}`"
        raise QuotaExceeded(f"{share}; close some, or try again later", limit=name, retry_after_s=5)


class EventStreamResponse(Response):
    """Server-sent events, with a comment as a heartbeat while there is no event. It ends with the events.

    Args:
        events: whole events, as `event_block` makes them, or pieces of one. The generator is closed at the end.
        service: the service, which counts its event streams.
        tenant: the tenant for which the stream is counted.
        ends_with_service: whether the stream ends as soon as the service begins to stop. If not, the events must end by themselves.
        heartbeat_s: for how long nothing is sent at most, in seconds.
        on_end: called once the events are needed no more, however the response ended.

    Raises:
        QuotaExceeded: too many streams are open, of all tenants or of this one.
    """

    media_type = EVENT_STREAM_TYPE

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        service: Service,
        tenant: str,
        *,
        ends_with_service: bool = False,
        heartbeat_s: float = HEARTBEAT_S,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_end = on_end
        try:
            check_stream_limit(service, tenant)
        except QuotaExceeded:
            on_end()
            raise
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._service = service
        self._tenant = tenant
        self._stopping = service.stopping if ends_with_service else None
        self._heartbeat_s = heartbeat_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._service.stream_counts[self._tenant] += 1
        disconnected = asyncio.create_task(wait_for_disconnect(receive))
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send(body_part(COMMENT))
            await self._send_events(send, disconnected, self._service.limits.answer_stall_s)
            await send(body_part(b"", more=False))
        finally:
            self._service.stream_counts[self._tenant] -= 1
            disconnected.cancel()
            self._on_end()
            await self._events.aclose()

    async def _send_events(self, send: Send, disconnected: asyncio.Task[None], stall_s: float) -> None:
        ends: set[asyncio.Future[Any]] = {disconnected} if self._stopping is None else {disconnected, self._stopping}
        next_piece: asyncio.Future[Any] = asyncio.ensure_future(anext(self._events, None))
        is_event_complete = True  # a heartbeat must not be sent between two pieces of one event
        try:
            while True:
                await asyncio.wait({next_piece, *ends}, timeout=self._heartbeat_s, return_when=asyncio.FIRST_COMPLETED)
                if disconnected.done():
                    raise ClientDisconnected
                if next_piece.done():
                    piece = next_piece.result()
                    if piece is None:
                        return
                    await send_part(send, piece, stall_s)
                    is_event_complete = piece.endswith(EVENT_END)
                    next_piece = asyncio.ensure_future(anext(self._events, None))
                elif any(end.done() for end in ends):
                    return
                elif is_event_complete:
                    await send_part(send, COMMENT, stall_s)
        finally:
            if not next_piece.done():
                next_piece.cancel()
                await asyncio.wait({next_piece})
