"""What to do with the calls of a lease when something other than a result arrives. Plain functions from a frozen state to a decision; no I/O."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sandbox_server.core.errors import BackendUnavailable, PoolServiceError
from sandbox_server.core.execution import Reason, Result, ToolCall
from sandbox_server.dispatch.agent_errors import LOST_LINK_WAIT_S
from sandbox_server.dispatch.results import lease_error_result, service_result
from sandbox_server.link.call_messages import ResultMessage
from sandbox_server.link.errors import AgentRefused, AgentSilent, LinkError, LinkLost, NotSupportedByAgent, SlotUnavailable


@dataclass(frozen=True, kw_only=True, slots=True)
class CallTimings:
    """How long agents may take, in seconds. `ping_after_s` and `ping_within_s` together are less than the 5 s in which every call has its result.

    Args:
        ping_after_s: how long after the deadline of a call its agent is pinged, if the result has not arrived. The agent reports it within 3 s.
        ping_within_s: how long the agent may take to respond to the ping.
        result_grace_s: how long after the deadline of a call an agent that responds to pings may take to report the result.
        lost_wait_s: how long to wait for the pool to find out what became of a sandbox whose link was lost.
        retry_delay_s: how long to wait before an agent that could not be reached twice, or that refused a slot, is tried again.
        refused_slot_wait_s: how long to wait for the pool to find out why an agent refuses the slot of a held lease: the slot has broken, or the
            agent ends, and the pool has not heard of it yet.
    """

    ping_after_s: float = 2.5
    ping_within_s: float = 2.0
    result_grace_s: float = 20.0
    lost_wait_s: float = LOST_LINK_WAIT_S
    retry_delay_s: float = 0.1
    refused_slot_wait_s: float = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerState:
    """What a decision depends on. Times are monotonic, in seconds.

    Args:
        now: the time.
        sent_count: how many calls of the queue have been sent.
        first_deadline: when the first call of the queue must have ended.
        link_lost_at: when the link was lost; None where it was not lost since the last result.
    """

    now: float
    sent_count: int
    first_deadline: float
    link_lost_at: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SendCalls:
    """Send the calls that are still in the queue. The agent's journal joins those that still run, and runs none of them twice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitForLink:
    """Wait until the pool knows whether the sandbox is lost; send the calls again where it is not.

    Args:
        delay_s: how long to wait before the pool is asked, in seconds.
        wait_s: how long to wait for the pool, in seconds.
        problem: why the agent cannot be reached.
    """

    delay_s: float
    wait_s: float
    problem: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EndCalls:
    """End calls of the queue without a result from the agent.

    Args:
        reason: the reason of their results.
        problem: why they end.
        count: how many calls end, from the first; None for all of them.
        error: why their lease has no slot, where that is why they end; it then decides the reason.
        is_refused: whether it is certain that none of them ran, because the agent refused them.
    """

    reason: Reason = Reason.BACKEND_ERROR
    problem: str
    count: int | None = None
    error: PoolServiceError | None = None
    is_refused: bool = False

    def result_for(self, call: ToolCall) -> Result:
        """The result of a call that ends like this, without times."""
        return service_result(call, self.reason, self.problem) if self.error is None else lease_error_result(call, self.error)


Decision = SendCalls | WaitForLink | EndCalls


def decide_after_error(
    error: LinkError | PoolServiceError | TimeoutError, state: RunnerState, lease_error: PoolServiceError | None, timings: CallTimings
) -> Decision:
    """Decide what to do after an error.

    Args:
        error: what the link, the pool or the wait for a result raised.
        state: the state of the runner.
        lease_error: why the lease does not hold, as the pool says after a refusal; None where it holds.
        timings: how long agents may take.
    """
    match error:
        case LinkLost() | BackendUnavailable():
            return _decide_after_lost_link(str(error), state, timings)
        case NotSupportedByAgent():
            return EndCalls(reason=Reason.NOT_IMPLEMENTED, problem=error.detail, is_refused=True)
        case SlotUnavailable() if lease_error is None:
            return _decide_after_refused_slot(f"the agent refused: {error.detail}", state, timings)
        case AgentRefused():
            return EndCalls(problem=f"the agent refused: {error.detail}", error=lease_error)
        case PoolServiceError():
            return EndCalls(problem=error.detail, error=error)
        case TimeoutError():
            problem = f"the agent did not report the result within {timings.result_grace_s:g} s of the deadline of the call"
            return EndCalls(problem=problem, count=max(1, state.sent_count))
        case AgentSilent():
            # The calls behind the first one end, too: what is sent now could overtake the first one inside the agent.
            return EndCalls(problem=f"the outcome of the call is unknown: {error}; send the same call_id again")
    raise error


def _decide_after_lost_link(problem: str, state: RunnerState, timings: CallTimings) -> Decision:
    is_first = state.link_lost_at is None
    lost_at = state.now if state.link_lost_at is None else state.link_lost_at
    latest_result_at = state.first_deadline + timings.ping_after_s + timings.ping_within_s
    delay_s = 0.0 if is_first else timings.retry_delay_s
    wait_s = min(lost_at + timings.lost_wait_s, latest_result_at) - state.now
    if wait_s <= 0:
        return EndCalls(problem=f"the agent cannot be reached: {problem}")
    return WaitForLink(delay_s=delay_s, wait_s=wait_s, problem=problem)


def _decide_after_refused_slot(problem: str, state: RunnerState, timings: CallTimings) -> Decision:
    refused_at = state.now if state.link_lost_at is None else state.link_lost_at
    wait_s = refused_at + timings.refused_slot_wait_s - state.now
    if wait_s <= 0:
        return EndCalls(problem=problem)
    return WaitForLink(delay_s=timings.retry_delay_s, wait_s=wait_s, problem=problem)


def decide_after_end_of_stream(state: RunnerState) -> Decision:
    """Decide what to do after the agent has ended the stream although results are missing."""
    return EndCalls(problem="the agent ended the stream without a result", count=state.sent_count)


def is_stream_blocked(message: ResultMessage, result: Result, sent_count: int) -> bool:
    """Whether the calls that were sent wait for an output that nobody fetches.

    An agent does not go on with the next call of a stream before it has handed over the output of the last one. Where the output could not be
    fetched, the next calls are sent on another stream.

    Args:
        message: the agent's message about the last call.
        result: the result that was made of it.
        sent_count: how many calls have been sent and have no result.
    """
    return bool(sent_count) and message.waiting_sizes_bytes is not None and result.output_file is None


def with_end_times(result: Result, *, may_have_run: bool, is_stopping: bool, started_at: float, duration_s: float) -> Result:
    """Add to a result that the service gives itself what is known about times, and whether the call may have run.

    Args:
        result: the result.
        may_have_run: whether the call may have run.
        is_stopping: whether the call ends because the service stops.
        started_at: since when the call may have run, in seconds of the wall clock; the current time where it cannot have.
        duration_s: for how long the call may have run, in seconds.
    """
    known: dict[str, object] = {}
    if result.reason in (Reason.SANDBOX_LOST, Reason.BACKEND_ERROR):
        known["may_have_run"] = may_have_run
    if is_stopping:
        known["stopping"] = True
    return replace(result, metadata={**result.metadata, **known}, started_at=started_at, duration_s=duration_s)
