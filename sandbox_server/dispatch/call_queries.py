"""Reports the status and the output of calls, from the recorded results or from their agents."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass

from sandbox_server.core.clock import Clock
from sandbox_server.core.errors import BackendUnavailable, CallNotFound, InvalidRequest, SandboxLost
from sandbox_server.core.execution import LARGE_OUTPUT_BYTES, Reason, Result
from sandbox_server.dispatch.agent_errors import LOST_LINK_WAIT_S, error_of_refusal, translated_link_errors, unreachable
from sandbox_server.dispatch.call_tracker import CallTracker
from sandbox_server.dispatch.outputs import ResultOutputs, output_bytes, output_pieces
from sandbox_server.dispatch.result_records import ResultLookup, ResultStore
from sandbox_server.dispatch.results import call_reference, lease_error_result
from sandbox_server.dispatch.slot_locator import SlotLocator
from sandbox_server.link.call_messages import OutputHeader, RunningCall
from sandbox_server.link.errors import AgentRefused, AgentSilent, LinkLost

RETRY_DELAY_S = 0.1
"""How long to wait before an agent is asked again, in seconds."""
OFFSET_BEYOND_EVERY_OUTPUT = 1 << 53
"""A client that follows a call from this offset on receives only its result."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CallProgress:
    """The progress of a call that has no result yet.

    Args:
        output_bytes: how much output it has written.
        started_at: when it started, in seconds of the wall clock; None while it waits for the calls before it.
        encoding: the encoding that it asked for.
    """

    output_bytes: int
    started_at: float | None
    encoding: str = "utf-8"


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """A part of the output of a call, and the offset in the whole output at which the part ends."""

    data: bytes
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeOutput:
    """The whole output of a call, as far as it is kept.

    Args:
        total_bytes: how much the call has written; None where the agent does not say.
        chunks: the bytes. The reader iterates over them once, or closes them.
    """

    total_bytes: int | None
    chunks: AsyncGenerator[bytes, None]


class CallQueries:
    """Reports on the calls of leases that hold.

    Args:
        slot_locator: finds the slot of a lease.
        result_store: where results are recorded.
        call_tracker: the calls in flight.
        clock: measures how long to wait.
        outputs: fetches the outputs of results.

    Every method that asks about a call raises LeaseNotFound, LeaseLost or SandboxLost where the lease does not hold (a recorded result is returned
    even after the sandbox is lost), CallNotFound where the lease never had the call, and BackendUnavailable where the agent cannot be reached.
    """

    def __init__(self, slot_locator: SlotLocator, result_store: ResultStore, call_tracker: CallTracker, clock: Clock, outputs: ResultOutputs) -> None:
        self._slot_locator = slot_locator
        self._call_tracker = call_tracker
        self._clock = clock
        self._lookup = ResultLookup(result_store, call_tracker, outputs)

    async def call_encoding(self, tenant: str, lease_id: str, call_id: str) -> str:
        """The encoding that a call asked for. The agent is asked where this process has started after the call."""
        known = self._lookup.known_encoding(lease_id, call_id)
        if known is not None:
            return known
        return (await self.call_status(tenant, lease_id, call_id)).encoding

    async def call_status(self, tenant: str, lease_id: str, call_id: str, wait_s: float = 0.0) -> CallProgress | Result:
        """Report the progress of a call, or its result.

        Args:
            tenant: the tenant that sends the request.
            lease_id: the lease of the call.
            call_id: the call.
            wait_s: how long to wait for the result of a call that has not ended, in seconds.
        """
        deadline = self._clock.monotonic() + wait_s
        while True:
            found = self._recorded_result(tenant, lease_id, call_id) or await self._status_from_agent(tenant, lease_id, call_id)
            left_s = deadline - self._clock.monotonic()
            if isinstance(found, Result) or left_s <= 0:
                return found
            try:
                async with asyncio.timeout(left_s):
                    return await self._wait_for_result(tenant, lease_id, call_id)
            except TimeoutError:
                pass
            except CallNotFound:
                # The call was in flight, and its result is one that is not recorded: report what is known now.
                continue

    async def check_offset(self, tenant: str, lease_id: str, call_id: str, offset: int, name: str = "offset") -> CallProgress | Result:
        """Check that an offset lies within the output of a call, or at its end.

        Args:
            tenant: the tenant that sends the request.
            lease_id: the lease of the call.
            call_id: the call.
            offset: the offset, in bytes.
            name: the name of the offset in the client's request.

        Returns:
            The status of the call.

        Raises:
            InvalidRequest: the offset lies beyond the end.
        """
        found = await self.call_status(tenant, lease_id, call_id)
        # How much a call had written when its sandbox was lost is not known.
        if offset > found.output_bytes and not (isinstance(found, Result) and found.reason is Reason.SANDBOX_LOST):
            raise _offset_beyond_end(found.output_bytes, name)
        return found

    def output_file_bytes(self, lease_id: str, call_id: str, found: CallProgress | Result) -> int:
        """The size of the output file that a response with the result of this call may read, in bytes.

        Args:
            lease_id: the lease of the call.
            call_id: the call.
            found: the status of the call.
        """
        if isinstance(found, Result):
            return found.output_file.size_bytes if found.output_file is not None else 0
        call = self._call_tracker.find_call(lease_id, call_id)
        return call.output_limit_bytes if call is not None and call.output_limit_bytes > LARGE_OUTPUT_BYTES else 0

    async def follow_call(self, tenant: str, lease_id: str, call_id: str, offset: int) -> AsyncGenerator[Chunk | Result, None]:
        """Receive the output of a call as it comes, and its result as the last item. A lost link is replaced, without a gap.

        Args:
            tenant: the tenant that sends the request.
            lease_id: the lease of the call.
            call_id: the call.
            offset: where in the output to begin, in bytes.
        """
        lost_since: float | None = None
        while True:
            try:
                async with aclosing(self._follow_over_one_link(tenant, lease_id, call_id, offset)) as events:
                    async for event in events:
                        lost_since = None
                        yield event
                        if isinstance(event, Result):
                            return
                        offset = event.end
                raise LinkLost("the agent ended the stream without a result")
            except CallNotFound:
                await self._wait_for_start(lease_id, call_id)
            except SandboxLost as error:
                yield self._result_of_lost_sandbox(lease_id, call_id, error)
                return
            except AgentSilent as silent:
                raise unreachable(silent) from None
            except (LinkLost, BackendUnavailable) as lost:
                lost_since = lost_since or self._clock.monotonic()
                sandbox_lost = await self._wait_for_link(lease_id, str(lost), lost_since)
                if sandbox_lost is not None:
                    yield self._result_of_lost_sandbox(lease_id, call_id, sandbox_lost)
                    return

    async def fetch_output(self, tenant: str, lease_id: str, call_id: str, offset: int) -> WholeOutput:
        """Fetch the whole output of a call from an offset on; of a call that has not ended, the output so far.

        Args:
            tenant: the tenant that sends the request.
            lease_id: the lease of the call.
            call_id: the call.
            offset: where in the output to begin, in bytes.

        Raises:
            CallNotFound: also where the agent has deleted the output to make room for newer ones.
            InvalidRequest: the offset lies beyond the end.
        """
        parts = self._fetch_output_parts(tenant, lease_id, call_id, offset)
        try:
            first = await anext(parts, None)
        except SandboxLost:
            result = self._lookup.recorded_result(lease_id, call_id)
            if result is None or result.truncated:
                raise
            kept_bytes = output_bytes(result)
            if offset > kept_bytes:
                raise _offset_beyond_end(kept_bytes) from None
            return WholeOutput(total_bytes=kept_bytes, chunks=output_pieces(result, offset))
        if not isinstance(first, OutputHeader):
            return WholeOutput(total_bytes=None, chunks=_bytes_of(parts, first or b""))
        try:
            _check_available(first, offset, call_id)
        except (CallNotFound, InvalidRequest):
            await parts.aclose()
            raise
        return WholeOutput(total_bytes=first.total_bytes, chunks=_bytes_of(parts))

    def _recorded_result(self, tenant: str, lease_id: str, call_id: str) -> Result | None:
        """The recorded result of a call. Raises as every method does where the lease does not hold."""
        result = self._lookup.recorded_result(lease_id, call_id)
        try:
            self._slot_locator.locate_slot(tenant, lease_id)
        except (SandboxLost, BackendUnavailable):
            if result is None:
                raise
        return result

    async def _status_from_agent(self, tenant: str, lease_id: str, call_id: str) -> CallProgress | Result:
        location = self._slot_locator.locate_slot(tenant, lease_id)
        try:
            async with self._translated_errors(tenant, lease_id, call_id):
                message = await location.slot.call_status(call_id)
                if not isinstance(message, RunningCall):
                    return await self._lookup.result_of_message(location, call_id, message)
        except CallNotFound:
            # The agent does not know a call that waits for its start.
            call = self._call_tracker.find_call(lease_id, call_id)
            if call is None:
                raise
            return CallProgress(output_bytes=0, started_at=None, encoding=call.encoding)
        encoding = self._lookup.known_encoding(lease_id, call_id) or message.encoding
        return CallProgress(output_bytes=message.output_bytes, started_at=message.started_at, encoding=encoding)

    async def _wait_for_result(self, tenant: str, lease_id: str, call_id: str) -> Result:
        async with aclosing(self.follow_call(tenant, lease_id, call_id, OFFSET_BEYOND_EVERY_OUTPUT)) as events:
            async for event in events:
                if isinstance(event, Result):
                    return event
        raise CallNotFound(f"lease {lease_id} has no call {call_id}")

    async def _follow_over_one_link(self, tenant: str, lease_id: str, call_id: str, offset: int) -> AsyncGenerator[Chunk | Result, None]:
        """Follow a call until its result or until the link is lost. Raises the link's errors, except for refusals."""
        location = self._slot_locator.locate_slot(tenant, lease_id)
        try:
            async with aclosing(location.slot.follow_output(call_id, offset, may_be_silent=True)) as parts:
                async for part in parts:
                    if isinstance(part, bytes):
                        offset += len(part)
                        yield Chunk(data=part, end=offset)
                    else:
                        yield await self._lookup.result_of_message(location, call_id, part)
                        return
        except AgentRefused as refused:
            raise error_of_refusal(refused, self._slot_locator, tenant, lease_id, call_id) from None

    async def _wait_for_start(self, lease_id: str, call_id: str) -> None:
        """Wait a moment for a call that its agent does not know because the call waits for its start.

        Raises:
            CallNotFound: there is no such call.
        """
        if self._call_tracker.find_call(lease_id, call_id) is None:
            raise CallNotFound(f"lease {lease_id} has no call {call_id}")
        try:
            async with asyncio.timeout(RETRY_DELAY_S):
                await self._call_tracker.wait_for_result(lease_id, call_id)
        except TimeoutError:
            pass

    async def _wait_for_link(self, lease_id: str, problem: str, lost_since: float) -> SandboxLost | None:
        """Wait until the agent can be reached again, or until the sandbox is lost.

        Raises:
            BackendUnavailable: neither has happened for `LOST_LINK_WAIT_S`.
        """
        left_s = lost_since + LOST_LINK_WAIT_S - self._clock.monotonic()
        if left_s <= 0:
            raise unreachable(problem)
        sandbox_lost = await self._slot_locator.wait_for_reconnect_or_loss(lease_id, left_s)
        if sandbox_lost is None:
            await asyncio.sleep(RETRY_DELAY_S)
        return sandbox_lost

    def _result_of_lost_sandbox(self, lease_id: str, call_id: str, error: SandboxLost) -> Result:
        recorded_result = self._lookup.recorded_result(lease_id, call_id)
        if recorded_result is not None:
            return recorded_result
        encoding = self._lookup.known_encoding(lease_id, call_id) or "utf-8"
        return lease_error_result(call_reference(lease_id, call_id, encoding), error)

    async def _fetch_output_parts(self, tenant: str, lease_id: str, call_id: str, offset: int) -> AsyncGenerator[OutputHeader | bytes, None]:
        slot = self._slot_locator.locate_slot(tenant, lease_id).slot
        try:
            async with self._translated_errors(tenant, lease_id, call_id), aclosing(slot.fetch_output(call_id, offset)) as parts:
                async for part in parts:
                    yield part
        except CallNotFound:
            # The agent does not know a call that waits for its start: its output is empty.
            if self._call_tracker.find_call(lease_id, call_id) is None:
                raise

    def _translated_errors(self, tenant: str, lease_id: str, call_id: str) -> AbstractAsyncContextManager[None]:
        return translated_link_errors(self._slot_locator, tenant, lease_id, wait_s=LOST_LINK_WAIT_S, call_id=call_id)


def _check_available(header: OutputHeader, offset: int, call_id: str) -> None:
    """Check that the agent still has the output of a call, and that the offset lies within it.

    Raises:
        CallNotFound: the agent has deleted the output.
        InvalidRequest: the offset lies beyond the end.
    """
    if header.total_bytes and not header.available_bytes and header.is_done:
        problem = f"the whole output of call {call_id} was deleted and has made room for newer ones; its result still has the start and the end"
        raise CallNotFound(problem, output_bytes=header.total_bytes)
    if offset > header.total_bytes:
        raise _offset_beyond_end(header.total_bytes)


def _offset_beyond_end(total_bytes: int, name: str = "offset") -> InvalidRequest:
    return InvalidRequest(f"{name}: beyond the {total_bytes} bytes of output", field=name)


async def _bytes_of(parts: AsyncGenerator[OutputHeader | bytes, None], first: bytes = b"") -> AsyncGenerator[bytes, None]:
    async with aclosing(parts):
        if first:
            yield first
        async for part in parts:
            if isinstance(part, bytes):
                yield part
