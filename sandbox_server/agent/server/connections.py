"""Connections from the service: authentication, streams and flow control. The handlers of the streams are in the other modules of this folder."""

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
RECEIVED_AT_ONCE_BYTES = 256 << 10
#: A connection that has not authenticated itself may be a slot's, and there may be many.
RECEIVED_BEFORE_HELLO_BYTES = 4 << 10


class StreamHandler(Protocol):
    """Receives the messages of the service on one stream. `on_item`, `on_data` and `on_end` may raise `Refused`, which ends the stream."""

    def on_item(self, meta: dict[str, Any], body: bytes) -> None:
        """A message has arrived."""

    def on_data(self, body: bytes) -> None:
        """Raw bytes have arrived. Once the handler has processed them, it calls `Stream.acknowledge`."""

    def on_end(self) -> None:
        """The service sends nothing more on this stream."""

    def on_abort(self) -> None:
        """The stream is over: the service has aborted it, or its connection has ended."""


class Stream:
    """The agent's side of one stream. Sending on a stream that is over does nothing.

    Args:
        connection: the connection that carries the stream.
        number: of the stream on that connection.
    """

    __slots__ = ("_connection", "_drained", "_number", "_wire", "on_drained")

    def __init__(self, connection: ServiceConnection, number: int) -> None:
        self._connection = connection
        self._wire = connection.wire
        self._number = number
        self._drained: asyncio.Future[None] | None = None
        self.on_drained: Callable[[], None] | None = None  # called when some of `queued_bytes` was sent, or never will be

    def send_item(self, meta: Mapping[str, Any], body: bytes = b"") -> None:
        """Send a message."""
        if self._wire.is_open(self._number):
            self._wire.send_item(self._number, cast("dict[str, Any]", meta), body)
            self._connection.flush_soon()

    async def send_data(self, body: bytes) -> bool:
        """Send raw bytes, and wait until the flow-control window has admitted them.

        Returns:
            True if the stream is still open.
        """
        if not self._wire.is_open(self._number):
            return False
        self._wire.send_data(self._number, body)
        self._connection.flush_soon()
        if self._wire.queued(self._number):
            self._drained = asyncio.get_event_loop().create_future()
            await self._drained
        return self._wire.is_open(self._number)

    def end_stream(self, meta: Mapping[str, Any] | None = None) -> None:
        """End the agent's direction of the stream.

        Args:
            meta: the payload of the END frame.
        """
        if self._wire.is_open(self._number):
            self._wire.end(self._number, cast("dict[str, Any]", meta))
            self._connection.flush_soon()
            self._connection.forget_stream_if_over(self._number)

    def refuse(self, error: Refused) -> None:
        """Abort the stream with an error."""
        self._wire.abort(self._number, error.meta())
        self._connection.flush_soon()
        self._connection.forget_stream_if_over(self._number)

    def acknowledge(self, data: bytes) -> None:
        """Return the flow-control credit of one piece of data that was processed."""
        self._wire.acknowledge(self._number, wire.cost(data))
        self._connection.flush_soon()

    @property
    def queued_bytes(self) -> int:
        """How many bytes are queued here because the service has not taken what was sent before."""
        return self._wire.queued(self._number)

    @property
    def is_open(self) -> bool:
        """Whether anything can still be sent."""
        return self._wire.is_open(self._number)

    def report_drained(self) -> None:
        """Called by the connection when queued bytes were sent, or never will be."""
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        if self.on_drained is not None:
            self.on_drained()


class AgentServer(Protocol):
    """What a connection needs from the agent."""

    token: str

    def make_hello(self) -> dict[str, Any]:
        """Return the payload of the agent's HELLO frame."""

    def add_connection(self, connection: ServiceConnection) -> None:
        """Register a connection that has authenticated itself."""

    def remove_connection(self, connection: ServiceConnection) -> None:
        """Forget an authenticated connection that has ended."""

    def open_stream(self, stream: Stream, meta: dict[str, Any]) -> StreamHandler:
        """Begin the operation that `meta` describes.

        Returns:
            The handler of the stream.

        Raises:
            Refused: the operation cannot begin.
        """


class AuthenticationListener(Protocol):
    """Is called when a connection has authenticated itself, and when it has ended."""

    def __call__(self, *, authenticated: bool) -> None:
        """The connection has authenticated itself (True), or has ended (False), before or after that."""


class ServiceConnection(asyncio.BufferedProtocol):
    """One connection of the service. Data is received into one buffer: asyncio would map and unmap memory for each message.

    Args:
        server: the agent.
        on_authentication: see `AuthenticationListener`. Only a listener that others than the service can reach needs it.
    """

    def __init__(self, server: AgentServer, on_authentication: AuthenticationListener | None = None) -> None:
        self.wire = wire.Connection(opens_odd=False)
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_event_loop()
        self._on_authentication = on_authentication
        self._authenticated = False
        self._received_bytes = 0
        self._buffer = memoryview(bytearray(RECEIVED_BEFORE_HELLO_BYTES))
        self._flushing = False
        self._paused = False
        self._hello_timer: asyncio.TimerHandle | None = None
        self._streams: dict[int, Stream] = {}
        self._handlers: dict[int, StreamHandler] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        wire.keep_freed_memory()
        self._transport = cast(asyncio.Transport, transport)
        self._hello_timer = self._loop.call_later(HELLO_WITHIN_S, self.drop_connection)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        self._transport = None
        if self._on_authentication is not None:
            self._on_authentication(authenticated=False)
        streams, self._streams = self._streams, {}
        handlers, self._handlers = self._handlers, {}
        for number, stream in streams.items():
            self.wire.abort(number, {})
            stream.report_drained()
        for handler in handlers.values():
            handler.on_abort()
        if self._authenticated:
            self._server.remove_connection(self)

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self._paused = True

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self._paused = False
        self._flush()

    def close_connection(self) -> None:
        """Close the connection once everything is sent."""
        if self._transport is not None:
            self._transport.close()

    def drop_connection(self) -> None:
        """Close the connection at once, for example without waiting for a TLS shutdown."""
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    def flush_soon(self) -> None:
        """Send what is queued at the end of this turn of the event loop, so that several messages are sent together."""
        if not self._flushing and self.wire.has_data_to_send():
            self._flushing = True
            self._loop.call_soon(self._flush)

    def forget_stream_if_over(self, number: int) -> None:
        """Forget a stream once both sides have ended it."""
        if self.wire.is_over(number):
            self._streams.pop(number, None)
            self._handlers.pop(number, None)

    def _flush(self) -> None:
        self._flushing = False
        if not self._paused and self._transport is not None and self.wire.has_data_to_send():
            self._transport.write(self.wire.data_to_send())

    def get_buffer(self, sizehint: int) -> memoryview:
        """See `asyncio.BufferedProtocol`."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """See `asyncio.BufferedProtocol`."""
        self.receive_data(self._buffer[:nbytes])

    def receive_data(self, data: bytes | memoryview) -> None:
        """Handle data that has arrived. It is not used after the return."""
        try:
            for event in self.wire.receive(data):
                self._handle_event(event)
                if self._transport is None:
                    return
        except wire.WireError as error:
            if self._authenticated or self._on_authentication is None:
                log.warning("a connection broke the protocol: %s", error)
            self.drop_connection()
        self._received_bytes += len(data)
        if not self._authenticated and self._received_bytes > MAX_HELLO_BYTES:
            self.drop_connection()
        self._flush()

    def _handle_event(self, event: wire.Event) -> None:
        kind = type(event)
        if not self._authenticated:
            if isinstance(event, wire.Hello) and self._is_authentic(event.meta):
                self._accept_hello()
            else:
                self.drop_connection()
        elif kind is wire.Opened:
            self._handle_open(cast(wire.Opened, event))
        elif kind is wire.Item:
            self._handle_item(cast(wire.Item, event))
        elif kind is wire.Data:
            data = cast(wire.Data, event)
            handler = self._handlers.get(data.stream)
            if handler is not None:
                handler.on_data(data.body)
        else:
            self._handle_other(event)

    def _is_authentic(self, meta: Mapping[str, Any]) -> bool:
        token = meta.get("token")
        if meta.get("v") != wire.PROTOCOL_VERSION or not isinstance(token, str):
            return False
        return hmac.compare_digest(token.encode("utf-8", "replace"), self._server.token.encode())

    def _accept_hello(self) -> None:
        self._authenticated = True
        self._buffer = memoryview(bytearray(RECEIVED_AT_ONCE_BYTES))
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        if self._on_authentication is not None:
            self._on_authentication(authenticated=True)
        self.wire.hello(self._server.make_hello())
        self._server.add_connection(self)

    def _handle_open(self, event: wire.Opened) -> None:
        stream = Stream(self, event.stream)
        self._run_for_stream(stream, lambda: self._open_stream(stream, event))

    def _open_stream(self, stream: Stream, event: wire.Opened) -> None:
        handler = self._server.open_stream(stream, event.meta)
        if stream.is_open:
            self._streams[event.stream] = stream
            self._handlers[event.stream] = handler

    def _handle_item(self, event: wire.Item) -> None:
        handler = self._handlers.get(event.stream)
        self.wire.acknowledge(event.stream, event.size)
        if handler is not None:
            self._run_for_stream(self._streams[event.stream], lambda: handler.on_item(event.meta, event.body))

    def _run_for_stream(self, stream: Stream, action: Callable[[], None]) -> None:
        """Run `action`. If it fails, abort its stream with the error; the connection continues."""
        try:
            action()
        except Refused as error:
            stream.refuse(error)
        except Exception as error:  # the failure of one stream must not end the connection, which carries all others
            log.exception("a stream failed")
            stream.refuse(Refused("internal", "%s: %s" % (type(error).__name__, error)))

    def _handle_other(self, event: wire.Event) -> None:
        if isinstance(event, wire.Ended):
            handler = self._handlers.get(event.stream)
            if handler is not None:
                self._run_for_stream(self._streams[event.stream], handler.on_end)
            self.forget_stream_if_over(event.stream)
        elif isinstance(event, wire.Aborted):
            handler = self._handlers.pop(event.stream, None)
            stream = self._streams.pop(event.stream, None)
            if stream is not None:
                stream.report_drained()
            if handler is not None:
                handler.on_abort()
        elif isinstance(event, wire.Drained):
            stream = self._streams.get(event.stream)
            if stream is not None:
                stream.report_drained()
            self.forget_stream_if_over(event.stream)
        elif isinstance(event, wire.Hello):
            raise wire.WireError("a second HELLO")
