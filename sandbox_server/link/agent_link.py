"""One connection to one agent, shared by all requests to it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, cast

import orjson

from sandbox_server.agent import wire
from sandbox_server.link.agent_stream import AgentStream
from sandbox_server.link.errors import LinkLost

RESPONSE_TIMEOUT_S = 10.0
"""For how long an agent may be silent while it owes a response that it can give at once, in seconds."""
PING_INTERVAL_S = 5.0
"""How often an agent is pinged, in seconds."""
MAX_UNANSWERED_PINGS = 4
"""The link is lost after so many pings in a row without any data from the agent."""
MIN_HELLO_WAITS = 4
"""The wait for the agent's hello is divided into at least so many parts."""
LAST_READ_S = 0.01
"""After a time-out: how long to wait until data that arrived while this process was busy has been read, in seconds."""


class AgentLink(asyncio.Protocol):
    """A connection to an agent, over any transport. `link.connect` makes one and exchanges the hellos.

    Args:
        loop: the event loop.
        ping_interval_s: how often the agent is pinged, in seconds.

    Attributes:
        hello: the agent's hello.
        closed: done once the connection has ended; its result says why.
        agent_ends: whether the agent has said that it shuts down. It then refuses every call, and the connection ends soon.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, ping_interval_s: float = PING_INTERVAL_S) -> None:
        self.loop = loop
        self.connection = wire.Connection(opens_odd=True, encode=_encode_json)
        self.hello: Mapping[str, Any] = {}
        self.closed: asyncio.Future[str] = loop.create_future()
        self.agent_ends = False
        self._ping_interval_s = ping_interval_s
        self._hello_received: asyncio.Future[None] = loop.create_future()
        self._transport_closed: asyncio.Future[None] = loop.create_future()
        self._streams: dict[int, AgentStream] = {}
        self._transport: asyncio.Transport | None = None
        self._flush_is_scheduled = False
        self._writing_is_paused = False
        self._writable_waiters: list[asyncio.Future[None]] = []
        self._unanswered_pings = 0
        self._read_count = 0  # how often data has arrived
        self._data_waiters: list[asyncio.Future[None]] = []
        self._next_ping: asyncio.TimerHandle | None = None

    async def exchange_hellos(self, token: str, timeout_s: float) -> None:
        """Exchange hellos with the agent that this link has just been connected to, and start to ping it.

        Args:
            token: proves to the agent that the service is the one that created it.
            timeout_s: how long to wait for the agent's hello, in seconds.

        Raises:
            LinkLost: the connection ended.
            TimeoutError: the hello did not arrive in time.
        """
        self.raise_if_lost()
        self.connection.hello({"v": wire.PROTOCOL_VERSION, "token": token})
        self._flush()
        await self._wait_for_hello(timeout_s)
        self.raise_if_lost()
        self._ping()

    @property
    def is_ready(self) -> bool:
        """Whether the agent's hello has arrived, and the connection has not ended since."""
        return self._hello_received.done() and not self.closed.done()

    async def _wait_for_hello(self, timeout_s: float) -> None:
        """Wait for the agent's hello in several parts: if this process does not run for a while, that costs one part and not the agent.

        Raises:
            TimeoutError: the hello did not arrive.
        """
        parts = max(MIN_HELLO_WAITS, round(timeout_s))
        for _ in range(parts):
            await asyncio.wait({self._hello_received}, timeout=timeout_s / parts)
            if self._hello_received.done():
                return
        raise TimeoutError

    def stream(self, meta: Mapping[str, Any], silence_s: float | None = None) -> AgentStream:
        """Open a stream. Use it as an async context manager.

        Args:
            meta: the request.
            silence_s: see `AgentStream`.

        Raises:
            LinkLost: the connection has ended.
        """
        self.raise_if_lost()
        number = self.connection.open(dict(meta))
        stream = self._streams[number] = AgentStream(self, number, silence_s)
        self.flush_soon()
        return stream

    async def request(self, meta: Mapping[str, Any], silence_s: float | None = None) -> Mapping[str, Any]:
        """Send a request without data and return the agent's response. The arguments are those of `stream`.

        Raises:
            LinkLost: the connection ended before the response.
            AgentSilent: the agent does not respond.
            AgentRefused: the agent refused the request, or failed to carry it out.
        """
        async with self.stream(meta, silence_s) as stream:
            stream.end()
            async for event in stream:
                if isinstance(event, wire.Ended):
                    return event.meta
        raise AssertionError("a stream ends with an Ended event, or raises")

    async def answers_ping(self, within_s: float) -> bool:
        """Ping the agent.

        Args:
            within_s: how long to wait, in seconds.

        Returns:
            Whether any data has arrived from the agent.

        Raises:
            LinkLost: the connection has ended.
        """
        self.raise_if_lost()
        read_count, has_data = self._read_count, self.loop.create_future()
        self._data_waiters.append(has_data)
        self.connection.ping()
        self.flush_soon()
        try:
            async with asyncio.timeout(within_s):
                await has_data
        except TimeoutError:
            await asyncio.sleep(LAST_READ_S)
        self.raise_if_lost()
        return self._read_count > read_count

    async def close(self, why: str = "closed by the service") -> None:
        """Close the connection and wait until the transport has closed.

        Args:
            why: the reason that requests in progress are given.
        """
        self._end_connection(why)
        if self._transport is not None:
            await asyncio.shield(self._transport_closed)

    def raise_if_lost(self) -> None:
        """Raise LinkLost if the connection has ended."""
        if self.closed.done():
            raise LinkLost(self.closed.result())

    def close_stream(self, number: int, *, has_ended: bool) -> None:
        """Forget a stream that is no longer used, and end or abort it at the agent.

        A stream that only the agent has ended would otherwise be kept by both sides for as long as the connection.

        Args:
            number: the stream.
            has_ended: whether the agent has ended it.
        """
        self._streams.pop(number, None)
        if self.closed.done():
            return
        if has_ended and self.connection.is_open(number):
            self.connection.end(number)
            self.flush_soon()
        elif not has_ended:
            self.connection.abort(number, {"code": "cancelled", "detail": "the service does not need the response any more"})
            self.flush_soon()

    def flush_soon(self) -> None:
        """Write at the end of this iteration of the event loop, so that everything that is queued in one iteration is one write."""
        if not self._flush_is_scheduled and self.connection.has_data_to_send():
            self._flush_is_scheduled = True
            self.loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_is_scheduled = False
        if self._transport is not None and self.connection.has_data_to_send() and not self.closed.done():
            self._transport.write(self.connection.data_to_send())

    def unsent_bytes(self) -> int:
        """How much the transport has buffered, if it has asked for a pause; 0 otherwise."""
        return self._transport.get_write_buffer_size() if self._writing_is_paused and self._transport is not None else 0

    def wake_when_writable(self, waiter: asyncio.Future[None]) -> None:
        """Complete the future when the transport accepts data again, if it has asked for a pause."""
        if self._writing_is_paused:
            self._writable_waiters.append(waiter)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        wire.keep_freed_memory()
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport has the methods of one, but not the class

    def data_received(self, data: bytes) -> None:
        self._unanswered_pings = 0
        self._read_count += 1
        self._wake_data_waiters()
        try:
            events = self.connection.receive(data)
        except wire.WireError as error:
            self._end_connection(f"the agent broke the protocol: {error}")
            return
        for event in events:
            self._handle_event(event)
        if self.connection.has_data_to_send():
            self.flush_soon()

    def _wake_data_waiters(self) -> None:
        waiters, self._data_waiters = self._data_waiters, []
        _complete(waiters)

    def _handle_event(self, event: wire.Event) -> None:
        if isinstance(event, wire.Item | wire.Data | wire.Ended | wire.Aborted):
            stream = self._streams.get(event.stream)
            if stream is not None:
                stream.receive_event(event)
        elif isinstance(event, wire.Drained):
            stream = self._streams.get(event.stream)
            if stream is not None:
                stream.wake_sender()
        elif isinstance(event, wire.Hello):
            self.hello = event.meta
            if not self._hello_received.done():
                self._hello_received.set_result(None)
        elif isinstance(event, wire.Opened):
            self._end_connection("the agent opened a stream, which only the service may")

    def pause_writing(self) -> None:
        self._writing_is_paused = True

    def resume_writing(self) -> None:
        self._writing_is_paused = False
        waiters, self._writable_waiters = self._writable_waiters, []
        _complete(waiters)

    def connection_lost(self, error: Exception | None) -> None:
        self._end_connection(f"the connection to the agent ended: {error}" if error else "the agent hung up")
        if not self._transport_closed.done():
            self._transport_closed.set_result(None)

    def _ping(self) -> None:
        # Pings are counted instead of seconds. While this process does not run, no ping is sent, and data that arrives meanwhile is read before the
        # next ping is due, so that a pause of any length counts as one ping. Measured in seconds, the pause would count against the agent, because
        # the event loop runs timers before it reads.
        if self._unanswered_pings >= MAX_UNANSWERED_PINGS:
            self._end_connection(f"the agent has not answered {MAX_UNANSWERED_PINGS} pings, {self._ping_interval_s:g} s apart")
        if self.closed.done():
            return
        self._unanswered_pings += 1
        self.connection.ping()
        self.flush_soon()
        self._next_ping = self.loop.call_later(self._ping_interval_s, self._ping)

    def _end_connection(self, why: str) -> None:
        if self.closed.done():
            return
        self.closed.set_result(why)
        if self._next_ping is not None:
            self._next_ping.cancel()
        if self._transport is not None:
            self._transport.abort()
        if not self._hello_received.done():
            self._hello_received.set_exception(LinkLost(why))
            self._hello_received.exception()  # marks the exception as retrieved: `connect` may have stopped waiting for it
        for stream in self._streams.values():
            stream.wake_reader()
            stream.wake_sender()
        self._wake_data_waiters()
        self.resume_writing()


def _encode_json(meta: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(meta)
    except TypeError:
        return wire.encode_json(meta)  # orjson refuses lone surrogates, which occur in file names that are not UTF-8, and integers of more than 64 bits


def _complete(waiters: list[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
