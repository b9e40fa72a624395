"""Cancelling a call: at its agent where the call has been sent, in the queue where it has not."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from sandbox_server.core.clock import Clock
from sandbox_server.core.errors import BackendUnavailable, CallNotFound, SandboxLost
from sandbox_server.core.execution import Reason, Result, ToolCall
from sandbox_server.dispatch.agent_errors import translated_link_errors
from sandbox_server.dispatch.call_tracker import CallTracker
from sandbox_server.dispatch.limits.concurrency import ConcurrencyLimiter
from sandbox_server.dispatch.result_records import ResultLookup, ResultStore, put_result
from sandbox_server.dispatch.results import service_result, with_refusal_time
from sandbox_server.dispatch.slot_locator import SlotLocation, SlotLocator
from sandbox_server.link.call_messages import ResultMessage

CANCEL_WAIT_S = 15.0
"""How long a cancelled call may take to end, in seconds."""


class CallCancellation:
    """Cancels calls and returns their results.

    Args:
        slot_locator: finds the slot of a lease.
        result_store: where results are recorded.
        lookup: finds results by the ids of their calls.
        call_tracker: the calls in flight.
        concurrency_limiter: where calls wait for a permit.
        clock: gives the time of a result.
    """

    def __init__(
        self,
        slot_locator: SlotLocator,
        result_store: ResultStore,
        lookup: ResultLookup,
        call_tracker: CallTracker,
        concurrency_limiter: ConcurrencyLimiter,
        clock: Clock,
    ) -> None:
        self._slot_locator = slot_locator
        self._result_store = result_store
        self._lookup = lookup
        self._call_tracker = call_tracker
        self._concurrency_limiter = concurrency_limiter
        self._clock = clock

    async def cancel_call(self, tenant: str, lease_id: str, call_id: str) -> Result:
        """End a call and return its result. See `Dispatcher.cancel_call`."""
        try:
            location = self._slot_locator.locate_slot(tenant, lease_id)
        except SandboxLost:
            result = self._lookup.recorded_result(lease_id, call_id)
            if result is None:
                raise
            return result
        try:
            async with asyncio.timeout(CANCEL_WAIT_S):
                return await self._cancel_in_slot(location, tenant, call_id)
        except TimeoutError:
            raise BackendUnavailable(f"call {call_id} has not ended within {CANCEL_WAIT_S:g} s of being cancelled") from None

    async def _cancel_in_slot(self, location: SlotLocation, tenant: str, call_id: str) -> Result:
        lease_id = location.lease.lease_id
        async with translated_link_errors(self._slot_locator, tenant, lease_id, wait_s=CANCEL_WAIT_S, call_id=call_id):
            if not await location.slot.cancel_call(call_id):
                unsent = self._call_tracker.find_unsent_call(lease_id, call_id)
                if unsent is not None:
                    return await self._cancel_unsent_call(tenant, unsent)
                # The call may have been sent while the agent was asked.
                if not await location.slot.cancel_call(call_id):
                    raise CallNotFound(f"lease {lease_id} has no call {call_id}")
            return await self._wait_for_result(location, call_id)

    async def _wait_for_result(self, location: SlotLocation, call_id: str) -> Result:
        message = await location.slot.call_status(call_id)
        if isinstance(message, ResultMessage):
            return await self._lookup.result_of_message(location, call_id, message)
        async with aclosing(location.slot.follow_output(call_id, message.output_bytes, may_be_silent=False)) as parts:
            async for part in parts:
                if isinstance(part, ResultMessage):
                    return await self._lookup.result_of_message(location, call_id, part)
        raise BackendUnavailable("the agent ended the stream without a result")

    async def _cancel_unsent_call(self, tenant: str, call: ToolCall) -> Result:
        """Record that a call was cancelled before it was sent, so that every request for it, now or later, gets this result.

        Raises:
            StorageUnavailable: the record may not survive a crash of the service, and no agent has it in its journal.
        """
        result = with_refusal_time(service_result(call, Reason.CANCELLED, "the call was cancelled before it started"), self._clock)
        put_result(self._result_store, call, result)
        try:
            await self._result_store.flush()
        finally:
            self._concurrency_limiter.wake_waiters(tenant, (call.lease_id, call.call_id))
        return result
