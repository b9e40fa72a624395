"""Connections from the service: authentication, streams, flow control. What a stream asks for is done in `streams`."""

from __future__ import annotations

import asyncio
import hmac
import logging
from typing import Any, Callable, Mapping, Protocol, cast

from sandbox_server.agent import wire
from sandbox_server.agent.errors import Refused

log = logging.getLogger(__name__)

HELLO_WITHIN_S = 10.0
MAX_HELLO_BYTES = 64 << 10


class Handler(Protocol):
    """One stream, from its OPEN to its end."""

    def item(self, meta: dict[str, Any], body: bytes) -> None:
        """A message came."""

    def data(self, body: bytes) -> None:
        """Raw bytes came; the handler gives their credit back with `Stream.consumed`."""

    def ended(self) -> None:
        """The service has said all it will say."""

    def aborted(self) -> None:
        """The stream is over: the service gave it up, or its connection ended."""


class Stream:
    """The agent's side of one stream. Sending on a stream that is over does nothing."""

    __slots__ = ("_connection", "_drained", "_handler", "_number", "_wire", "on_drained")

    def __init__(self, connection: Connection, number: int) -> None:
        self._connection = connection
        self._wire = connection.wire
        self._number = number
        self._handler: Handler | None = None
        self._drained: asyncio.Future[None] | None = None
        self.on_drained: Callable[[], None] | None = None

    def send_item(self, meta: Mapping[str, Any], body: bytes = b"") -> None:
        """Send a message."""
        if self._wire.is_open(self._number):
            self._wire.send_item(self._number, cast("dict[str, Any]", meta), body)
            self._connection.flush_soon()

    async def send_data(self, body: bytes) -> bool:
        """Send raw bytes and wait until they are on their way.

        Returns:
            Whether the stream is still open.
        """
        if not self._wire.is_open(self._number):
            return False
        self._wire.send_data(self._number, body)
        self._connection.flush_soon()
        if self._wire.queued(self._number):
            self._drained = asyncio.get_event_loop().create_future()
            await self._drained
        return self._wire.is_open(self._number)

    def end(self, meta: Mapping[str, Any] | None = None) -> None:
        """Say that this was all."""
        if self._wire.is_open(self._number):
            self._wire.end(self._number, cast("dict[str, Any]", meta))
            self._connection.flush_soon()
            self._connection.forget_if_over(self._number)

    def refuse(self, error: Refused) -> None:
        """End the stream with a reason."""
        self._wire.abort(self._number, error.meta())
        self._connection.flush_soon()
        self._connection.forget_if_over(self._number)

    def consumed(self, data: bytes) -> None:
        """Give back the credit of one piece of data that was handled."""
        self._wire.acknowledge(self._number, wire.cost(data))
        self._connection.flush_soon()

    @property
    def queued_bytes(self) -> int:
        """How much waits here until the service has taken what was sent before; once it is none, `on_drained` hears of it."""
        return self._wire.queued(self._number)

    @property
    def open(self) -> bool:
        """Whether anything can still be sent."""
        return self._wire.is_open(self._number)

    def drained(self) -> None:
        """What was queued is on its way, or never will be."""
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        if self.on_drained is not None:
            self.on_drained()


class Server(Protocol):
    """What a connection needs of the agent."""

    token: str

    def hello(self) -> dict[str, Any]:
        """The agent's HELLO."""

    def connected(self, connection: Connection) -> None:
        """A connection has authenticated itself."""

    def disconnected(self, connection: Connection) -> None:
        """A connection that had is gone."""

    def open(self, stream: Stream, meta: dict[str, Any]) -> Handler:
        """Begin what a stream asks for.

        Raises:
            Refused: it cannot be.
        """


class Settled(Protocol):
    """Hears that a connection has authenticated itself, or is gone."""

    def __call__(self, *, authenticated: bool) -> None:
        """One of the two; after the first, the other follows sooner or later."""


class Connection(asyncio.Protocol):
    """One connection of the service.

    Args:
        server: what the connection needs of the agent.
        settled: for a listener that others than the service can reach: it counts those that have not authenticated themselves.
    """

    def __init__(self, server: Server, settled: Settled | None = None) -> None:
        self.wire = wire.Connection(opens_odd=False)
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_event_loop()
        self._settled = settled
        self._authenticated = False
        self._heard_bytes = 0
        self._flushing = False
        self._paused = False
        self._timer: asyncio.TimerHandle | None = None
        self._streams: dict[int, Stream] = {}
        self._handlers: dict[int, Handler] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)
        self._timer = self._loop.call_later(HELLO_WITHIN_S, self.drop)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        if self._timer is not None:
            self._timer.cancel()
        self._transport = None
        if self._settled is not None:
            self._settled(authenticated=False)
        streams, self._streams = self._streams, {}
        handlers, self._handlers = self._handlers, {}
        for number, stream in streams.items():
            self.wire.abort(number, {})
            stream.drained()
        for handler in handlers.values():
            handler.aborted()
        if self._authenticated:
            self._server.disconnected(self)

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self._paused = True

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self._paused = False
        self._flush()

    def close(self) -> None:
        """End the connection once everything is sent."""
        if self._transport is not None:
            self._transport.close()

    def drop(self) -> None:
        """End the connection at once. Whoever has not authenticated itself is not waited for, in a TLS shutdown say."""
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    def flush_soon(self) -> None:
        """Send what is queued once, after everything that this turn of the loop still has to say."""
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def forget_if_over(self, number: int) -> None:
        """Let go of a stream that both sides have ended, whichever was the last to do so."""
        if self.wire.is_over(number):
            self._streams.pop(number, None)
            self._handlers.pop(number, None)

    def _flush(self) -> None:
        self._flushing = False
        if not self._paused and self._transport is not None and self.wire.has_data_to_send():
            self._transport.write(self.wire.data_to_send())

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        try:
            for event in self.wire.receive(data):
                self._handle(event)
                if self._transport is None:
                    return
        except wire.WireError as error:
            if self._authenticated or self._settled is None:
                log.warning("a connection broke the protocol: %s", error)
            self.drop()
        self._heard_bytes += len(data)
        if not self._authenticated and self._heard_bytes > MAX_HELLO_BYTES:
            self.drop()
        self._flush()

    def _handle(self, event: wire.Event) -> None:
        kind = type(event)
        if not self._authenticated:
            if isinstance(event, wire.Hello) and self._check(event.meta):
                self._welcome()
            else:
                self.drop()
        elif kind is wire.Opened:
            self._opened(cast(wire.Opened, event))
        elif kind is wire.Item:
            self._item(cast(wire.Item, event))
        elif kind is wire.Data:
            data = cast(wire.Data, event)
            handler = self._handlers.get(data.stream)
            if handler is not None:
                handler.data(data.body)
        else:
            self._rest(event)

    def _check(self, meta: Mapping[str, Any]) -> bool:
        token = meta.get("token")
        if meta.get("v") != wire.PROTOCOL_VERSION or not isinstance(token, str):
            return False
        return hmac.compare_digest(token.encode("utf-8", "replace"), self._server.token.encode())

    def _welcome(self) -> None:
        self._authenticated = True
        if self._timer is not None:
            self._timer.cancel()
        if self._settled is not None:
            self._settled(authenticated=True)
        self.wire.hello(self._server.hello())
        self._server.connected(self)

    def _opened(self, event: wire.Opened) -> None:
        stream = Stream(self, event.stream)
        self._guard(stream, lambda: self._begin(stream, event))

    def _begin(self, stream: Stream, event: wire.Opened) -> None:
        handler = self._server.open(stream, event.meta)
        if stream.open:
            self._streams[event.stream] = stream
            self._handlers[event.stream] = handler

    def _item(self, event: wire.Item) -> None:
        handler = self._handlers.get(event.stream)
        self.wire.acknowledge(event.stream, event.size)
        if handler is not None:
            self._guard(self._streams[event.stream], lambda: handler.item(event.meta, event.body))

    def _guard(self, stream: Stream, work: Callable[[], None]) -> None:
        """A stream's failure is that stream's answer."""
        try:
            work()
        except Refused as error:
            stream.refuse(error)
        except Exception as error:
            log.exception("a stream failed")
            stream.refuse(Refused("internal", "%s: %s" % (type(error).__name__, error)))

    def _rest(self, event: wire.Event) -> None:
        if isinstance(event, wire.Ended):
            handler = self._handlers.get(event.stream)
            if handler is not None:
                self._guard(self._streams[event.stream], handler.ended)
            self.forget_if_over(event.stream)
        elif isinstance(event, wire.Aborted):
            handler = self._handlers.pop(event.stream, None)
            stream = self._streams.pop(event.stream, None)
            if stream is not None:
                stream.drained()
            if handler is not None:
                handler.aborted()
        elif isinstance(event, wire.Drained):
            stream = self._streams.get(event.stream)
            if stream is not None:
                stream.drained()
            self.forget_if_over(event.stream)
        elif isinstance(event, wire.Hello):
            raise wire.WireError("a second HELLO")
