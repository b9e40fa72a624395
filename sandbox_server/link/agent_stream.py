"""One stream of a link: a request to the agent with its messages and data, and what the agent sends back."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol, Self

from sandbox_server.agent import wire
from sandbox_server.link.errors import AgentSilent, agent_refusal

SEND_AHEAD_BYTES = 512 << 10
"""How much data may be queued before `send_data` waits."""


class StreamConnection(Protocol):
    """What a stream needs from its link."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    @property
    def connection(self) -> wire.Connection: ...

    def raise_if_lost(self) -> None:
        """Raise LinkLost if the connection has ended."""

    def flush_soon(self) -> None:
        """Write what is queued at the end of this iteration of the event loop."""

    def unsent_bytes(self) -> int:
        """How much the transport has buffered, if it has asked for a pause; 0 otherwise."""
        ...

    def wake_when_writable(self, waiter: asyncio.Future[None]) -> None:
        """Complete the future when the transport accepts data again, if it has asked for a pause."""

    async def answers_ping(self, within_s: float) -> bool:
        """Whether any data arrives from the agent within so many seconds of a ping."""
        ...

    def close_stream(self, number: int, *, has_ended: bool) -> None:
        """Forget a stream, and abort it at the agent if the agent has not ended it."""


class AgentStream:
    """One stream of a link. Use it as an async context manager; leaving it before its end aborts the stream at the agent.

    Send messages and data, then `end`. Iterate to receive: `wire.Item` and `wire.Data` as they arrive, `wire.Ended` last. Data that is not read makes
    the agent stop sending.

    Args:
        connection: the link.
        number: the number of the stream.
        silence_s: whatever waits for the agent raises AgentSilent once no data has arrived over the whole link for so long, in seconds; None to wait
            until the link is lost.
    """

    def __init__(self, connection: StreamConnection, number: int, silence_s: float | None = None) -> None:
        self._link = connection
        self._number = number
        self._silence_s = silence_s
        self._events: deque[wire.Item | wire.Data | wire.Ended | wire.Aborted] = deque()
        self._has_event: asyncio.Future[None] | None = None
        self._can_send: asyncio.Future[None] | None = None
        self._has_ended = False

    def send_item(self, meta: Mapping[str, Any], body: bytes = b"") -> None:
        """Queue one message.

        Raises:
            LinkLost: the connection has ended.
        """
        self._link.raise_if_lost()
        if self._link.connection.is_open(self._number):
            self._link.connection.send_item(self._number, dict(meta), body)
            self._link.flush_soon()

    async def send_data(self, body: bytes) -> None:
        """Queue data, and wait while too much is queued already.

        Raises:
            LinkLost: the connection has ended.
            AgentSilent: the agent does not respond.
            AgentRefused: the agent has ended the stream.
        """
        await self.wait_for_room()
        connection = self._link.connection
        if self._events and isinstance(self._events[-1], wire.Aborted):
            raise agent_refusal(self._events[-1].meta)
        if connection.is_open(self._number):
            connection.send_data(self._number, body)
            self._link.flush_soon()

    async def wait_for_room(self) -> None:
        """Wait while too much is queued already.

        Raises:
            LinkLost: the connection has ended.
            AgentSilent: the agent does not respond.
        """
        connection = self._link.connection
        while connection.queued(self._number) + self._link.unsent_bytes() > SEND_AHEAD_BYTES:
            self._can_send = self._link.loop.create_future()
            self._link.wake_when_writable(self._can_send)
            await self._wait_for_agent(self._can_send)
        self._link.raise_if_lost()

    def end(self) -> None:
        """Declare that the service sends nothing more on this stream."""
        if self._link.connection.is_open(self._number):
            self._link.connection.end(self._number)
            self._link.flush_soon()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> wire.Item | wire.Data | wire.Ended:
        if self._has_ended:
            raise StopAsyncIteration
        while not self._events:
            self._link.raise_if_lost()
            self._has_event = self._link.loop.create_future()
            await self._wait_for_agent(self._has_event)
        event = self._events.popleft()
        if isinstance(event, wire.Aborted):
            self._has_ended = True
            raise agent_refusal(event.meta)
        if isinstance(event, wire.Ended):
            self._has_ended = True
        else:
            self._link.connection.acknowledge(self._number, event.size)
            self._link.flush_soon()
        return event

    async def _wait_for_agent(self, waiter: asyncio.Future[None]) -> None:
        """Return when the future is done, or when the agent has responded to a ping: the caller checks again and waits on."""
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
        self._link.close_stream(self._number, has_ended=self._has_ended)

    def receive_event(self, event: wire.Item | wire.Data | wire.Ended | wire.Aborted) -> None:
        """Add what the agent has sent, and wake what waits for it."""
        self._events.append(event)
        self.wake_reader()
        if isinstance(event, wire.Aborted):
            self.wake_sender()

    def wake_reader(self) -> None:
        """Have the reader check again whether there is an event, and whether the link is lost."""
        if self._has_event is not None and not self._has_event.done():
            self._has_event.set_result(None)

    def wake_sender(self) -> None:
        """Have `send_data` check again whether there is room, and whether the link is lost."""
        if self._can_send is not None and not self._can_send.done():
            self._can_send.set_result(None)
