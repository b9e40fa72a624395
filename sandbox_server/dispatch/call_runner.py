"""The calls of one lease in one request: over its agent, in order, each to exactly one result."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from sandbox_server.agent import wire
from sandbox_server.core.clock import Clock
from sandbox_server.core.errors import BackendUnavailable, LeaseLost, LeaseNotFound, PoolServiceError, SandboxLost, StorageUnavailable
from sandbox_server.core.execution import NOT_RECORDED, Reason, Result, ToolCall
from sandbox_server.dispatch.batch import Batch
from sandbox_server.dispatch.concurrency import ConcurrencyLimiter
from sandbox_server.dispatch.in_flight import InFlightCalls
from sandbox_server.dispatch.outputs import ResultOutputs
from sandbox_server.dispatch.results import agent_result, callers_mistake, identity_of, own_result, refusal, waiting_output
from sandbox_server.dispatch.slot_location import SlotLocation, SlotLocator, slot_meta
from sandbox_server.dispatch.unknown_outcomes import UnknownOutcomes
from sandbox_server.link.agent_link import AgentStream
from sandbox_server.link.errors import AgentRefused, AgentSilent, LinkLost
from sandbox_server.store.base import RecordedResult
from sandbox_server.store.output_files import OutputFiles

log = logging.getLogger(__name__)

AGAIN_AFTER_S = 0.1
"""How long to wait before an agent that could not be reached twice is asked again, in seconds."""
PING_AFTER_S = 2.5
"""How long after a call's deadline an agent that has not said how it ended is asked for a sign of life, in seconds. It says so within 3 s."""
PING_WITHIN_S = 2.0
"""How long the agent may take to give one, in seconds. Together with `PING_AFTER_S` less than the 5 s in which every call has its result."""
REPLY_GRACE_S = 20.0
"""How long after a call's deadline an agent that gives signs of life may take to say how it ended, in seconds."""
LOST_WAIT_S = 15.0
"""How long to wait for the pool to find out what a lost link means, in seconds."""


class _AskAgain(Exception):
    """The rest of the calls is to be asked for on another stream."""


class ResultStore(Protocol):
    """Where the ends of calls are remembered. A `pool.store.Store` is one."""

    @property
    def outputs(self) -> OutputFiles: ...

    def record_result(self, lease_id: str, call_id: str, identity: bytes, result: Result) -> None: ...

    def recorded_result(self, lease_id: str, call_id: str) -> RecordedResult | None: ...

    def verdict_count(self, lease_id: str) -> int: ...

    async def flush(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What one run of calls works with.

    Args:
        observe: hears of every result: the tenant that asked, the route it went (None: it went nowhere), the call, the result, and what the service
            added to its duration, in seconds.
        flights: the calls under way.
        doubts: the leases whose calls may have run unseen.
        turns: when calls may begin.
        outputs: brings the outputs of results.
    """

    routes: SlotLocator
    result_store: ResultStore
    clock: Clock
    observe: Callable[[str, SlotLocation | None, ToolCall, Result, float], None]
    in_flight_calls: InFlightCalls
    unknown_outcomes: UnknownOutcomes
    turns: ConcurrencyLimiter
    outputs: ResultOutputs


class CallRunner:
    """Runs some calls of one lease one after another; a failed one does not stop the next.

    Args:
        job: what to work with.
        tenant: who asks.
        lease_id: under which lease.
        calls: the calls with their places in the request.
        batch: takes each result, once.
        on_sent: hears that the agent has been asked.
    """

    def __init__(
        self,
        job: Job,
        tenant: str,
        lease_id: str,
        calls: Iterable[tuple[int, ToolCall]],
        batch: Batch,
        on_sent: Callable[[], None] | None = None,
    ) -> None:
        self._job = job
        self._tenant = tenant
        self._lease_id = lease_id
        self._pending = deque(calls)
        self._batch = batch
        self._asked = 0  # so many of the pending calls, from the first on, the agent has been asked for
        self._turn: str | None = None  # the call whose turn is taken: the first
        self._lost_since: float | None = None
        self._default_timeout_s = math.inf  # the pool's, once its spec was seen
        self._stopping = False
        self._is_conversing = False
        self._on_sent = on_sent
        self._started_at = job.clock.wall()
        self._since = job.clock.monotonic()

    async def run(self) -> None:
        """Deliver a result for every call, whatever happens."""
        try:
            await self._run()
        except asyncio.CancelledError:
            self._stopping = True
            self._give_up("the service was told to stop while the call was under way: ask again with the same call_id when it is back")
            raise
        except Exception:  # the edge of this task: a bug costs these calls their results, and nobody else anything
            log.exception("calls failed", extra={"lease_id": self._lease_id})
            self._give_up("the service failed; its log has the details")
        finally:
            self._give_turn_back()

    async def _run(self) -> None:
        while self._pending:
            try:
                route = self._job.routes.route(self._tenant, self._lease_id)
                self._default_timeout_s = route.spec.default_timeout_s
                self._check_timeouts(route.spec.max_timeout_s)
                await self._repeat_recorded(route)
                count = self._may_begin()
                if count:
                    await self._converse(route, count)
                elif self._pending:
                    await self._wait_for_turn()
            except (LinkLost, BackendUnavailable) as lost:
                await self._unreachable(str(lost))
            except AgentRefused as refused:
                await self._refused(refused)
            except PoolServiceError as error:
                await self._refuse(error)
            except AgentSilent as silent:
                # None of the calls behind it either: what is sent now could overtake it in the agent.
                self._give_up(f"how the call ended cannot be had: {silent}; ask again with the same call_id")
            except _AskAgain:
                pass
            except TimeoutError:
                self._give_up(f"the agent did not say how the call ended within {REPLY_GRACE_S:g} s of its deadline", max(1, self._asked))
            else:
                self._give_up("the agent ended the exchange without a result", self._asked)

    def _check_timeouts(self, longest_s: float) -> None:
        to_send = list(itertools.islice(self._pending, self._asked, None))
        for place, call in [item for item in to_send if item[1].timeout_s is not None and item[1].timeout_s > longest_s]:
            self._pending.remove((place, call))
            refused = callers_mistake(call, "timeout_s", f"timeout_s: at most the pool's max_timeout_s, {longest_s:.10g}")
            self._finish(place, call, refused, None)

    async def _repeat_recorded(self, route: SlotLocation) -> None:
        """Give out what is on record: it is the same however often it is asked for, and takes nobody's turn."""
        if not self._job.result_store.verdict_count(self._lease_id):
            return
        for place, call in list(itertools.islice(self._pending, self._asked, None)):
            try:
                result = recorded(self._job.result_store, call)
            except StorageUnavailable:
                log.exception("a verdict cannot be read: the agent is asked", extra={"lease_id": call.lease_id, "call_id": call.call_id})
                continue
            if result is not None:
                result = await self._within(replace(result, encoding=call.encoding))
                self._pending.remove((place, call))
                self._finish(place, call, result, route)

    async def _within(self, recorded_result: Result) -> Result:
        """A recorded result that holds no more memory than there is for it."""
        result = await self._job.outputs.within(recorded_result, self._batch.reservation)
        return result if result.output_file is recorded_result.output_file else self._job.outputs.only_for_now(result)

    def _may_begin(self) -> int:
        """How many of the pending calls may be sent now: all, or, where its tenant has a limit, the first, in its turn. Those sent before may be again."""
        if not self._pending or self._job.turns.most(self._tenant) is None:
            return len(self._pending)
        call_id = self._pending[0][1].call_id
        if self._turn is None and self._job.turns.take(self._tenant, (self._lease_id, call_id)):
            self._turn = call_id
        return self._asked or (1 if self._turn is not None else 0)

    async def _wait_for_turn(self) -> None:
        """Wait until the first call may begin, or something else has become of it or its lease, which it holds as if it ran."""
        call_id = self._pending[0][1].call_id
        self._job.routes.call_started(self._lease_id)
        try:
            if await self._job.turns.wait(self._tenant, (self._lease_id, call_id)):
                self._turn = call_id
        finally:
            self._job.routes.call_ended(self._lease_id)
        self._since, self._started_at = self._job.clock.monotonic(), self._job.clock.wall()

    def _give_turn_back(self) -> None:
        if self._turn is not None:
            call_id, self._turn = self._turn, None
            self._job.turns.give_back(self._tenant, (self._lease_id, call_id))

    async def _converse(self, route: SlotLocation, count: int) -> None:
        """Send so many of the pending calls and take the results, which come in the order of the calls."""
        for _, call in itertools.islice(self._pending, count):
            self._job.in_flight_calls.asked(call)
        self._job.routes.call_started(self._lease_id)
        sent_at = self._job.clock.monotonic()
        try:
            async with route.agent.link.stream(slot_meta(route, "calls", fetches_outputs=True)) as stream:
                self._asked, self._is_conversing = count, True
                for _, call in itertools.islice(self._pending, count):
                    stream.send_item(_call_meta(call, self._timeout_s(call)))
                stream.end()
                if self._on_sent is not None:
                    self._on_sent()
                while self._asked:
                    event = await self._next_event(stream, route, sent_at)
                    if isinstance(event, wire.Item):
                        await self._answered(event, route)
                    elif not isinstance(event, wire.Data):
                        break
        finally:
            self._is_conversing = False
            self._job.routes.call_ended(self._lease_id)

    def refuse_waiting(self) -> None:
        """The lease may be over: if it is, the calls behind the first one have not begun and never will. What became of the first its agent says."""
        if not self._is_conversing or len(self._pending) < 2:
            return
        try:
            self._job.routes.route(self._tenant, self._lease_id)
        except SandboxLost:
            pass  # not the end of the lease alone: the agent, or the pool, says what became of each call
        except LeaseLost as over:
            first, asked, since, started_at = self._pending.popleft(), self._asked, self._since, self._started_at
            for place, call, _ in self._drain():
                self._finish(place, call, timed(refusal(call, over), self._job.clock), None)
            self._pending.append(first)
            self._asked, self._since, self._started_at = min(asked, 1), since, started_at
        except PoolServiceError:
            pass  # the lease holds, and its agent cannot be reached now

    async def _next_event(self, stream: AgentStream, route: SlotLocation, sent_at: float) -> wire.Item | wire.Data | wire.Ended | None:
        """What the agent says next; None: it has ended the exchange.

        An agent that stands still is given up soon after the deadline of the first pending call. One that answers is only late, be it that this
        process was busy: it is waited for, as what it says of the call is worth more than that nothing is known.

        Raises:
            AgentSilent: the deadline of the call has passed, and the agent gives no sign of life.
            TimeoutError: it gives signs of life, but does not say how the call ended.
        """
        deadline = self._since + self._timeout_s(self._pending[0][1])
        try:
            return await self._event_until(deadline + PING_AFTER_S, stream)
        except TimeoutError:
            if not await route.agent.link.answers_ping(PING_WITHIN_S):
                raise AgentSilent(PING_WITHIN_S) from None
        # A call that was sent again over another link may have begun only then.
        return await self._event_until(deadline + max(0.0, sent_at - self._since) + REPLY_GRACE_S, stream)

    async def _event_until(self, deadline: float, stream: AgentStream) -> wire.Item | wire.Data | wire.Ended | None:
        async with asyncio.timeout(deadline - self._job.clock.monotonic()):
            return await anext(stream, None)

    def _timeout_s(self, call: ToolCall) -> float:
        return call.timeout_s if call.timeout_s is not None else self._default_timeout_s

    async def _answered(self, item: wire.Item, route: SlotLocation) -> None:
        place, call = self._pending[0]
        result = agent_result(call, item.meta, item.body)
        if item.meta.get("call_id") != call.call_id:
            result = own_result(call, Reason.BACKEND_ERROR, "the agent answered another call than the one asked", may_have_run=True)
        result = await self._job.outputs.complete(timed(result, self._job.clock), item.meta, route)
        result = await self._job.outputs.within(result, self._batch.reservation)
        await record(self._job.result_store, call, result)
        if result.output_file is not None:
            result = self._one_file(call, result)
        self._pending.popleft()
        self._asked -= 1
        self._lost_since = None
        self._finish(place, call, result, route)
        if self._asked and waiting_output(item.meta) is not None and result.output_file is None:
            raise _AskAgain  # its agent waits for the output to be fetched before it goes on with the next call of that stream

    def _one_file(self, call: ToolCall, result: Result) -> Result:
        """The result with the file that is on record: another request may have fetched the same output meanwhile, and a lease that is over has no record."""
        recorded_result = self._job.result_store.recorded_result(call.lease_id, call.call_id)
        on_record = recorded_result.result.output_file if recorded_result is not None else None
        if on_record is result.output_file:
            return result
        self._job.outputs.only_for_now(result)
        return replace(result, output_file=on_record or result.output_file)

    def _finish(self, place: int, call: ToolCall, result: Result, route: SlotLocation | None) -> None:
        now = self._job.clock.monotonic()
        if result.reason is Reason.BACKEND_ERROR and result.metadata.get("may_have_run") is not False:
            self._job.unknown_outcomes.add(self._lease_id)
        if self._turn == call.call_id:
            self._give_turn_back()
        self._batch.reservation.settle(call, result)
        self._job.observe(self._tenant, route, call, result, now - self._since - result.duration_s)
        self._since, self._started_at = now, self._job.clock.wall()
        self._batch.deliver(place, timed(result, self._job.clock))

    async def _unreachable(self, why: str) -> None:
        """Wait until the pool knows what that means; the calls are told if it is the end. Else they are asked again: by the agent's journal
        that joins what still runs, and runs nothing twice.
        """
        now = self._job.clock.monotonic()
        if self._lost_since is None:
            self._lost_since = now
            log.warning("the agent of a call cannot be reached", extra={"lease_id": self._lease_id, "detail": why})
        else:
            await asyncio.sleep(AGAIN_AFTER_S)
        deadline = self._since + self._timeout_s(self._pending[0][1])
        left_s = min(self._lost_since + LOST_WAIT_S, deadline + PING_AFTER_S + PING_WITHIN_S) - now
        if left_s <= 0:
            self._give_up(f"the agent cannot be reached: {why}")
            return
        lost = await self._job.routes.wait_for_reconnect_or_loss(self._lease_id, left_s)
        if lost is not None:
            await self._refuse(lost)

    async def _refused(self, refused: AgentRefused) -> None:
        if refused.code == "not_implemented":
            for place, call, _ in self._drain():
                self._finish(place, call, own_result(call, Reason.NOT_IMPLEMENTED, refused.detail), None)
            return
        # The slot has moved on or broken: the pool may know more.
        try:
            self._job.routes.route(self._tenant, self._lease_id)
        except (LeaseNotFound, LeaseLost) as error:
            await self._refuse(error)
        else:
            self._give_up(f"the agent refused: {refused.detail}")

    async def _refuse(self, error: PoolServiceError) -> None:
        for place, call, asked in self._drain():
            result = recorded(self._job.result_store, call) if isinstance(error, SandboxLost) else None
            if result is not None:
                result = await self._within(result)
            else:
                result = self._stamped(call, refusal(call, error), asked=asked)
                if result.reason is Reason.SANDBOX_LOST:
                    self._job.result_store.record_result(call.lease_id, call.call_id, identity_of(call), result)
            self._finish(place, call, result, None)

    def _give_up(self, why: str, count: int | None = None) -> None:
        """No more is to be learnt of the pending calls, or of so many of them."""
        drained = self._drain(count)
        # First of all of them: that one may have run does not say that those behind it did.
        results = [self._stamped(call, own_result(call, Reason.BACKEND_ERROR, why), asked=asked) for _, call, asked in drained]
        for (place, call, _), result in zip(drained, results, strict=True):
            self._finish(place, call, result, None)

    def _stamped(self, call: ToolCall, result: Result, *, asked: bool) -> Result:
        """A result of the service's own with what can be known of the time: since when the call may have run, and whether it may have run at all."""
        said: dict[str, object] = {}
        if result.reason in (Reason.SANDBOX_LOST, Reason.BACKEND_ERROR):
            said["may_have_run"] = asked or self._job.unknown_outcomes.about(self._lease_id) or self._job.in_flight_calls.has_twin(call)
        if self._stopping:
            said["stopping"] = True
        result = replace(result, metadata={**result.metadata, **said})
        if not asked:
            return timed(result, self._job.clock)
        return replace(result, started_at=self._started_at, duration_s=self._job.clock.monotonic() - self._since)

    def _drain(self, count: int | None = None) -> list[tuple[int, ToolCall, bool]]:
        """The pending calls, or so many of them, pending no more, each with whether its agent has been asked."""
        drained = [(place, call, index < self._asked) for index, (place, call) in enumerate(itertools.islice(self._pending, count))]
        for _ in drained:
            self._pending.popleft()
        self._asked = max(0, self._asked - len(drained))
        return drained


def timed(result: Result, clock: Clock) -> Result:
    """The result with the time at which it was refused, where it never began and so has none."""
    return result if result.started_at else replace(result, started_at=clock.wall())


async def record(result_store: ResultStore, call: ToolCall, result: Result) -> None:
    """Put a result on record, if it is one that is recorded."""
    if result.reason in NOT_RECORDED:
        return
    result_store.record_result(call.lease_id, call.call_id, identity_of(call), result)
    try:
        await result_store.flush()
    except StorageUnavailable:
        # The agent's journal still has it: the caller hears the truth now, and asking again finds it there.
        log.exception("a verdict could not be stored", extra={"lease_id": call.lease_id, "call_id": call.call_id})


def recorded(result_store: ResultStore, call: ToolCall) -> Result | None:
    """The recorded result of a call asked for again, or the conflict with it; None if there is no record."""
    recorded_result = result_store.recorded_result(call.lease_id, call.call_id)
    if recorded_result is None:
        return None
    if recorded_result.identity != identity_of(call):
        return own_result(call, Reason.CALL_CONFLICT, f"call_id {call.call_id} was used before with another tool or other arguments")
    return recorded_result.result


def _call_meta(call: ToolCall, timeout_s: float) -> dict[str, object]:
    return {
        "call_id": call.call_id,
        "tool": call.tool,
        "args": call.args,
        "timeout_s": timeout_s,
        "no_output_timeout_s": call.no_output_timeout_s,
        "output_limit_bytes": call.output_limit_bytes,
        "separate_streams": call.separate_streams,
        "encoding": call.encoding,
    }
