"""The task that runs the calls of one lease of one request: it sends them in order and delivers exactly one result for each.

`decisions` says what to do when something other than a result arrives; the runner does it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from sandbox_server.core.clock import Clock
from sandbox_server.core.errors import LeaseLost, PoolServiceError, SandboxLost, StorageUnavailable
from sandbox_server.core.execution import Reason, Result, ToolCall
from sandbox_server.dispatch.agent_errors import lease_error
from sandbox_server.dispatch.batch import Batch
from sandbox_server.dispatch.call_tracker import CallTracker
from sandbox_server.dispatch.limits.concurrency import ConcurrencyLimiter
from sandbox_server.dispatch.outputs import ResultOutputs
from sandbox_server.dispatch.result_records import ResultStore, find_result, put_result, record_result
from sandbox_server.dispatch.results import agent_result, invalid_field_result, lease_error_result, service_result, with_refusal_time
from sandbox_server.dispatch.runner.call_queue import CallQueue
from sandbox_server.dispatch.runner.decisions import (
    CallTimings,
    Decision,
    EndCalls,
    RunnerState,
    SendCalls,
    WaitForLink,
    decide_after_end_of_stream,
    decide_after_error,
    is_stream_blocked,
    with_end_times,
)
from sandbox_server.dispatch.slot_locator import SlotLocation, SlotLocator
from sandbox_server.link.call_messages import ResultMessage
from sandbox_server.link.errors import AgentRefused, AgentShutsDown, AgentSilent, LinkLost, SlotUnavailable
from sandbox_server.link.slot_client import CallStream

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerContext:
    """What every runner works with.

    Args:
        slot_locator: finds the slot of a lease.
        result_store: where results are recorded.
        clock: measures the times of calls.
        report_result: called with every result: the tenant, the location of the slot (None where the call was not sent), the call, the result, and
            how much time the service added to the call's own, in seconds.
        call_tracker: the calls in flight.
        concurrency_limiter: how many calls of a tenant may run.
        outputs: fetches the outputs of results.
        timings: how long agents may take.
    """

    slot_locator: SlotLocator
    result_store: ResultStore
    clock: Clock
    report_result: Callable[[str, SlotLocation | None, ToolCall, Result, float], None]
    call_tracker: CallTracker
    concurrency_limiter: ConcurrencyLimiter
    outputs: ResultOutputs
    timings: CallTimings


class CallRunner:
    """Runs calls of one lease one after another. A call that fails does not stop the next.

    Args:
        context: what to work with.
        tenant: the tenant that sends the request.
        lease_id: the lease.
        calls: the calls with their places in the request.
        batch: receives each result, once.
        on_sent: called when the calls have been sent to the agent.
        records_results: whether results are recorded before they are delivered. Nobody can ask again for those of a lease that ends with its call.
    """

    def __init__(
        self,
        context: RunnerContext,
        tenant: str,
        lease_id: str,
        calls: Iterable[tuple[int, ToolCall]],
        batch: Batch,
        on_sent: Callable[[], None] | None = None,
        *,
        records_results: bool = True,
    ) -> None:
        self._context = context
        self._tenant = tenant
        self._lease_id = lease_id
        self._queue = CallQueue(calls)
        self._batch = batch
        self._on_sent = on_sent
        self._records_results = records_results
        self._permitted_call_id: str | None = None  # the first call, if it has a permit of the concurrency limiter
        self._link_lost_at: float | None = None
        self._default_timeout_s = math.inf  # the pool's, once its spec is known
        self._is_stopping = False
        self._is_exchanging = False
        self._call_started_at = context.clock.wall()  # since when the first call may run, by both clocks
        self._call_started_monotonic = context.clock.monotonic()

    async def run_calls(self) -> None:
        """Run the calls. Each gets a result, whatever happens."""
        try:
            while self._queue:
                await self._carry_out(await self._next_decision())
        except asyncio.CancelledError:
            self._is_stopping = True
            self._end_calls(EndCalls(problem="the service stopped while the call was in flight: send the same call_id again when the service is back"))
            raise
        except Exception:  # the edge of this task: a bug costs these calls their results, and no other call anything
            log.exception("calls failed", extra={"lease_id": self._lease_id})
            self._end_calls(EndCalls(problem="the service failed; its log has the details"))
        finally:
            self._release_permit()

    def end_calls_behind_first(self) -> None:
        """End the calls behind the first one, if the lease has ended: they have not started. What became of the first one its agent reports."""
        if not self._is_exchanging or len(self._queue) < 2:
            return
        try:
            self._context.slot_locator.locate_slot(self._tenant, self._lease_id)
        except SandboxLost:
            pass  # What became of each call the agent reports, or the pool once the sandbox is known to be lost.
        except LeaseLost as ended:
            first_started = self._call_started_at, self._call_started_monotonic
            for index, call, _ in self._queue.pop_all_but_first():
                self._deliver_result(index, call, with_refusal_time(lease_error_result(call, ended), self._context.clock), None)
            self._call_started_at, self._call_started_monotonic = first_started
        except PoolServiceError:
            pass  # The lease holds, and its agent cannot be reached at the moment.

    async def _next_decision(self) -> Decision:
        try:
            return await self._send_and_receive()
        except (LinkLost, AgentSilent, AgentRefused, PoolServiceError, TimeoutError) as error:
            is_refusal = isinstance(error, AgentRefused)
            problem = lease_error(self._context.slot_locator, self._tenant, self._lease_id) if is_refusal else None
            return decide_after_error(error, self._state(), problem, self._context.timings)

    async def _carry_out(self, decision: Decision) -> None:
        match decision:
            case SendCalls():
                pass
            case EndCalls():
                if isinstance(decision.error, SandboxLost):
                    await self._deliver_recorded_results(None, unsent_only=False)
                self._end_calls(decision)
            case WaitForLink():
                await self._wait_for_link(decision)

    def _state(self) -> RunnerState:
        return RunnerState(
            now=self._context.clock.monotonic(), sent_count=self._queue.sent_count, first_deadline=self._first_deadline(), link_lost_at=self._link_lost_at
        )

    def _first_deadline(self) -> float:
        return self._call_started_monotonic + self._timeout_s(self._queue.first_call)

    def _timeout_s(self, call: ToolCall) -> float:
        return call.timeout_s if call.timeout_s is not None else self._default_timeout_s

    async def _send_and_receive(self) -> Decision:
        """Send as many calls as may run now, and deliver their results. Returns what to do about the rest of the queue."""
        location = self._context.slot_locator.locate_slot(self._tenant, self._lease_id)
        self._default_timeout_s = location.spec.default_timeout_s
        self._refuse_long_timeouts(location.spec.max_timeout_s)
        await self._deliver_recorded_results(location, unsent_only=True)
        count = self._count_of_calls_to_send()
        if count:
            return await self._exchange(location, count)
        if self._queue:
            await self._wait_for_permit()
        return SendCalls()

    def _refuse_long_timeouts(self, max_timeout_s: float) -> None:
        for queued in self._queue.queued_calls(unsent_only=True):
            timeout_s = queued.call.timeout_s
            if timeout_s is not None and timeout_s > max_timeout_s:
                self._queue.remove_call(queued)
                refused = invalid_field_result(queued.call, "timeout_s", f"timeout_s: at most the pool's max_timeout_s, {max_timeout_s:.10g}")
                self._deliver_result(*queued, refused, None)

    async def _deliver_recorded_results(self, location: SlotLocation | None, *, unsent_only: bool) -> None:
        """Deliver the results that are recorded. They need no permit, because nothing runs."""
        context = self._context
        if not context.result_store.result_count(self._lease_id):
            return
        for queued in self._queue.queued_calls(unsent_only=unsent_only):
            try:
                recorded_result = find_result(context.result_store, queued.call)
            except StorageUnavailable:
                log.exception("a recorded result cannot be read; the agent is asked", extra={"lease_id": self._lease_id, "call_id": queued.call.call_id})
                continue
            if recorded_result is not None:
                result = await context.outputs.limit_memory(replace(recorded_result, encoding=queued.call.encoding), self._batch.reservation)
                if result.output_file is not recorded_result.output_file:
                    context.outputs.delete_file_when_unused(result)
                self._queue.remove_call(queued)
                self._deliver_result(*queued, result, location)

    def _count_of_calls_to_send(self) -> int:
        """How many calls may be sent now: all of them, or, where the tenant has a limit, the first one once it has its permit.

        After a lost link, all calls that were sent before may be sent again.
        """
        limiter = self._context.concurrency_limiter
        if not self._queue or limiter.limit_of_tenant(self._tenant) is None:
            return len(self._queue)
        call_id = self._queue.first_call.call_id
        if self._permitted_call_id is None and limiter.try_acquire_permit(self._tenant, (self._lease_id, call_id)):
            self._permitted_call_id = call_id
        return self._queue.sent_count or (1 if self._permitted_call_id is not None else 0)

    async def _wait_for_permit(self) -> None:
        """Wait until the first call may start, or until the call or its lease has ended otherwise. The lease does not expire meanwhile."""
        call_id = self._queue.first_call.call_id
        self._context.slot_locator.record_call_start(self._lease_id)
        try:
            if await self._context.concurrency_limiter.acquire_permit(self._tenant, (self._lease_id, call_id)):
                self._permitted_call_id = call_id
        finally:
            self._context.slot_locator.record_call_end(self._lease_id)
        self._reset_call_start()

    def _release_permit(self) -> None:
        if self._permitted_call_id is not None:
            call_id, self._permitted_call_id = self._permitted_call_id, None
            self._context.concurrency_limiter.release_permit(self._tenant, (self._lease_id, call_id))

    async def _exchange(self, location: SlotLocation, count: int) -> Decision:
        """Send the first `count` calls over one stream and deliver their results, which arrive in the order of the calls."""
        calls = self._queue.first_calls(count)
        for call in calls:
            self._context.call_tracker.mark_sent(call)
        self._context.slot_locator.record_call_start(self._lease_id)
        sent_at = self._context.clock.monotonic()
        earlier_sent_count = self._queue.sent_count
        try:
            async with location.slot.open_calls() as stream:
                self._queue.sent_count, self._is_exchanging = count, True
                for call in calls:
                    stream.send_call(call, self._timeout_s(call))
                stream.end_calls()
                if self._on_sent is not None:
                    self._on_sent()
                while self._queue.sent_count:
                    message = await self._next_message(stream, location, sent_at)
                    if message is None:
                        return decide_after_end_of_stream(self._state())
                    result = await self._handle_message(message, location)
                    if is_stream_blocked(message, result, self._queue.sent_count):
                        return SendCalls()
        except SlotUnavailable as refused:
            # An agent refuses a slot before it begins a call, so the rest of this stream has not run. An earlier stream may have carried the same calls.
            self._queue.sent_count = max(0, earlier_sent_count - (count - self._queue.sent_count))
            if isinstance(refused, AgentShutsDown):
                # Of a call that is sent just before the connection ends, nobody could say whether it ran.
                await location.slot.wait_for_disconnect(self._context.timings.refused_slot_wait_s)
            raise
        finally:
            self._is_exchanging = False
            self._context.slot_locator.record_call_end(self._lease_id)
        return SendCalls()

    async def _next_message(self, stream: CallStream, location: SlotLocation, sent_at: float) -> ResultMessage | None:
        """Wait for the next result. Returns None where the agent has ended the stream.

        An agent that does not respond is given up soon after the deadline of the call. One that responds to pings is only late, possibly because
        this process was busy: the wait goes on, because its result is worth more than an unknown outcome.

        Raises:
            AgentSilent: the deadline of the call has passed, and the agent does not respond to a ping.
            TimeoutError: the agent responds to pings, but does not report the result.
        """
        timings, deadline = self._context.timings, self._first_deadline()
        try:
            return await self._message_until(deadline + timings.ping_after_s, stream)
        except TimeoutError:
            if not await location.slot.answers_ping(timings.ping_within_s):
                raise AgentSilent(timings.ping_within_s) from None
        # A call that was sent again over another link may have started only when it was sent.
        sent_later_s = max(0.0, sent_at - self._call_started_monotonic)
        return await self._message_until(deadline + sent_later_s + timings.result_grace_s, stream)

    async def _message_until(self, deadline: float, stream: CallStream) -> ResultMessage | None:
        async with asyncio.timeout(deadline - self._context.clock.monotonic()):
            return await stream.next_result()

    async def _handle_message(self, message: ResultMessage, location: SlotLocation) -> Result:
        """Record and deliver the result of the first call. Returns the result."""
        context, call = self._context, self._queue.first_call
        if message.call_id == call.call_id:
            result = agent_result(call, message)
        else:
            result = service_result(call, Reason.BACKEND_ERROR, "the agent sent the result of another call", may_have_run=True)
        result = await context.outputs.complete_result(with_refusal_time(result, context.clock), message, location)
        result = await context.outputs.limit_memory(result, self._batch.reservation)
        if self._records_results:
            await record_result(context.result_store, call, result)
        if result.output_file is not None:
            result = self._with_recorded_file(call, result)
        index, call = self._queue.pop_first()
        self._link_lost_at = None
        self._deliver_result(index, call, result, location)
        return result

    def _with_recorded_file(self, call: ToolCall, result: Result) -> Result:
        """The result with the output file that is recorded.

        That may be another file, where another request has fetched the same output meanwhile. A lease that has ended has no record.
        """
        recorded_result = self._context.result_store.find_result(call.lease_id, call.call_id)
        recorded_file = recorded_result.result.output_file if recorded_result is not None else None
        if recorded_file is result.output_file:
            return result
        self._context.outputs.delete_file_when_unused(result)
        return replace(result, output_file=recorded_file or result.output_file)

    async def _wait_for_link(self, decision: WaitForLink) -> None:
        """Wait until the sandbox can be reached again; end the calls where it is lost."""
        if self._link_lost_at is None:
            self._link_lost_at = self._context.clock.monotonic()
            log.warning("a call cannot be sent to its agent now", extra={"lease_id": self._lease_id, "detail": decision.problem})
        await asyncio.sleep(decision.delay_s)
        sandbox_lost = await self._context.slot_locator.wait_for_reconnect_or_loss(self._lease_id, decision.wait_s)
        if sandbox_lost is not None:
            await self._carry_out(EndCalls(problem=sandbox_lost.detail, error=sandbox_lost))

    def _end_calls(self, decision: EndCalls) -> None:
        """End calls without a result from their agent. A lost sandbox is recorded as their result."""
        context, ended = self._context, self._queue.pop_calls(decision.count)
        # This is decided for all calls before the first is delivered: that one of them may have run says nothing about those behind it.
        may_have_run = [context.call_tracker.may_have_run(call, was_sent=was_sent) for _, call, was_sent in ended]
        started_at, duration_s = self._call_started_at, context.clock.monotonic() - self._call_started_monotonic
        for (index, call, was_sent), call_may_have_run in zip(ended, may_have_run, strict=True):
            has_started = was_sent and not decision.is_refused
            result = with_end_times(
                decision.result_for(call),
                may_have_run=call_may_have_run,
                is_stopping=self._is_stopping,
                started_at=started_at if has_started else context.clock.wall(),
                duration_s=duration_s if has_started else 0.0,
            )
            if result.reason is Reason.SANDBOX_LOST:
                put_result(context.result_store, call, result)
            self._deliver_result(index, call, result, None)

    def _deliver_result(self, index: int, call: ToolCall, result: Result, location: SlotLocation | None) -> None:
        """Deliver the result of a call that has left the queue."""
        if result.reason is Reason.BACKEND_ERROR and result.metadata.get("may_have_run") is not False:
            self._context.call_tracker.add_unknown_outcome(self._lease_id)
        if self._permitted_call_id == call.call_id:
            self._release_permit()
        self._batch.reservation.release_unwritten_output(call, result)
        overhead_s = self._context.clock.monotonic() - self._call_started_monotonic - result.duration_s
        self._context.report_result(self._tenant, location, call, result, overhead_s)
        self._reset_call_start()
        self._batch.deliver_result(index, with_refusal_time(result, self._context.clock))

    def _reset_call_start(self) -> None:
        """Record that the call that is now the first of the queue cannot have started before."""
        self._call_started_at, self._call_started_monotonic = self._context.clock.wall(), self._context.clock.monotonic()
