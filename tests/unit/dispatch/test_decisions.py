"""What a runner decides after an error, and the queue that it decides about."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_server.core.errors import BackendUnavailable, LeaseLost, PoolServiceError, SandboxLost, StorageUnavailable
from sandbox_server.core.execution import Reason, Result
from sandbox_server.dispatch.results import agent_result
from sandbox_server.dispatch.runner.call_queue import CallQueue, PoppedCall, QueuedCall
from sandbox_server.dispatch.runner.decisions import (
    CallTimings,
    EndCalls,
    RunnerState,
    WaitForLink,
    decide_after_end_of_stream,
    decide_after_error,
    is_stream_blocked,
    with_end_times,
)
from sandbox_server.link.call_messages import read_result_message
from sandbox_server.link.errors import AgentSilent, LinkError, LinkLost, agent_refusal
from tests.unit.dispatch.conftest import call

TIMINGS = CallTimings()


def state(now: float = 100.0, sent_count: int = 2, first_deadline: float = 130.0, link_lost_at: float | None = None) -> RunnerState:
    return RunnerState(now=now, sent_count=sent_count, first_deadline=first_deadline, link_lost_at=link_lost_at)


@pytest.mark.parametrize("error", [LinkLost("it was cut"), BackendUnavailable("it was cut")])
def test_a_lost_link_is_waited_for_at_once_and_then_with_a_delay(error: LinkError | PoolServiceError) -> None:
    first = decide_after_error(error, state(), None, TIMINGS)
    second = decide_after_error(error, state(now=110.0, link_lost_at=100.0), None, TIMINGS)

    assert first == WaitForLink(delay_s=0.0, wait_s=15.0, problem="it was cut")
    assert second == WaitForLink(delay_s=0.1, wait_s=5.0, problem="it was cut")


def test_a_lost_link_is_not_waited_for_beyond_the_time_of_the_first_call() -> None:
    soon = decide_after_error(LinkLost("it was cut"), state(first_deadline=97.0), None, TIMINGS)
    over = decide_after_error(LinkLost("it was cut"), state(first_deadline=95.0), None, TIMINGS)

    assert soon == WaitForLink(delay_s=0.0, wait_s=1.5, problem="it was cut")
    assert over == EndCalls(problem="the agent cannot be reached: it was cut")


def test_a_link_that_stays_lost_ends_the_calls() -> None:
    assert decide_after_error(LinkLost("x"), state(now=115.0, link_lost_at=100.0), None, TIMINGS) == EndCalls(problem="the agent cannot be reached: x")


def test_what_the_agent_does_not_support_has_not_run() -> None:
    decision = decide_after_error(agent_refusal({"code": "not_implemented", "detail": "no such tool"}), state(), None, TIMINGS)

    assert decision == EndCalls(reason=Reason.NOT_IMPLEMENTED, problem="no such tool", is_refused=True)


@pytest.mark.parametrize("code", ["stale_epoch", "unknown_slot", "slot_unavailable", "invalid", "internal", "something else"])
def test_a_refusal_ends_the_calls_with_the_end_of_the_lease_where_there_is_one(code: str) -> None:
    refused, ended = agent_refusal({"code": code, "detail": "no"}), LeaseLost("it was released")

    decision = decide_after_error(refused, state(), ended, TIMINGS)
    assert isinstance(decision, EndCalls)
    assert decision.result_for(call("a", "true")).reason is Reason.LEASE_LOST


@pytest.mark.parametrize("code", ["invalid", "internal", "something else"])
def test_a_refusal_ends_the_calls_of_a_held_lease(code: str) -> None:
    refused = agent_refusal({"code": code, "detail": "no"})

    assert decide_after_error(refused, state(), None, TIMINGS) == EndCalls(problem="the agent refused: no")


@pytest.mark.parametrize("code", ["stale_epoch", "unknown_slot", "slot_unavailable"])
def test_where_the_slot_of_a_held_lease_is_refused_the_pool_gets_time_to_find_out_why(code: str) -> None:
    refused = agent_refusal({"code": code, "detail": "no"})

    assert decide_after_error(refused, state(now=100.0), None, TIMINGS) == WaitForLink(delay_s=0.1, wait_s=5.0, problem="the agent refused: no")
    assert decide_after_error(refused, state(now=105.0, link_lost_at=100.0), None, TIMINGS) == EndCalls(problem="the agent refused: no")


@pytest.mark.parametrize(("error", "reason"), [(SandboxLost("gone"), Reason.SANDBOX_LOST), (StorageUnavailable("full"), Reason.BACKEND_ERROR)])
def test_an_error_of_the_pool_ends_the_calls(error: PoolServiceError, reason: Reason) -> None:
    decision = decide_after_error(error, state(), None, TIMINGS)

    assert isinstance(decision, EndCalls)
    assert (decision.count, decision.result_for(call("a", "true")).reason) == (None, reason)


def test_a_late_agent_costs_the_calls_that_were_sent_and_a_silent_one_all() -> None:
    late, nothing_sent = (decide_after_error(TimeoutError(), state(sent_count=count), None, TIMINGS) for count in (2, 0))
    silent = decide_after_error(AgentSilent(2.0), state(), None, TIMINGS)

    assert isinstance(late, EndCalls)
    assert isinstance(nothing_sent, EndCalls)
    assert isinstance(silent, EndCalls)
    assert (late.count, nothing_sent.count, silent.count) == (2, 1, None)
    assert decide_after_end_of_stream(state()) == EndCalls(problem="the agent ended the stream without a result", count=2)


@pytest.mark.parametrize(("waits", "sent_count", "is_blocked"), [(True, 1, True), (True, 0, False), (False, 1, False)])
def test_an_output_that_nobody_fetched_blocks_the_calls_behind_it(waits: bool, sent_count: int, is_blocked: bool) -> None:
    message = read_result_message({"reason": "exit", "exit_code": 0, "lens": [5], "output_waits": waits}, b"" if waits else b"hello")
    result = agent_result(call("a", "true"), message)

    assert is_stream_blocked(message, result, sent_count) is is_blocked


@pytest.mark.parametrize("reason", list(Reason))
def test_only_a_lost_or_failed_call_says_whether_it_may_have_run(reason: Reason) -> None:
    result: Result = with_end_times(
        EndCalls(reason=reason, problem="x").result_for(call("a", "true")), may_have_run=True, is_stopping=False, started_at=5.0, duration_s=2.0
    )

    assert (result.started_at, result.duration_s) == (5.0, 2.0)
    assert ("may_have_run" in result.metadata) is (reason in (Reason.SANDBOX_LOST, Reason.BACKEND_ERROR))
    assert "stopping" not in result.metadata


def queue_of(count: int, sent_count: int) -> CallQueue:
    queue = CallQueue((index, call("a", "true", f"c{index}")) for index in range(count))
    queue.sent_count = sent_count
    return queue


def test_calls_leave_the_queue_with_whether_they_were_sent() -> None:
    queue = queue_of(4, 2)

    assert [(popped.item_index, popped.was_sent) for popped in queue.pop_calls(3)] == [(0, True), (1, True), (2, False)]
    assert (len(queue), queue.sent_count, queue.first_call.call_id) == (1, 0, "c3")


def test_the_first_call_stays_when_those_behind_it_end() -> None:
    queue = queue_of(4, 3)

    assert [(popped.item_index, popped.was_sent) for popped in queue.pop_all_but_first()] == [(1, True), (2, True), (3, False)]
    assert (len(queue), queue.sent_count) == (1, 1)
    assert queue.pop_first() == QueuedCall(0, call("a", "true", "c0"))
    assert (len(queue), queue.sent_count) == (0, 0)


@given(count=st.integers(1, 6), sent_count=st.integers(0, 6), removed=st.integers(0, 5))
def test_the_number_of_sent_calls_follows_every_removal(count: int, sent_count: int, removed: int) -> None:
    sent_count, removed = min(sent_count, count), removed % count
    queue = queue_of(count, sent_count)
    queued = queue.queued_calls(unsent_only=False)

    queue.remove_call(queued[removed])

    expected = [PoppedCall(*item, item.item_index < sent_count) for item in queued if item.item_index != removed]
    assert queue.pop_calls() == expected
