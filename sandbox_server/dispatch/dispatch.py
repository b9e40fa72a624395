"""From a lease to a result: each lease's calls go to its agent in order, all leases side by side, whether or not the caller still listens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from sandbox_server.agent import wire
from sandbox_server.core.clock import Clock
from sandbox_server.core.errors import BackendUnavailable, CallNotFound, LeaseLost, LeaseNotFound, NotImplementedHere, QuotaExceeded, SandboxLost
from sandbox_server.core.execution import Result, ToolCall
from sandbox_server.dispatch.batch import Batch
from sandbox_server.dispatch.lease_run import Job, LeaseRun, Verdicts, recorded
from sandbox_server.dispatch.seams import Route, Routes, slot_meta
from sandbox_server.dispatch.verdicts import agent_result
from sandbox_server.link.agent_link import AgentStream
from sandbox_server.link.errors import AgentRefused, LinkLost
from sandbox_server.telemetry import Telemetry

CANCEL_WAIT_S = 15.0
"""How long a cancelled call may take to end, in seconds."""


class Dispatcher:
    """Turns tool calls into results.

    Args:
        routes: finds the slot of a lease.
        verdicts: remembers how calls ended.
        clock: for records.
        telemetry: counts.
        max_in_flight: at most so many calls at once (`limits.calls_in_flight`).
    """

    def __init__(self, routes: Routes, verdicts: Verdicts, clock: Clock, telemetry: Telemetry, max_in_flight: int) -> None:
        self._routes = routes
        self._verdicts = verdicts
        self._telemetry = telemetry
        self._max_in_flight = max_in_flight
        self._in_flight = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._job = Job(routes=routes, verdicts=verdicts, clock=clock, observe=self._observe)

    def start(self, tenant: str, items: Sequence[ToolCall | Result]) -> Batch:
        """Set the calls going; they go on to their ends even if nobody reads the batch.

        Args:
            tenant: who asks.
            items: the calls, in order; what is a result already is passed through in its place.

        Raises:
            QuotaExceeded: too many calls are under way.
        """
        batch = Batch(len(items))
        by_lease: dict[str, list[tuple[int, ToolCall]]] = {}
        count = 0
        for index, item in enumerate(items):
            if isinstance(item, ToolCall):
                count += 1
                by_lease.setdefault(item.lease_id, []).append((index, item))
        if self._in_flight + count > self._max_in_flight:
            full = f"{self._in_flight} calls are under way, and `limits.calls_in_flight` is {self._max_in_flight}"
            raise QuotaExceeded(f"{full}: ask again later", limit="calls_in_flight", retry_after_s=2)
        for index, item in enumerate(items):
            if isinstance(item, Result):
                batch.deliver(index, item)
        self._in_flight += count
        for lease_id, calls in by_lease.items():
            task = asyncio.create_task(LeaseRun(self._job, tenant, lease_id, calls, batch.deliver).run())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return batch

    async def run_one(self, tenant: str, call: ToolCall) -> Result:
        """Run one call under a lease that must hold.

        Raises:
            LeaseNotFound, LeaseLost, SandboxLost: it does not.
            QuotaExceeded: too many calls are under way.
        """
        try:
            self._routes.route(tenant, call.lease_id)
        except SandboxLost:
            result = recorded(self._verdicts, call)
            if result is None:
                raise
            return result
        except BackendUnavailable:
            pass  # becomes the call's own result
        return (await self.start(tenant, [call]).all())[0]

    async def cancel(self, tenant: str, lease_id: str, call_id: str) -> Result:
        """End a running call and return its result; of a call that has ended, its result as it was.

        Raises:
            LeaseNotFound, LeaseLost, SandboxLost: the lease does not hold.
            CallNotFound: it has no such call.
            BackendUnavailable: the agent cannot be reached, or does not end the call in time.
        """
        try:
            route = self._routes.route(tenant, lease_id)
        except SandboxLost:
            verdict = self._verdicts.verdict(lease_id, call_id)
            if verdict is None:
                raise
            return verdict.result
        try:
            async with asyncio.timeout(CANCEL_WAIT_S):
                return await self._cancel(route, lease_id, call_id)
        except TimeoutError:
            raise BackendUnavailable(f"call {call_id} has not ended within {CANCEL_WAIT_S:g} s of being cancelled") from None
        except LinkLost as lost:
            verdict_error = await self._routes.lost_verdict(lease_id, CANCEL_WAIT_S)
            raise verdict_error or BackendUnavailable(f"the agent cannot be reached: {lost}") from None
        except AgentRefused as refused:
            raise self._refused(tenant, lease_id, call_id, refused) from None

    async def _cancel(self, route: Route, lease_id: str, call_id: str) -> Result:
        answer = await route.link.request(slot_meta(route, "cancel", call_id=call_id))
        if answer.get("found") is not True:
            raise CallNotFound(f"lease {lease_id} has no call {call_id}")
        call = ToolCall(call_id=call_id, lease_id=lease_id, tool="", args={})
        async with route.link.stream(slot_meta(route, "call_status", call_id=call_id)) as stream:
            result, status = await _result_and_end(stream, call)
        if result is not None:
            return result
        offset = status.get("output_bytes")
        async with route.link.stream(slot_meta(route, "attach", call_id=call_id, offset=offset if isinstance(offset, int) else 0)) as stream:
            result, _ = await _result_and_end(stream, call)
        if result is None:
            raise BackendUnavailable("the agent ended the exchange without a result")
        return result

    def _refused(self, tenant: str, lease_id: str, call_id: str, refused: AgentRefused) -> Exception:
        if refused.code == "call_not_found":
            return CallNotFound(f"lease {lease_id} has no call {call_id}")
        if refused.code == "not_implemented":
            return NotImplementedHere(refused.detail)
        try:
            self._routes.route(tenant, lease_id)
        except (LeaseNotFound, LeaseLost) as error:
            return error
        return BackendUnavailable(f"the agent refused: {refused.detail}")

    async def stop(self) -> None:
        """End every call that still runs here; each gets `backend_error`, and may have run."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _observe(self, route: Route | None, call: ToolCall, result: Result) -> None:
        self._in_flight -= 1
        pool = route.lease.pool if route is not None else ""
        self._telemetry.call_ended(pool=pool, tool=call.tool, reason=result.reason.value, fault=result.fault.value, duration_s=result.duration_s)


async def _result_and_end(stream: AgentStream, call: ToolCall) -> tuple[Result | None, dict[str, object]]:
    stream.end()
    result = None
    async for event in stream:
        if isinstance(event, wire.Item):
            result = agent_result(call, event.meta, event.body)
        elif isinstance(event, wire.Ended):
            return result, dict(event.meta)
    return result, {}
