"""Sends tool calls to agents and delivers their results.

The calls of one lease run in order; calls of different leases run concurrently. Calls run to their end even if the client disconnects.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from sandbox_server.core.cleanup import cleanup_on_failure
from sandbox_server.core.clock import Clock
from sandbox_server.core.errors import BackendUnavailable, SandboxLost
from sandbox_server.core.execution import Reason, Result, ToolCall
from sandbox_server.dispatch import results
from sandbox_server.dispatch.batch import Batch
from sandbox_server.dispatch.call_admission import CallAdmission, CallLimits
from sandbox_server.dispatch.call_cancellation import CallCancellation
from sandbox_server.dispatch.call_tracker import CallTracker
from sandbox_server.dispatch.limits.concurrency import ConcurrencyLimiter
from sandbox_server.dispatch.limits.response_budget import ResponseBudget, ResponseReservation
from sandbox_server.dispatch.outputs import ResultOutputs
from sandbox_server.dispatch.result_records import ResultLookup, ResultStore, find_result
from sandbox_server.dispatch.runner.call_queue import QueuedCall
from sandbox_server.dispatch.runner.call_runner import CallRunner, RunnerContext
from sandbox_server.dispatch.runner.decisions import CallTimings
from sandbox_server.dispatch.slot_locator import SlotLocation, SlotLocator
from sandbox_server.telemetry import Telemetry


class Dispatcher:
    """Turns tool calls into results.

    Args:
        slot_locator: finds the slot of a lease.
        result_store: where results are recorded.
        clock: gives the times of results.
        telemetry: counts calls.
        limits: how many calls there may be.
        call_tracker: the calls in flight, and the leases whose calls may have run in an earlier process of the service.
        concurrency_limiter: how many calls of a tenant may run; by default any number.
        response_budget: how much responses may hold.
        timings: how long agents may take.
    """

    def __init__(
        self,
        slot_locator: SlotLocator,
        result_store: ResultStore,
        clock: Clock,
        telemetry: Telemetry,
        limits: CallLimits,
        call_tracker: CallTracker | None = None,
        concurrency_limiter: ConcurrencyLimiter | None = None,
        response_budget: ResponseBudget | None = None,
        timings: CallTimings | None = None,
    ) -> None:
        self.call_tracker = call_tracker or CallTracker()
        self.concurrency_limiter = concurrency_limiter or ConcurrencyLimiter(lambda tenant: None)
        self.response_budget = response_budget or ResponseBudget()
        self.outputs = ResultOutputs(result_store.outputs)
        self._slot_locator = slot_locator
        self._result_store = result_store
        self._clock = clock
        self._telemetry = telemetry
        self._admission = CallAdmission(limits, result_store, self.call_tracker, self.concurrency_limiter)
        lookup = ResultLookup(result_store, self.call_tracker, self.outputs)
        self._cancellation = CallCancellation(slot_locator, result_store, lookup, self.call_tracker, self.concurrency_limiter, clock)
        self._tasks: set[asyncio.Task[None]] = set()
        self._runners: dict[str, set[CallRunner]] = {}
        self._runner_context = RunnerContext(
            slot_locator=slot_locator,
            result_store=result_store,
            clock=clock,
            report_result=self._report_result,
            call_tracker=self.call_tracker,
            concurrency_limiter=self.concurrency_limiter,
            outputs=self.outputs,
            timings=timings or CallTimings(),
        )

    async def reserve_and_start_calls(
        self, tenant: str, items: Sequence[ToolCall | Result], on_sent: Callable[[], None] | None = None, ended: Callable[[], None] = lambda: None
    ) -> Batch:
        """Reserve what the response may hold, wait for it where necessary, and start the calls. The arguments are those of `start_calls`.

        Returns:
            The batch. The caller calls its `discard_results` in the end.

        Raises:
            InvalidRequest: the response may hold more than a tenant can ever have.
            QuotaExceeded: as `start_calls`, or there was no room for the response in time. Nothing has run.
        """
        reservation = await self.response_budget.reserve(tenant, items)
        with cleanup_on_failure(reservation.release):
            return self.start_calls(tenant, items, on_sent, reservation, ended)

    def start_calls(
        self,
        tenant: str,
        items: Sequence[ToolCall | Result],
        on_sent: Callable[[], None] | None = None,
        reservation: ResponseReservation | None = None,
        ended: Callable[[], None] = lambda: None,
        *,
        records_results: bool = True,
    ) -> Batch:
        """Start calls. They run to their ends even if nobody reads the batch.

        Args:
            tenant: the tenant that sends the request.
            items: the calls, in order. An item that is a result already is delivered in its place.
            on_sent: called for each lease when its calls have been sent to the agent.
            reservation: what the response may hold; by default nothing is reserved, and outputs stay in memory where there is room.
            ended: called when every call has its result, whether or not the batch is still read.
            records_results: whether results are recorded before they are delivered, as `CallRunner` has it.

        Raises:
            QuotaExceeded: too many calls are in flight, or too many of the tenant's wait.
        """
        self._admission.check_request(tenant, items)
        batch = Batch(len(items), reservation or self.response_budget.nothing_reserved(tenant), ended)
        by_lease: dict[str, list[QueuedCall]] = {}
        for index, item in enumerate(items):
            if isinstance(item, ToolCall):
                by_lease.setdefault(item.lease_id, []).append(QueuedCall(index, item))
            else:
                batch.deliver_result(index, self.with_refusal_time(item))
        for lease_id, calls in by_lease.items():
            accepted, refused = self._admission.split_calls_of_lease(lease_id, calls)
            for index, call in refused:
                result = results.service_result(call, Reason.BACKEND_ERROR, self._admission.too_many_calls(), may_have_run=False)
                batch.deliver_result(index, self.with_refusal_time(result))
            for _, call in accepted:
                self.call_tracker.add_call(tenant, call)
            if accepted:
                runner = CallRunner(self._runner_context, tenant, lease_id, accepted, batch, on_sent, records_results=records_results)
                self._start_runner(lease_id, runner)
        return batch

    async def run_call(self, tenant: str, call: ToolCall, reservation: ResponseReservation | None = None, ended: Callable[[], None] = lambda: None) -> Result:
        """Run one call under a lease that must hold.

        Args:
            tenant: the tenant that sends the request.
            call: the call.
            reservation: what the response may hold, as for `start_calls`.
            ended: called when the call has its result, whether or not anybody waits for it.

        Raises:
            LeaseNotFound, LeaseLost, SandboxLost: the lease does not hold.
            QuotaExceeded: too many calls are in flight, or the lease has had all the calls that it may have.
        """
        recorded_result = self.check_call(tenant, call)
        if recorded_result is not None:
            ended()
            return recorded_result
        (result,) = await self.start_calls(tenant, [call], reservation=reservation, ended=ended).all_results()
        self._admission.check_result(result)
        return result

    def check_call(self, tenant: str, call: ToolCall) -> Result | None:
        """Check whether a single call may run.

        Returns:
            The recorded result of the call, where its sandbox is lost; None otherwise.

        Raises:
            LeaseNotFound, LeaseLost, SandboxLost: the lease does not hold.
            QuotaExceeded: the lease has had all the calls that it may have.
        """
        try:
            self._slot_locator.locate_slot(tenant, call.lease_id)
        except SandboxLost:
            result = find_result(self._result_store, call)
            if result is None:
                raise
            return self.with_refusal_time(result)
        except BackendUnavailable:
            pass  # The call waits for its agent, or ends with this error as its result.
        self._admission.check_call(call)
        return None

    async def cancel_call(self, tenant: str, lease_id: str, call_id: str) -> Result:
        """End a call and return its result. A call that has ended keeps its result; one that has not started never will.

        Args:
            tenant: the tenant that sends the request.
            lease_id: the lease of the call.
            call_id: the call.

        Raises:
            LeaseNotFound, LeaseLost, SandboxLost: the lease does not hold.
            CallNotFound: it has no such call.
            BackendUnavailable: the agent cannot be reached, or does not end the call in time.
            StorageUnavailable: that the call must not start could not be recorded.
        """
        return await self._cancellation.cancel_call(tenant, lease_id, call_id)

    def with_refusal_time(self, result: Result) -> Result:
        """The result of a call that never started, with the current time."""
        return results.with_refusal_time(result, self._clock)

    def handle_lease_end(self, lease_id: str) -> None:
        """End the calls of a lease that has ended, except those that its agent may be running: the agent reports what became of them."""
        self.concurrency_limiter.wake_waiters_of_lease(lease_id)
        runners = self._runners.get(lease_id)
        if runners:
            self._keep_task(asyncio.create_task(_end_calls_behind_first(list(runners))))

    async def end_all_calls(self) -> None:
        """End every call that is in flight. Each gets `backend_error` with `stopping`: it may have run, and the next process of the service can join it."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start_runner(self, lease_id: str, runner: CallRunner) -> None:
        self._runners.setdefault(lease_id, set()).add(runner)
        self._keep_task(asyncio.create_task(runner.run_calls())).add_done_callback(lambda _: self._remove_runner(lease_id, runner))

    def _remove_runner(self, lease_id: str, runner: CallRunner) -> None:
        runners = self._runners[lease_id]
        runners.discard(runner)
        if not runners:
            del self._runners[lease_id]

    def _keep_task(self, task: asyncio.Task[None]) -> asyncio.Task[None]:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _report_result(self, tenant: str, location: SlotLocation | None, call: ToolCall, result: Result, overhead_s: float) -> None:
        self.call_tracker.remove_call(tenant, call)
        # Counted after what waits for the result has run.
        asyncio.get_running_loop().call_soon(self._count_call, location, call, result, overhead_s)

    def _count_call(self, location: SlotLocation | None, call: ToolCall, result: Result, overhead_s: float) -> None:
        self._telemetry.count_call(
            pool=location.lease.pool if location is not None else "",
            pool_tenant=location.lease.pool_tenant or "" if location is not None else "",
            tool=call.tool,
            reason=result.reason,
            fault=result.fault,
            duration_s=result.duration_s,
            overhead_s=overhead_s if location is not None else None,
        )


async def _end_calls_behind_first(runners: list[CallRunner]) -> None:
    """End the waiting calls of one runner at a time, and let the event loop run in between."""
    for runner in runners:
        runner.end_calls_behind_first()
        await asyncio.sleep(0)
