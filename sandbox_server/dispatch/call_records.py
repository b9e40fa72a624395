"""Calls looked at from outside: where one is, its output as it comes, the whole of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from sandbox_server.agent import wire
from sandbox_server.core.clock import Clock
from sandbox_server.core.errors import (
    BackendUnavailable,
    CallNotFound,
    InvalidRequest,
    LeaseLost,
    LeaseNotFound,
    NotImplementedHere,
    PoolServiceError,
    SandboxLost,
)
from sandbox_server.core.execution import LARGE_OUTPUT_BYTES, Reason, Result, ToolCall
from sandbox_server.dispatch.call_runner import ResultStore
from sandbox_server.dispatch.in_flight import InFlightCalls
from sandbox_server.dispatch.outputs import ResultOutputs, output_bytes, output_pieces
from sandbox_server.dispatch.results import agent_result, agents_encoding, refusal, waiting_output
from sandbox_server.dispatch.slot_location import SlotLocation, SlotLocator, slot_meta
from sandbox_server.link.agent_link import RESPONSE_TIMEOUT_S, AgentStream
from sandbox_server.link.errors import AgentRefused, AgentSilent, LinkLost

LOST_WAIT_S = 15.0
"""How long to wait for the pool to find out what a lost link means, in seconds."""
AGAIN_AFTER_S = 0.1
BEYOND_ALL_BYTES = 1 << 53
"""An offset that no output reaches: whoever attaches there hears of the end alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CallStatus:
    """A call that has no result yet. `started_at` is None while it waits for the calls before it; `encoding` is the one it asked for."""

    output_bytes: int
    started_at: float | None
    encoding: str = "utf-8"


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Some output of a call, and where in the whole it ends."""

    data: bytes
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeOutput:
    """The whole output of a call, as far as it is kept.

    Args:
        total_bytes: how much the call has written; None if the agent does not say.
        chunks: the bytes; to be read once, or closed.
    """

    total_bytes: int | None
    chunks: AsyncGenerator[bytes, None]


class CallRecords:
    """The calls of leases that hold.

    Args:
        routes: finds the slot of a lease.
        verdicts: remembers how calls ended.
        flights: what is under way in this process.
        clock: for deadlines.
        outputs: brings the outputs of results.

    Every method raises LeaseNotFound, LeaseLost or SandboxLost where the lease does not hold (a call whose result is recorded has it still when the
    sandbox is lost), CallNotFound for a call the lease never had, BackendUnavailable where the agent cannot be reached.
    """

    def __init__(self, routes: SlotLocator, result_store: ResultStore, in_flight_calls: InFlightCalls, clock: Clock, outputs: ResultOutputs) -> None:
        self._routes = routes
        self._outputs = outputs
        self._result_store = result_store
        self._in_flight_calls = in_flight_calls
        self._clock = clock

    async def encoding(self, tenant: str, lease_id: str, call_id: str) -> str:
        """The encoding that the call asked for; its agent knows it where this process does not, which has started after the call."""
        known = known_encoding(self._result_store, self._in_flight_calls, lease_id, call_id)
        if known is not None:
            return known
        return (await self.status(tenant, lease_id, call_id)).encoding

    async def status(self, tenant: str, lease_id: str, call_id: str, wait_s: float = 0.0) -> CallStatus | Result:
        """Where a call is.

        Args:
            tenant: who asks.
            lease_id: whose call.
            call_id: which one.
            wait_s: wait at most so long for its end, in seconds.
        """
        deadline = self._clock.monotonic() + wait_s
        while True:
            found = self._recorded(tenant, lease_id, call_id) or await self._asked(tenant, lease_id, call_id)
            left_s = deadline - self._clock.monotonic()
            if isinstance(found, Result) or left_s <= 0:
                return found
            try:
                async with asyncio.timeout(left_s):
                    return await self._end(tenant, lease_id, call_id)
            except TimeoutError:
                pass
            except CallNotFound:
                # It was under way and its result is not one that is recorded: what is known now decides.
                continue

    async def check_offset(self, tenant: str, lease_id: str, call_id: str, offset: int, name: str = "offset") -> CallStatus | Result:
        """See that a call's output reaches so far; its end is as far as it may be.

        Args:
            tenant: who asks.
            lease_id: whose call.
            call_id: which one.
            offset: in bytes.
            name: what the caller calls it.

        Returns:
            Where the call is.

        Raises:
            InvalidRequest: it lies beyond the end.
        """
        found = await self.status(tenant, lease_id, call_id)
        # Of a call that went with its sandbox nobody knows any more how much it had written.
        if offset > found.output_bytes and not (isinstance(found, Result) and found.reason is Reason.SANDBOX_LOST):
            raise _beyond(found.output_bytes, name)
        return found

    def file_bytes(self, lease_id: str, call_id: str, found: CallStatus | Result) -> int:
        """How large an output file an answer with the result of this call may read, in bytes.

        Args:
            lease_id: whose call.
            call_id: which one.
            found: where it is.
        """
        if isinstance(found, Result):
            return found.output_file.size_bytes if found.output_file is not None else 0
        flight = self._in_flight_calls.of(lease_id, call_id)
        return flight.output_limit_bytes if flight is not None and flight.output_limit_bytes > LARGE_OUTPUT_BYTES else 0

    def _recorded(self, tenant: str, lease_id: str, call_id: str) -> Result | None:
        recorded_result = self._result_store.recorded_result(lease_id, call_id)
        try:
            self._routes.route(tenant, lease_id)
        except (SandboxLost, BackendUnavailable):
            if recorded_result is None:
                raise
        return recorded_result.result if recorded_result is not None else None

    async def _asked(self, tenant: str, lease_id: str, call_id: str) -> CallStatus | Result:
        try:
            async with self._stream(tenant, lease_id, call_id, "call_status", fetches_outputs=True) as stream:
                result: Result | None = None
                async for event in stream:
                    if isinstance(event, wire.Item):
                        result = await self._result(tenant, lease_id, call_id, event)
                    elif isinstance(event, wire.Ended) and result is None:
                        return self._running(lease_id, call_id, event.meta)
        except CallNotFound:
            flight = self._in_flight_calls.of(lease_id, call_id)
            if flight is None:
                raise
            return CallStatus(output_bytes=0, started_at=None, encoding=flight.encoding)
        if result is None:
            raise BackendUnavailable("the agent ended the exchange without an answer")
        return result

    def _running(self, lease_id: str, call_id: str, meta: Mapping[str, Any]) -> CallStatus:
        encoding = known_encoding(self._result_store, self._in_flight_calls, lease_id, call_id) or agents_encoding(meta)
        return CallStatus(output_bytes=_count(meta.get("output_bytes")), started_at=_time(meta.get("started_at")), encoding=encoding)

    async def _end(self, tenant: str, lease_id: str, call_id: str) -> Result:
        async with aclosing(self.follow(tenant, lease_id, call_id, BEYOND_ALL_BYTES)) as events:
            async for event in events:
                if isinstance(event, Result):
                    return event
        raise CallNotFound(f"lease {lease_id} has no call {call_id}")

    async def follow(self, tenant: str, lease_id: str, call_id: str, offset: int) -> AsyncGenerator[Chunk | Result, None]:
        """A call's output from an offset on, as it comes, and its result at the end; a link that breaks meanwhile is taken up where it broke."""
        lost_since: float | None = None
        while True:
            try:
                async with self._raw_stream(tenant, lease_id, call_id, "attach", offset=offset, fetches_outputs=True) as stream:
                    async for event in stream:
                        lost_since = None
                        if isinstance(event, wire.Data):
                            offset += len(event.body)
                            yield Chunk(data=event.body, end=offset)
                        elif isinstance(event, wire.Item):
                            yield await self._result(tenant, lease_id, call_id, event)
                            return
                raise LinkLost("the agent ended the exchange without a result")
            except CallNotFound:
                await self._until_begun(lease_id, call_id)
            except SandboxLost as error:
                yield self._lost(lease_id, call_id, error)
                return
            except AgentSilent as silent:
                raise BackendUnavailable(f"the agent cannot be reached: {silent}") from None
            except (LinkLost, BackendUnavailable) as lost:
                lost_since = lost_since or self._clock.monotonic()
                error_or_none = await self._unreachable(lease_id, str(lost), lost_since)
                if error_or_none is not None:
                    yield self._lost(lease_id, call_id, error_or_none)
                    return

    async def _until_begun(self, lease_id: str, call_id: str) -> None:
        """Wait a little: while a call waits for its turn its agent does not know it.

        Raises:
            CallNotFound: nothing by that name is under way.
        """
        if self._in_flight_calls.of(lease_id, call_id) is None:
            raise CallNotFound(f"lease {lease_id} has no call {call_id}")
        try:
            async with asyncio.timeout(AGAIN_AFTER_S):
                await self._in_flight_calls.landed(lease_id, call_id)
        except TimeoutError:
            pass

    async def _unreachable(self, lease_id: str, why: str, lost_since: float) -> SandboxLost | None:
        left_s = lost_since + LOST_WAIT_S - self._clock.monotonic()
        if left_s <= 0:
            raise BackendUnavailable(f"the agent cannot be reached: {why}")
        lost = await self._routes.wait_for_reconnect_or_loss(lease_id, left_s)
        if lost is None:
            await asyncio.sleep(AGAIN_AFTER_S)
        return lost

    def _lost(self, lease_id: str, call_id: str, error: SandboxLost) -> Result:
        recorded_result = self._result_store.recorded_result(lease_id, call_id)
        if recorded_result is not None:
            return recorded_result.result
        return refusal(_unnamed(lease_id, call_id, known_encoding(self._result_store, self._in_flight_calls, lease_id, call_id) or "utf-8"), error)

    async def output(self, tenant: str, lease_id: str, call_id: str, offset: int) -> WholeOutput:
        """The whole output from an offset on: of a call that runs, what there is so far.

        Raises:
            CallNotFound: also where the output had to make room for newer ones.
            InvalidRequest: the offset lies beyond the end.
        """
        chunks = self._output(tenant, lease_id, call_id, offset)
        try:
            first = await anext(chunks)
        except SandboxLost:
            recorded_result = self._result_store.recorded_result(lease_id, call_id)
            if recorded_result is None or recorded_result.result.truncated:
                raise
            kept_bytes = output_bytes(recorded_result.result)
            if offset > kept_bytes:
                raise _beyond(kept_bytes) from None
            return WholeOutput(total_bytes=kept_bytes, chunks=output_pieces(recorded_result.result, offset))
        if isinstance(first, bytes):
            return WholeOutput(total_bytes=None, chunks=_again(first, chunks))
        await _check_available(first, offset, call_id, chunks)
        return WholeOutput(total_bytes=_count(first.get("total_bytes")), chunks=_bytes(chunks))

    async def _output(self, tenant: str, lease_id: str, call_id: str, offset: int) -> AsyncGenerator[bytes | dict[str, Any], None]:
        try:
            async with self._stream(tenant, lease_id, call_id, "output", offset=offset) as stream:
                async for event in stream:
                    if isinstance(event, wire.Data):
                        yield event.body
                    elif isinstance(event, wire.Item):
                        yield dict(event.meta)
                yield b""
        except CallNotFound:
            if self._in_flight_calls.of(lease_id, call_id) is None:
                raise
            yield b""

    @asynccontextmanager
    async def _stream(self, tenant: str, lease_id: str, call_id: str, op: str, **more: Any) -> AsyncIterator[AgentStream]:
        try:
            async with self._raw_stream(tenant, lease_id, call_id, op, RESPONSE_TIMEOUT_S, **more) as stream:
                yield stream
        except AgentSilent as silent:
            raise BackendUnavailable(f"the agent cannot be reached: {silent}") from None
        except LinkLost as lost:
            error = await self._routes.wait_for_reconnect_or_loss(lease_id, LOST_WAIT_S)
            raise error or BackendUnavailable(f"the agent cannot be reached: {lost}") from None

    @asynccontextmanager
    async def _raw_stream(self, tenant: str, lease_id: str, call_id: str, op: str, silence_s: float | None = None, **more: Any) -> AsyncIterator[AgentStream]:
        route = self._routes.route(tenant, lease_id)
        try:
            async with route.agent.link.stream(slot_meta(route, op, call_id=call_id, **more), silence_s) as stream:
                stream.end()
                yield stream
        except AgentRefused as refused:
            raise refused_call(self._routes, tenant, lease_id, call_id, refused) from None

    async def _result(self, tenant: str, lease_id: str, call_id: str, item: wire.Item) -> Result:
        return await current_result(self._result_store, self._in_flight_calls, self._outputs, self._routes.route(tenant, lease_id), call_id, item)


def known_encoding(result_store: ResultStore, in_flight_calls: InFlightCalls, lease_id: str, call_id: str) -> str | None:
    """The encoding that a call asked for, if this process knows it."""
    recorded_result = result_store.recorded_result(lease_id, call_id)
    if recorded_result is not None:
        return recorded_result.result.encoding
    flight = in_flight_calls.of(lease_id, call_id)
    return flight.encoding if flight is not None else None


def found_result(result_store: ResultStore, in_flight_calls: InFlightCalls, lease_id: str, call_id: str, item: wire.Item) -> Result:
    """The result of a call that its agent was asked after, in the encoding that the call asked for."""
    encoding = known_encoding(result_store, in_flight_calls, lease_id, call_id) or agents_encoding(item.meta)
    return agent_result(_unnamed(lease_id, call_id, encoding), item.meta, item.body)


async def current_result(
    result_store: ResultStore, in_flight_calls: InFlightCalls, outputs: ResultOutputs, route: SlotLocation, call_id: str, item: wire.Item
) -> Result:
    """The result of a call that its agent was asked after: the one on record, where there is one or is about to be, so that nobody fetches its output again.

    Raises:
        LinkLost, AgentSilent: its output could not be fetched; it still waits.
    """
    lease_id = route.lease.lease_id
    recorded_result = result_store.recorded_result(lease_id, call_id)
    if recorded_result is None and waiting_output(item.meta) is not None and in_flight_calls.of(lease_id, call_id) is not None:
        await in_flight_calls.landed(lease_id, call_id)
        recorded_result = result_store.recorded_result(lease_id, call_id)
    if recorded_result is not None:
        return recorded_result.result
    return await outputs.complete_for_now(found_result(result_store, in_flight_calls, lease_id, call_id, item), item.meta, route)


def refused_call(routes: SlotLocator, tenant: str, lease_id: str, call_id: str, refused: AgentRefused) -> PoolServiceError:
    """What an agent's refusal to talk of a call means to the caller."""
    if refused.code == "call_not_found":
        return CallNotFound(f"lease {lease_id} has no call {call_id}")
    if refused.code == "not_implemented":
        return NotImplementedHere(refused.detail)
    try:
        routes.route(tenant, lease_id)
    except (LeaseNotFound, LeaseLost) as error:
        return error
    return BackendUnavailable(f"the agent refused: {refused.detail}")


def _unnamed(lease_id: str, call_id: str, encoding: str) -> ToolCall:
    """A call of which only the name matters."""
    return ToolCall(call_id=call_id, lease_id=lease_id, tool="", args={}, encoding=encoding)


async def _check_available(head: dict[str, Any], offset: int, call_id: str, chunks: AsyncGenerator[Any, None]) -> None:
    total_bytes, available_bytes = _count(head.get("total_bytes")), _count(head.get("available_bytes"))
    problem: PoolServiceError | None = None
    if total_bytes and not available_bytes and head.get("state") == "done":
        problem = CallNotFound(f"the whole output of call {call_id} has made room for newer ones; its result still has both ends", output_bytes=total_bytes)
    elif offset > total_bytes:
        problem = _beyond(total_bytes)
    if problem is not None:
        await chunks.aclose()
        raise problem


def _beyond(total_bytes: int, name: str = "offset") -> InvalidRequest:
    return InvalidRequest(f"{name}: beyond the {total_bytes} bytes that there are", field=name)


async def _again(first: bytes, rest: AsyncGenerator[bytes | dict[str, Any], None]) -> AsyncGenerator[bytes, None]:
    yield first
    async for chunk in _bytes(rest):
        yield chunk


async def _bytes(chunks: AsyncGenerator[bytes | dict[str, Any], None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(chunks):
        async for chunk in chunks:
            if isinstance(chunk, bytes):
                yield chunk


def _count(value: object) -> int:
    return value if type(value) is int and 0 <= value < BEYOND_ALL_BYTES else 0


def _time(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < BEYOND_ALL_BYTES else None
