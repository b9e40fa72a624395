"""From a lease to a result: each lease's calls go to its agent in order, all leases side by side, whether or not the caller still listens."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sandbox_server.agent import wire
from sandbox_server.core.clock import Clock
from sandbox_server.core.errors import BackendUnavailable, CallNotFound, QuotaExceeded, SandboxLost
from sandbox_server.core.execution import Reason, Result, ToolCall
from sandbox_server.dispatch.answer_budget import TENANT_SHARE, AnswerBudget, Reservation
from sandbox_server.dispatch.batch import Batch
from sandbox_server.dispatch.call_records import current_result, refused_call
from sandbox_server.dispatch.call_runner import CallRunner, Job, ResultStore, recorded, timed
from sandbox_server.dispatch.concurrency import ConcurrencyLimiter
from sandbox_server.dispatch.in_flight import InFlightCalls
from sandbox_server.dispatch.outputs import ResultOutputs
from sandbox_server.dispatch.results import identity_of, own_result
from sandbox_server.dispatch.slot_location import SlotLocation, SlotLocator, slot_meta
from sandbox_server.dispatch.unknown_outcomes import UnknownOutcomes
from sandbox_server.link.agent_link import RESPONSE_TIMEOUT_S, AgentStream
from sandbox_server.link.errors import AgentRefused, AgentSilent, LinkLost
from sandbox_server.telemetry import Telemetry

CANCEL_WAIT_S = 15.0
"""How long a cancelled call may take to end, in seconds."""
AGENTS_CALL_LIMIT = "calls"
"""How an agent names the limit, where its journal has as many calls of one lease as it takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CallLimits:
    """How many calls there may be, by the names of the settings.

    Args:
        in_flight: under way at once (`limits.calls_in_flight`); those of one tenant are at most half as many.
        of_lease: over the life of a lease (`limits.lease_calls`).
    """

    in_flight: int = 20_000
    of_lease: int = 100_000

    @property
    def in_flight_of_tenant(self) -> int:
        """How many calls of one tenant may be under way at once, so that it leaves room for the others."""
        return max(1, math.ceil(self.in_flight * TENANT_SHARE))


class Dispatcher:
    """Turns tool calls into results.

    Args:
        routes: finds the slot of a lease.
        verdicts: remembers how calls ended.
        clock: for records.
        telemetry: counts.
        limits: how many calls there may be.
        doubts: the leases whose calls may have run in an earlier life.
        turns: when calls may begin; default: at once.
        answers: what answers may hold.
    """

    def __init__(
        self,
        routes: SlotLocator,
        result_store: ResultStore,
        clock: Clock,
        telemetry: Telemetry,
        limits: CallLimits,
        unknown_outcomes: UnknownOutcomes | None = None,
        turns: ConcurrencyLimiter | None = None,
        answers: AnswerBudget | None = None,
    ) -> None:
        self._routes = routes
        self._result_store = result_store
        self._telemetry = telemetry
        self._limits = limits
        self.in_flight_calls = InFlightCalls()
        self.turns = turns or ConcurrencyLimiter(lambda tenant: None)
        self.answers = answers or AnswerBudget()
        self.outputs = ResultOutputs(result_store.outputs)
        self._tasks: set[asyncio.Task[None]] = set()
        self._runs: dict[str, set[CallRunner]] = {}
        self._job = Job(
            routes=routes,
            result_store=result_store,
            clock=clock,
            observe=self._observe,
            in_flight_calls=self.in_flight_calls,
            unknown_outcomes=unknown_outcomes or UnknownOutcomes(),
            turns=self.turns,
            outputs=self.outputs,
        )

    async def begin(
        self, tenant: str, items: Sequence[ToolCall | Result], on_sent: Callable[[], None] | None = None, ended: Callable[[], None] = lambda: None
    ) -> Batch:
        """Reserve what the answer may take, waiting for room if need be, and set the calls going. The batch is to be closed.

        Raises:
            InvalidRequest: the answer may take more than a tenant can ever have.
            QuotaExceeded: as `start`, or there was no room for the answer in time; nothing has run.
        """
        reservation = await self.answers.reserve(tenant, items)
        try:
            return self.start(tenant, items, on_sent, reservation, ended)
        except BaseException:
            reservation.release()
            raise

    def start(
        self,
        tenant: str,
        items: Sequence[ToolCall | Result],
        on_sent: Callable[[], None] | None = None,
        reservation: Reservation | None = None,
        ended: Callable[[], None] = lambda: None,
    ) -> Batch:
        """Set the calls going; they go on to their ends even if nobody reads the batch.

        Args:
            tenant: who asks.
            items: the calls, in order; what is a result already is passed through in its place.
            on_sent: hears, for each lease, that its agent has been asked.
            reservation: what the answer may take; by default nothing is reserved, and outputs are kept in memory where there is room.
            ended: called once every call has its result, whether or not the batch is still read.

        Raises:
            QuotaExceeded: too many calls are under way, or too many of the tenant's wait for their turn.
        """
        batch = Batch(len(items), reservation or self.answers.nothing_reserved(tenant), ended)
        by_lease: dict[str, list[tuple[int, ToolCall]]] = {}
        count = 0
        for index, item in enumerate(items):
            if isinstance(item, ToolCall):
                count += 1
                by_lease.setdefault(item.lease_id, []).append((index, item))
        self._check_in_flight(tenant, count)
        self._check_turns(tenant, items)
        for index, item in enumerate(items):
            if isinstance(item, Result):
                batch.deliver(index, self.stamped(item))
        for lease_id, calls in by_lease.items():
            within = self._within_lease(lease_id, calls, batch)
            for _, call in within:
                self.in_flight_calls.begin(tenant, call)
            if within:
                self._spawn(lease_id, CallRunner(self._job, tenant, lease_id, within, batch, on_sent))
        return batch

    def stamped(self, result: Result) -> Result:
        """The result of a call that never began, with the time it was refused at."""
        return timed(result, self._job.clock)

    def _spawn(self, lease_id: str, run: CallRunner) -> None:
        self._runs.setdefault(lease_id, set()).add(run)
        self._keep(asyncio.create_task(run.run())).add_done_callback(lambda _: self._run_is_over(lease_id, run))

    def _keep(self, task: asyncio.Task[None]) -> asyncio.Task[None]:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _run_is_over(self, lease_id: str, run: CallRunner) -> None:
        runs = self._runs[lease_id]
        runs.discard(run)
        if not runs:
            del self._runs[lease_id]

    def lease_over(self, lease_id: str) -> None:
        """A lease has ended: its calls wait for no turn any more, and those behind a first one come to their results without their agent."""
        self.turns.lease_over(lease_id)
        runs = self._runs.get(lease_id)
        if runs:
            self._keep(asyncio.create_task(_refuse_waiting(list(runs))))

    def _check_in_flight(self, tenant: str, count: int) -> None:
        of_tenant, most_of_tenant = self.in_flight_calls.of_tenant(tenant), self._limits.in_flight_of_tenant
        if of_tenant + count > most_of_tenant:
            share = f"{of_tenant} calls of this tenant are under way, and one tenant may have {most_of_tenant} of the {self._limits.in_flight}"
            raise QuotaExceeded(f"{share} of `limits.calls_in_flight`: ask again later", limit="calls_in_flight", retry_after_s=2)
        if self.in_flight_calls.count + count > self._limits.in_flight:
            full = f"{self.in_flight_calls.count} calls are under way, and `limits.calls_in_flight` is {self._limits.in_flight}"
            raise QuotaExceeded(f"{full}: ask again later", limit="calls_in_flight", retry_after_s=2)

    def _check_turns(self, tenant: str, items: Sequence[ToolCall | Result]) -> None:
        """Refuse calls of a tenant of which enough wait already. A request that only asks again for what it has asked for before is let in."""
        try:
            self.turns.check_room(tenant)
        except QuotaExceeded:
            if not all(isinstance(item, Result) or self._is_known(item) for item in items):
                raise

    def _within_lease(self, lease_id: str, calls: list[tuple[int, ToolCall]], batch: Batch) -> list[tuple[int, ToolCall]]:
        """The calls that their lease may still have; the others get their results here. Calls that are known already cost nothing."""
        left = self._limits.of_lease - self._result_store.verdict_count(lease_id) - self.in_flight_calls.of_lease(lease_id)
        if len(calls) <= left:
            return calls
        within = []
        for index, call in calls:
            if self._is_known(call):
                within.append((index, call))
            elif left > 0:
                left -= 1
                within.append((index, call))
            else:
                batch.deliver(index, self.stamped(own_result(call, Reason.BACKEND_ERROR, self._too_many(), may_have_run=False)))
        return within

    def _is_known(self, call: ToolCall) -> bool:
        return self._result_store.recorded_result(call.lease_id, call.call_id) is not None or self.in_flight_calls.of(call.lease_id, call.call_id) is not None

    def _too_many(self) -> str:
        return f"this lease has had the {self._limits.of_lease} calls of `limits.lease_calls`: acquire a new one"

    async def run_one(self, tenant: str, call: ToolCall, reservation: Reservation | None = None, ended: Callable[[], None] = lambda: None) -> Result:
        """Run one call under a lease that must hold.

        Args:
            tenant: who asks.
            call: what is to run.
            reservation: what the answer may take, as for `start`.
            ended: called once the call has its result, whether or not anybody waits for it.

        Raises:
            LeaseNotFound, LeaseLost, SandboxLost: it does not.
            QuotaExceeded: too many calls are under way, or the lease has had all it may have.
        """
        known = self.check(tenant, call)
        if known is not None:
            ended()
            return known
        (result,) = await self.start(tenant, [call], reservation=reservation, ended=ended).all()
        if result.reason is Reason.BACKEND_ERROR and result.metadata.get("limit") == AGENTS_CALL_LIMIT:
            raise QuotaExceeded(self._too_many(), limit="lease_calls")
        return result

    def check(self, tenant: str, call: ToolCall) -> Result | None:
        """See whether a single call may run.

        Returns:
            Its result, where it has one and its sandbox is gone.

        Raises:
            LeaseNotFound, LeaseLost, SandboxLost: its lease does not hold.
            QuotaExceeded: the lease has had all the calls it may have.
        """
        try:
            self._routes.route(tenant, call.lease_id)
        except SandboxLost:
            result = recorded(self._result_store, call)
            if result is None:
                raise
            return self.stamped(result)
        except BackendUnavailable:
            pass  # becomes the call's own result
        had = self._result_store.verdict_count(call.lease_id) + self.in_flight_calls.of_lease(call.lease_id)
        if had >= self._limits.of_lease and not self._is_known(call):
            raise QuotaExceeded(self._too_many(), limit="lease_calls")
        return None

    async def cancel(self, tenant: str, lease_id: str, call_id: str) -> Result:
        """End a call and return its result; of a call that has ended, its result as it was. One that has not begun never will.

        Raises:
            LeaseNotFound, LeaseLost, SandboxLost: the lease does not hold.
            CallNotFound: it has no such call.
            BackendUnavailable: the agent cannot be reached, or does not end the call in time.
        """
        try:
            route = self._routes.route(tenant, lease_id)
        except SandboxLost:
            recorded_result = self._result_store.recorded_result(lease_id, call_id)
            if recorded_result is None:
                raise
            return recorded_result.result
        try:
            async with asyncio.timeout(CANCEL_WAIT_S):
                return await self._cancel(route, lease_id, call_id)
        except TimeoutError:
            raise BackendUnavailable(f"call {call_id} has not ended within {CANCEL_WAIT_S:g} s of being cancelled") from None
        except AgentSilent as silent:
            raise BackendUnavailable(f"the agent cannot be reached: {silent}") from None
        except LinkLost as lost:
            verdict_error = await self._routes.wait_for_reconnect_or_loss(lease_id, CANCEL_WAIT_S)
            raise verdict_error or BackendUnavailable(f"the agent cannot be reached: {lost}") from None
        except AgentRefused as refused:
            raise refused_call(self._routes, tenant, lease_id, call_id, refused) from None

    async def _cancel(self, route: SlotLocation, lease_id: str, call_id: str) -> Result:
        if not await self._cancel_at_agent(route, lease_id, call_id):
            held = self.in_flight_calls.held(lease_id, call_id)
            if held is not None:
                return await self._cancel_held(route.lease.tenant, held)
            # It may have begun just then.
            if not await self._cancel_at_agent(route, lease_id, call_id):
                raise CallNotFound(f"lease {lease_id} has no call {call_id}")
        status_of = slot_meta(route, "call_status", call_id=call_id, fetches_outputs=True)
        async with route.agent.link.stream(status_of, RESPONSE_TIMEOUT_S) as stream:
            result, status = await self._result_and_end(stream, route, call_id)
        if result is not None:
            return result
        offset = status.get("output_bytes")
        attach = slot_meta(route, "attach", call_id=call_id, offset=offset if isinstance(offset, int) else 0, fetches_outputs=True)
        async with route.agent.link.stream(attach, RESPONSE_TIMEOUT_S) as stream:
            result, _ = await self._result_and_end(stream, route, call_id)
        if result is None:
            raise BackendUnavailable("the agent ended the exchange without a result")
        return result

    async def _result_and_end(self, stream: AgentStream, route: SlotLocation, call_id: str) -> tuple[Result | None, dict[str, object]]:
        stream.end()
        result = None
        async for event in stream:
            if isinstance(event, wire.Item):
                result = await current_result(self._result_store, self.in_flight_calls, self.outputs, route, call_id, event)
            elif isinstance(event, wire.Ended):
                return result, dict(event.meta)
        return result, {}

    async def _cancel_at_agent(self, route: SlotLocation, lease_id: str, call_id: str) -> bool:
        """Whether the agent knows the call; it ends it then."""
        answer = await route.agent.link.request(slot_meta(route, "cancel", call_id=call_id), RESPONSE_TIMEOUT_S)
        return answer.get("found") is True

    async def _cancel_held(self, tenant: str, call: ToolCall) -> Result:
        """On record first: whoever has asked for the call, or will, finds it there before its agent is asked.

        Raises:
            StorageUnavailable: it may not be found there by a later life, and no agent's journal has it.
        """
        result = self.stamped(own_result(call, Reason.CANCELLED, "the caller cancelled it before it began"))
        self._result_store.record_result(call.lease_id, call.call_id, identity_of(call), result)
        try:
            await self._result_store.flush()
        finally:
            self.turns.wake(tenant, (call.lease_id, call.call_id))
        return result

    async def stop(self) -> None:
        """End every call that still runs here; each gets `backend_error` with `stopping`, and may have run: it is for the next life of the service to join."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _observe(self, tenant: str, route: SlotLocation | None, call: ToolCall, result: Result, overhead_s: float) -> None:
        self.in_flight_calls.end(tenant, call)
        self._telemetry.call_ended(
            pool=route.lease.pool if route is not None else "",
            pool_tenant=route.lease.pool_tenant or "" if route is not None else "",
            tool=call.tool,
            reason=result.reason.value,
            fault=result.fault.value,
            duration_s=result.duration_s,
            overhead_s=overhead_s if route is not None else None,
        )


async def _refuse_waiting(runs: list[CallRunner]) -> None:
    """One request's calls after the other's, so that nothing else waits for all of them."""
    for run in runs:
        run.refuse_waiting()
        await asyncio.sleep(0)
