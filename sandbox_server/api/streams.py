"""Answers that come bit by bit: bytes at the caller's pace, results as lines, server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from sandbox_server.api.body import CallerGone, CallerStalled
from sandbox_server.api.contract.render import dumps
from sandbox_server.api.limits import too_much_at_once
from sandbox_server.api.service import Service
from sandbox_server.core.errors import QuotaExceeded

EVENT_STREAM_TYPE = "text/event-stream"
HEARTBEAT_S = 15.0
COMMENT = b":\n\n"
BLOCK_END = b"\n\n"
PART_BYTES = 16 << 10
"""Less than this is not sent for itself where more comes at once."""


def body_part(chunk: bytes, *, more: bool = True) -> Message:
    """One part of a response's body."""
    return {"type": "http.response.body", "body": chunk, "more_body": more}


async def hang_up(receive: Receive) -> None:
    """Return once the caller has hung up. Whatever it still sends is read over."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_part(send: Send, chunk: bytes, stall_s: float) -> None:
    """Send one part of a body at the pace of the caller.

    Args:
        send: of the application.
        chunk: the part; small, because a part is held until the caller has taken most of it.
        stall_s: how long the caller may take for what was sent before, in seconds.

    Raises:
        CallerStalled: it took longer.
    """
    try:
        async with asyncio.timeout(stall_s):
            await send(body_part(chunk))
    except TimeoutError:
        raise CallerStalled(f"the caller has not taken a part of its answer within the {stall_s:g} s of `limits.answer_stall_s`") from None
    # A caller that reads as fast as it is written to would else keep everybody waiting until it has all.
    await asyncio.sleep(0)


class Stream(Response):
    """Bytes as they come, at the pace of the caller. Nothing is answered before the first of them: until then an error can still be told.

    Args:
        chunks: the bytes.
        media_type: of what they are.
        headers: further headers.
        stall_s: how long the caller may take for one part, in seconds.
        ended: called when the chunks are needed no more, whatever the end.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[bytes, None],
        media_type: str,
        headers: dict[str, str] | None = None,
        *,
        stall_s: float,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(media_type=media_type, headers=headers)
        del self.headers["content-length"]
        self._chunks = chunks
        self._stall_s = stall_s
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(hang_up(receive))
        try:
            async with aclosing(self._chunks) as chunks:
                waiting = await anext(chunks, b"")
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                async for chunk in chunks:
                    if len(waiting) >= PART_BYTES:
                        await self._send(send, waiting, gone)
                        waiting = b""
                    waiting += chunk
            await self._send(send, waiting, gone)
            await send(body_part(b"", more=False))
        finally:
            gone.cancel()
            self._ended()

    async def _send(self, send: Send, part: bytes, gone: asyncio.Task[None]) -> None:
        if gone.done():
            raise CallerGone
        await send_part(send, part, self._stall_s)


def event_block(data: object, *, event: str, event_id: int | None = None) -> bytes:
    """One server-sent event. Its data is JSON, so it has no line ends of its own."""
    head = f"event: {event}\n" if event_id is None else f"id: {event_id}\nevent: {event}\n"
    return head.encode() + b"data: " + dumps(data) + b"\n\n"


def check_room(service: Service, tenant: str) -> None:
    """Refuse one event stream more than there may be, or than one tenant may have, which is half of them; before anything is begun for it.

    Raises:
        QuotaExceeded: so many are open.
    """
    most = service.limits.streams
    if service.streams.total() >= most:
        raise too_much_at_once(service.limits, "streams")
    most_of_tenant = (most + 1) // 2
    if service.streams[tenant] >= most_of_tenant:
        share = f"more than {most_of_tenant} event streams of one tenant open at once: that is half of `limits.streams`"
        raise QuotaExceeded(f"{share}; close some, or try again later", limit="streams", retry_after_s=5)


class EventStream(Response):
    """Server-sent events as they come, a comment now and then while none does; ends with them, or when the service stops.

    Args:
        events: whole blocks, as `event_block` makes them, or pieces of them. Closed at the end, whatever that is.
        service: whose streams are counted.
        tenant: to whom the stream counts.
        ends_at_once: when the service is told to stop; else the events end by themselves in time.
        heartbeat_s: how long nothing is sent at most, in seconds.
        ended: called when the events are needed no more, whatever the end.

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
        ends_at_once: bool = False,
        heartbeat_s: float = HEARTBEAT_S,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        self._ended = ended
        try:
            check_room(service, tenant)
        except QuotaExceeded:
            ended()
            raise
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._service = service
        self._tenant = tenant
        self._stopping = service.stopping if ends_at_once else None
        self._heartbeat_s = heartbeat_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._service.streams[self._tenant] += 1
        gone = asyncio.create_task(hang_up(receive))
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send(body_part(COMMENT))
            await self._pass_on(send, gone, self._service.limits.answer_stall_s)
            await send(body_part(b"", more=False))
        finally:
            self._service.streams[self._tenant] -= 1
            gone.cancel()
            self._ended()
            await self._events.aclose()

    async def _pass_on(self, send: Send, gone: asyncio.Task[None], stall_s: float) -> None:
        ends: set[asyncio.Future[Any]] = {gone} if self._stopping is None else {gone, self._stopping}
        coming: asyncio.Future[Any] = asyncio.ensure_future(anext(self._events, None))
        is_whole = True  # nothing may come between the pieces of a block
        try:
            while True:
                await asyncio.wait({coming, *ends}, timeout=self._heartbeat_s, return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    raise CallerGone
                if coming.done():
                    block = coming.result()
                    if block is None:
                        return
                    await send_part(send, block, stall_s)
                    is_whole = block.endswith(BLOCK_END)
                    coming = asyncio.ensure_future(anext(self._events, None))
                elif any(end.done() for end in ends):
                    return
                elif is_whole:
                    await send_part(send, COMMENT, stall_s)
        finally:
            if not coming.done():
                coming.cancel()
                await asyncio.wait({coming})
