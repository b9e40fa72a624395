"""The calls of a tenant with `max_running_calls`: those beyond the limit wait for a permit, and behave like other calls otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from sandbox_server.core.errors import CallNotFound, LeaseLost, QuotaExceeded
from sandbox_server.core.execution import Fault, Reason, Result
from sandbox_server.dispatch.batch import Batch
from sandbox_server.dispatch.call_admission import CallLimits
from sandbox_server.dispatch.dispatcher import Dispatcher
from sandbox_server.dispatch.limits.concurrency import ConcurrencyLimiter
from sandbox_server.dispatch.runner.decisions import CallTimings
from tests.unit.dispatch.conftest import DispatchHarness, call


@pytest.fixture
def limited(harness: DispatchHarness) -> DispatchHarness:
    """Alice may run one call at a time."""
    return limit_calls(harness)


def limit_calls(harness: DispatchHarness, timings: CallTimings | None = None) -> DispatchHarness:
    """Let alice run one call at a time."""
    most: Callable[[str], int | None] = {"alice": 1}.get
    limits, limiter = CallLimits(in_flight=100), ConcurrencyLimiter(most)
    harness.dispatcher = Dispatcher(harness.slot_locator, harness.store, harness.clock, harness.telemetry, limits, concurrency_limiter=limiter, timings=timings)
    return harness


async def settled() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


def ran(harness: DispatchHarness) -> list[str]:
    return [call_id for call_id, _ in harness.agent.ran]


async def hung(harness: DispatchHarness, lease_id: str = "a", call_id: str = "hung") -> Batch:
    """A call that runs until it is ended."""
    batch = harness.dispatcher.start_calls("alice", [call(lease_id, "hang", call_id)])
    await harness.until_running()
    return batch


async def test_so_many_run_at_once_and_all_of_a_batch_come_to_a_result(limited: DispatchHarness) -> None:
    batch = limited.dispatcher.start_calls("alice", [call(lease_id, "live", lease_id) for lease_id in "abc"])
    for index, name in enumerate("abc"):
        await limited.until_running(index + 1)
        await settled()
        assert ran(limited) == list("abc")[: index + 1]
        limited.agent.finish(name)

    assert [(result.call_id, result.reason) for result in await batch.all_results()] == [(name, Reason.EXIT) for name in "abc"]


async def test_leases_take_turns_and_calls_of_one_lease_keep_their_order(limited: DispatchHarness) -> None:
    calls = [call("a", "true", "a1"), call("a", "true", "a2"), call("a", "true", "a3"), call("b", "true", "b1"), call("b", "true", "b2")]

    results = await limited.dispatcher.start_calls("alice", calls).all_results()

    assert ran(limited) == ["a1", "b1", "a2", "b2", "a3"]
    assert [result.call_id for result in results] == ["a1", "a2", "a3", "b1", "b2"]


async def test_waiting_costs_a_call_none_of_its_time(harness: DispatchHarness) -> None:
    limited = limit_calls(harness, CallTimings(ping_after_s=0.0, result_grace_s=0.0))
    first = limited.dispatcher.start_calls("alice", [call("a", "live", "first", timeout_s=5.0)])
    await limited.until_running()
    second = limited.dispatcher.start_calls("alice", [call("b", "live", "second", timeout_s=0.2)])
    began = asyncio.get_running_loop().time()
    while asyncio.get_running_loop().time() < began + 0.3:
        await asyncio.sleep(0.01)  # longer than the second may take once it runs: it is time itself that must pass

    limited.agent.finish("first")
    await limited.until_running(2)
    limited.agent.finish("second")

    assert [result.reason for batch in (first, second) for result in await batch.all_results()] == [Reason.EXIT, Reason.EXIT]


async def test_waiting_is_none_of_the_services_own_work(limited: DispatchHarness) -> None:
    batch = await hung(limited)
    second = limited.dispatcher.start_calls("alice", [call("b", "true")])
    await settled()
    limited.clock.pass_time(100.0)

    await limited.dispatcher.cancel_call("alice", "a", "hung")
    await batch.all_results()
    await second.all_results()

    overhead_s = limited.telemetry.value("sandbox_exec_overhead_seconds_sum")
    assert overhead_s == pytest.approx(100.0 - 0.25)  # the hung one's: the agent says that it ran for 0.25 s


async def test_a_lease_is_held_by_a_call_that_waits_as_by_one_that_runs(limited: DispatchHarness) -> None:
    await hung(limited)
    batch = limited.dispatcher.start_calls("alice", [call("b", "true")])
    await settled()
    assert limited.slot_locator.running == {"a": 1, "b": 1}

    await limited.dispatcher.cancel_call("alice", "a", "hung")
    await batch.all_results()

    assert limited.slot_locator.running == {"a": 0, "b": 0}


async def test_what_only_joins_or_repeats_waits_for_nobody_and_is_let_in(limited: DispatchHarness) -> None:
    (done,) = await limited.dispatcher.start_calls("alice", [call("a", "echo 1", "done")]).all_results()
    first = await hung(limited, "b")
    waiting = limited.dispatcher.start_calls("alice", [call("c", "true", "waiting")])
    await settled()
    with pytest.raises(QuotaExceeded):
        limited.dispatcher.start_calls("alice", [call("a", "true", "new")])

    (again,) = await limited.dispatcher.start_calls("alice", [call("a", "echo 1", "done")]).all_results()
    joined = limited.dispatcher.start_calls("alice", [call("b", "hang", "hung"), call("a", "echo 1", "done"), call("c", "true", "waiting")])
    await settled()
    assert ran(limited) == ["done", "hung"], "who asks again takes no turn of another's"
    cancelled = await limited.dispatcher.cancel_call("alice", "b", "hung")

    assert again == done
    assert [result.call_id for result in await joined.all_results()] == ["hung", "done", "waiting"]
    assert (await first.all_results())[0] == (await joined.all_results())[0] == cancelled
    assert (await waiting.all_results())[0] == (await joined.all_results())[2]
    assert ran(limited) == ["done", "hung", "waiting"]


async def test_a_repeated_result_comes_in_the_encoding_that_is_asked_for_now(limited: DispatchHarness) -> None:
    (first,) = await limited.dispatcher.start_calls("alice", [call("a", "bytes")]).all_results()

    (again,) = await limited.dispatcher.start_calls("alice", [call("a", "bytes", encoding="base64")]).all_results()

    assert (again.output, first.encoding, again.encoding) == (first.output, "utf-8", "base64")


async def test_a_request_that_comes_when_enough_wait_is_refused_as_a_whole_until_they_run(limited: DispatchHarness) -> None:
    first = await hung(limited)
    limited.dispatcher.start_calls("alice", [call("b", "live", "b"), call("c", "live", "c")])
    await settled()

    with pytest.raises(QuotaExceeded, match="1 calls of this tenant run and 2 wait"):
        await limited.dispatcher.run_call("alice", call("a", "true", "refused"))
    await limited.dispatcher.cancel_call("alice", "a", "hung")
    await first.all_results()
    await limited.until_running(2)
    limited.agent.finish("b")
    await limited.until_running(3)

    let_in = limited.dispatcher.start_calls("alice", [call("a", "true", "let-in")])
    limited.agent.finish("c")
    assert (await let_in.all_results())[0].success
    assert "refused" not in ran(limited)


async def test_a_call_that_is_cancelled_before_its_turn_never_runs(limited: DispatchHarness) -> None:
    first = await hung(limited)
    batch = limited.dispatcher.start_calls("alice", [call("b", "echo 1", "b1"), call("b", "echo 2", "b2")])
    await settled()

    told = [await limited.dispatcher.cancel_call("alice", "b", name) for name in ("b1", "b2")]
    again = await limited.dispatcher.run_call("alice", call("b", "echo 1", "b1"))
    await limited.dispatcher.cancel_call("alice", "a", "hung")
    await first.all_results()

    assert await batch.all_results() == told
    assert again == told[0]
    assert (told[0].reason, told[0].fault, told[0].started_at, told[0].duration_s) == (Reason.CANCELLED, Fault.NONE, limited.clock.wall(), 0.0)
    assert ran(limited) == ["hung"]
    with pytest.raises(CallNotFound):
        await limited.dispatcher.cancel_call("alice", "b", "b3")


async def test_calls_of_a_lease_that_ended_wait_no_longer(limited: DispatchHarness) -> None:
    await hung(limited)
    batch = limited.dispatcher.start_calls("alice", [call("b", "true", "b1"), call("b", "true", "b2")])
    await settled()

    limited.slot_locator.errors["b"] = LeaseLost("it was released")
    limited.dispatcher.concurrency_limiter.wake_waiters_of_lease("b")

    assert [(result.reason, result.error) for result in await batch.all_results()] == [(Reason.LEASE_LOST, "it was released")] * 2
    limited.dispatcher.concurrency_limiter.check_queue_room("alice")


async def test_a_link_that_breaks_takes_nobodys_turn(limited: DispatchHarness) -> None:
    first = await hung(limited)
    second = limited.dispatcher.start_calls("alice", [call("b", "true", "second")])
    await settled()
    limited.slot_locator.reconnect = await limited.link()
    limited.agent._peers[0].close()
    while sum(request["op"] == "calls" for request in limited.agent.requests) < 2:
        await asyncio.sleep(0)
    await settled()
    assert ran(limited) == ["hung"]

    await limited.dispatcher.cancel_call("alice", "a", "hung")

    assert [result.reason for batch in (first, second) for result in await batch.all_results()] == [Reason.CANCELLED, Reason.EXIT]


async def test_when_the_service_stops_what_waited_cannot_have_run(limited: DispatchHarness) -> None:
    first = await hung(limited)
    second = limited.dispatcher.start_calls("alice", [call("b", "true", "b1"), call("b", "true", "b2")])
    await settled()

    await limited.dispatcher.end_all_calls()

    found: list[Result] = [*await first.all_results(), *await second.all_results()]
    assert [(result.reason, result.metadata["may_have_run"]) for result in found] == [
        (Reason.BACKEND_ERROR, True),
        (Reason.BACKEND_ERROR, False),
        (Reason.BACKEND_ERROR, False),
    ]
    assert not limited.dispatcher.concurrency_limiter._calls_by_tenant


async def test_a_call_that_fails_to_end_does_not_keep_its_turn(limited: DispatchHarness) -> None:
    found = await limited.dispatcher.start_calls(
        "alice", [call("a", "nonsense", "a1"), call("a", "refuse internal", "a2"), call("b", "true", "b1")]
    ).all_results()

    assert [result.reason for result in found] == [Reason.BACKEND_ERROR, Reason.BACKEND_ERROR, Reason.EXIT]
    assert not limited.dispatcher.concurrency_limiter._calls_by_tenant


async def test_a_bug_does_not_keep_a_turn_either(limited: DispatchHarness, caplog: pytest.LogCaptureFixture) -> None:
    limited.slot_locator.locations["a"] = None  # type: ignore[assignment]

    broken, whole = await limited.dispatcher.start_calls("alice", [call("a", "true"), call("b", "true")]).all_results()

    assert (broken.reason, whole.reason) == (Reason.BACKEND_ERROR, Reason.EXIT)
    assert "calls failed" in caplog.text
    assert not limited.dispatcher.concurrency_limiter._calls_by_tenant
