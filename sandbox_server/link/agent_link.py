"""One connection to one agent, shared by everything that talks to its slots."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self, cast

from sandbox_server.agent import wire
from sandbox_server.link.errors import AgentSilent, LinkLost, agent_refusal

PING_EVERY_S = 5.0
HELLO_PARTS = 4
SILENT_PINGS = 4
"""So many pings in a row that nothing was heard after are the end of a link."""
SEND_AHEAD_BYTES = 512 << 10
RESPONSE_TIMEOUT_S = 10.0
"""The `silence_s` of what should be answered at once: files, and questions about calls. In seconds."""
LAST_READ_S = 0.01
"""How long to wait for what has arrived while this process was busy to be read, in seconds."""


class AgentStream:
    """One exchange on a link: send items and data, then read what comes back.

    Iterate to read: `wire.Item` and `wire.Data` as they come, `wire.Ended` last. Reading gives credit back, so an unread stream stops the agent.
    Leaving the `async with` block before the end aborts the stream on the agent's side.
    With a `silence_s`, whatever waits for the agent raises AgentSilent once nothing was heard of it for so long on the whole link, in seconds.
    """

    def __init__(self, link: AgentLink, number: int, silence_s: float | None = None) -> None:
        self._link = link
        self._number = number
        self._silence_s = silence_s
        self._events: deque[wire.Item | wire.Data | wire.Ended | wire.Aborted] = deque()
        self._wake: asyncio.Future[None] | None = None
        self._can_send: asyncio.Future[None] | None = None
        self._over = False

    def send_item(self, meta: Mapping[str, Any], body: bytes = b"") -> None:
        """Queue one message.

        Raises:
            LinkLost: the connection has ended.
        """
        self._link.check()
        if self._link.connection.is_open(self._number):
            self._link.connection.send_item(self._number, dict(meta), body)
            self._link.flush_soon()

    async def send_data(self, body: bytes) -> None:
        """Queue raw bytes, waiting while too much is queued already.

        Raises:
            LinkLost: the connection has ended.
            AgentSilent: the agent does not answer.
            AgentRefused: the agent ended the stream meanwhile.
        """
        connection = self._link.connection
        while connection.queued(self._number) + self._link.unsent_bytes() > SEND_AHEAD_BYTES:
            self._can_send = self._link.loop.create_future()
            self._link.wait_for_transport(self._can_send)
            await self._wait_for_agent(self._can_send)
        self._link.check()
        if self._events and isinstance(self._events[-1], wire.Aborted):
            raise agent_refusal(self._events[-1].meta)
        if connection.is_open(self._number):
            connection.send_data(self._number, body)
            self._link.flush_soon()

    def end(self, meta: Mapping[str, Any] | None = None) -> None:
        """Say that nothing more comes from the service on this stream."""
        if self._link.connection.is_open(self._number):
            self._link.connection.end(self._number, dict(meta) if meta else None)
            self._link.flush_soon()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> wire.Item | wire.Data | wire.Ended:
        if self._over:
            raise StopAsyncIteration
        while not self._events:
            self._link.check()
            self._wake = self._link.loop.create_future()
            await self._wait_for_agent(self._wake)
        event = self._events.popleft()
        if isinstance(event, wire.Aborted):
            self._over = True
            raise agent_refusal(event.meta)
        if isinstance(event, wire.Ended):
            self._over = True
        else:
            self._link.connection.acknowledge(self._number, event.size)
            self._link.flush_soon()
        return event

    async def _wait_for_agent(self, waiter: asyncio.Future[None]) -> None:
        """Return when the waiter is done, or when an agent that keeps the stream waiting has shown that it is there: look again then."""
        if self._silence_s is None:
            await waiter
            return
        try:
            async with asyncio.timeout(self._silence_s / 2):
                await waiter
        except TimeoutError:
            if not await self._link.answers_ping(self._silence_s / 2):
                raise AgentSilent(self._silence_s) from None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._link.forget(self._number, finished=self._over)

    def deliver(self, event: wire.Item | wire.Data | wire.Ended | wire.Aborted) -> None:
        """The link heard something for this stream."""
        self._events.append(event)
        self.wake()
        if isinstance(event, wire.Aborted):
            self.may_send()

    def wake(self) -> None:
        """Let the reader look again."""
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def may_send(self) -> None:
        """Let the sender look again."""
        if self._can_send is not None and not self._can_send.done():
            self._can_send.set_result(None)


class AgentLink(asyncio.Protocol):
    """A connection to an agent, over whatever transport. `link.connect` makes one that has said hello."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.connection = wire.Connection(opens_odd=True)
        self.hello: Mapping[str, Any] = {}
        self.closed: asyncio.Future[str] = loop.create_future()
        self._greeted: asyncio.Future[None] = loop.create_future()
        self._gone: asyncio.Future[None] = loop.create_future()
        self._streams: dict[int, AgentStream] = {}
        self._transport: asyncio.Transport | None = None
        self._flush_planned = False
        self._paused = False
        self._waiting_for_transport: list[asyncio.Future[None]] = []
        self._silent_pings = 0
        self._heard_count = 0  # so often data came
        self._waiting_for_data: list[asyncio.Future[None]] = []
        self._pinger: asyncio.TimerHandle | None = None

    async def greet(self, token: str, timeout_s: float) -> None:
        """Exchange hellos with the agent that this link has just been connected to.

        Args:
            token: proves to the agent that this is its service.
            timeout_s: how long to wait for the agent's hello, in seconds.

        Raises:
            LinkLost: the agent hung up.
            TimeoutError: it did not say hello in time.
        """
        self.check()
        self.connection.hello({"v": wire.PROTOCOL_VERSION, "token": token})
        self.flush()
        await self._until_greeted(timeout_s)
        self.check()
        self._ping()

    @property
    def is_greeted(self) -> bool:
        """Whether the agent has said hello, and the connection has not ended since."""
        return self._greeted.done() and not self.closed.done()

    async def _until_greeted(self, timeout_s: float) -> None:
        """Wait for the agent's hello, a part of the time after another: a part in which this process did not run is all that it costs.

        Raises:
            TimeoutError: it did not come.
        """
        parts = max(HELLO_PARTS, round(timeout_s))
        for _ in range(parts):
            await asyncio.wait({self._greeted}, timeout=timeout_s / parts)
            if self._greeted.done():
                return
        raise TimeoutError

    def stream(self, meta: Mapping[str, Any], silence_s: float | None = None) -> AgentStream:
        """Open a stream. Use it as an async context manager.

        Args:
            meta: what is asked.
            silence_s: for how long nothing may be heard of the agent while the stream waits for it, in seconds; None: until the link is lost.

        Raises:
            LinkLost: the connection has ended.
        """
        self.check()
        number = self.connection.open(dict(meta))
        stream = self._streams[number] = AgentStream(self, number, silence_s)
        self.flush_soon()
        return stream

    async def request(self, meta: Mapping[str, Any], silence_s: float | None = None) -> Mapping[str, Any]:
        """Ask one thing and return what the agent's END says. The arguments are those of `stream`.

        Raises:
            LinkLost: the connection ended before the answer.
            AgentSilent: the agent does not answer.
            AgentRefused: the agent will not, or cannot.
        """
        async with self.stream(meta, silence_s) as stream:
            stream.end()
            async for event in stream:
                if isinstance(event, wire.Ended):
                    return event.meta
        raise LinkLost("the agent's answer has no end")

    async def answers_ping(self, within_s: float) -> bool:
        """Ask the agent for a sign of life.

        Args:
            within_s: how long it may take, in seconds.

        Returns:
            Whether anything was heard of it.

        Raises:
            LinkLost: the connection has ended.
        """
        self.check()
        heard_count, heard = self._heard_count, self.loop.create_future()
        self._waiting_for_data.append(heard)
        self.connection.ping()
        self.flush_soon()
        try:
            async with asyncio.timeout(within_s):
                await heard
        except TimeoutError:
            await asyncio.sleep(LAST_READ_S)
        self.check()
        return self._heard_count > heard_count

    async def close(self, why: str = "closed by the service") -> None:
        """Hang up, and wait until nothing of the connection is left."""
        self._lose(why)
        if self._transport is not None:
            await asyncio.shield(self._gone)

    def check(self) -> None:
        """Raise LinkLost if the connection has ended."""
        if self.closed.done():
            raise LinkLost(self.closed.result())

    def forget(self, number: int, *, finished: bool) -> None:
        """A stream's user has left it. A stream that only the agent has ended would stay with both sides for as long as the connection."""
        self._streams.pop(number, None)
        if self.closed.done():
            return
        if finished and self.connection.is_open(number):
            self.connection.end(number)
            self.flush_soon()
        elif not finished:
            self.connection.abort(number, {"code": "cancelled", "detail": "the service lost interest"})
            self.flush_soon()

    def flush_soon(self) -> None:
        """Write at the end of this turn of the loop, so that what is said in one turn goes out in one write."""
        if not self._flush_planned:
            self._flush_planned = True
            self.loop.call_soon(self.flush)

    def flush(self) -> None:
        """Write what there is to write."""
        self._flush_planned = False
        if self._transport is not None and self.connection.has_data_to_send() and not self.closed.done():
            self._transport.write(self.connection.data_to_send())

    def unsent_bytes(self) -> int:
        """How much the transport still holds, if it has asked to be spared; else 0."""
        return self._transport.get_write_buffer_size() if self._paused and self._transport is not None else 0

    def wait_for_transport(self, waiter: asyncio.Future[None]) -> None:
        """Let the waiter go on once the transport takes data again."""
        if self._paused:
            self._waiting_for_transport.append(waiter)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name

    def data_received(self, data: bytes) -> None:
        self._silent_pings = 0
        self._heard_count += 1
        self._data_came()
        try:
            events = self.connection.receive(data)
        except wire.WireError as error:
            self._lose(f"the agent broke the protocol: {error}")
            return
        for event in events:
            self._handle(event)
        if self.connection.has_data_to_send():
            self.flush_soon()

    def _data_came(self) -> None:
        waiting, self._waiting_for_data = self._waiting_for_data, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)

    def _handle(self, event: wire.Event) -> None:
        if isinstance(event, wire.Item | wire.Data | wire.Ended | wire.Aborted):
            stream = self._streams.get(event.stream)
            if stream is not None:
                stream.deliver(event)
        elif isinstance(event, wire.Drained):
            stream = self._streams.get(event.stream)
            if stream is not None:
                stream.may_send()
        elif isinstance(event, wire.Hello):
            self.hello = event.meta
            if not self._greeted.done():
                self._greeted.set_result(None)
        elif isinstance(event, wire.Opened):
            self._lose("the agent opened a stream, which only the service may")

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        waiting, self._waiting_for_transport = self._waiting_for_transport, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._lose(f"the connection to the agent ended: {error}" if error else "the agent hung up")
        if not self._gone.done():
            self._gone.set_result(None)

    def _ping(self) -> None:
        # Pings are counted, not seconds. While this process does not run, none is sent, and what the agent has said meanwhile is read before the
        # next one is due: however long that was, it is one ping. Seconds would put it down to the agent, for timers come before what was received.
        if self._silent_pings >= SILENT_PINGS:
            self._lose(f"the agent has not answered {SILENT_PINGS} pings, {PING_EVERY_S:g} s apart")
        if self.closed.done():
            return
        self._silent_pings += 1
        self.connection.ping()
        self.flush_soon()
        self._pinger = self.loop.call_later(PING_EVERY_S, self._ping)

    def _lose(self, why: str) -> None:
        if self.closed.done():
            return
        self.closed.set_result(why)
        if self._pinger is not None:
            self._pinger.cancel()
        if self._transport is not None:
            self._transport.abort()
        if not self._greeted.done():
            self._greeted.set_exception(LinkLost(why))
            self._greeted.exception()  # marks it as seen: `connect` may have given up waiting
        for stream in self._streams.values():
            stream.wake()
            stream.may_send()
        self._data_came()
        self.resume_writing()
