"""The dispatcher: every call gets one result, whatever its agent, its link and its lease do."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from sandbox_server.core.errors import BackendUnavailable, CallNotFound, LeaseLost, LeaseNotFound, QuotaExceeded, SandboxLost
from sandbox_server.core.execution import Fault, Reason, Result
from sandbox_server.dispatch.call_admission import CallLimits
from sandbox_server.dispatch.call_tracker import CallTracker
from sandbox_server.dispatch.dispatcher import Dispatcher
from tests.unit.dispatch.conftest import DispatchHarness, call


async def results(harness: DispatchHarness, *items: object) -> list[Result]:
    return await harness.dispatcher.start_calls("alice", list(items)).all_results()  # type: ignore[arg-type]


async def test_calls_of_one_lease_go_over_one_stream_and_leases_side_by_side(harness: DispatchHarness) -> None:
    found = await results(harness, call("a", "echo 1", "c1"), call("b", "echo 2", "c2"), call("a", "exit 3", "c3"))

    assert [(result.call_id, result.output, result.exit_code) for result in found] == [("c1", b"1\n", 0), ("c2", b"2\n", 0), ("c3", b"", 3)]
    assert [request["slot"] for request in harness.agent.requests if request["op"] == "calls"] == ["0", "1"]


async def test_a_slow_lease_holds_nobody_up(harness: DispatchHarness) -> None:
    batch = harness.dispatcher.start_calls("alice", [call("a", "hang", "slow"), call("b", "echo hi", "quick")])

    fresh = await batch.next_results(5.0)

    assert fresh is not None
    assert [(index, result.call_id) for index, result in fresh] == [(1, "quick")]
    assert await batch.next_results(0.0) == []
    await harness.dispatcher.end_all_calls()


async def test_the_lease_is_told_while_calls_run(harness: DispatchHarness) -> None:
    batch = harness.dispatcher.start_calls("alice", [call("a", "hang")])
    await harness.until_running()
    assert harness.slot_locator.running == {"a": 1}

    await harness.dispatcher.cancel_call("alice", "a", "c")

    assert (await batch.all_results())[0].reason is Reason.CANCELLED
    assert harness.slot_locator.running == {"a": 0}


async def test_what_is_a_result_already_is_passed_through(harness: DispatchHarness) -> None:
    ready = Result(call_id="x", lease_id="a", reason=Reason.INVALID_ARGS, fault=Fault.POLICY)

    passed, ran = await results(harness, ready, call("a", "true"))

    assert passed == replace(ready, started_at=harness.clock.wall())
    assert ran.reason is Reason.EXIT


async def test_a_call_that_was_sent_and_lost_says_since_when_and_that_it_may_have_run(harness: DispatchHarness) -> None:
    batch = harness.dispatcher.start_calls("alice", [call("a", "hang")])
    await harness.until_running()
    harness.clock.pass_time(3.0)
    harness.slot_locator.lost = SandboxLost("it burnt down")
    harness.agent.hang_up()

    (lost,) = await batch.all_results()

    assert (lost.reason, lost.duration_s, lost.started_at) == (Reason.SANDBOX_LOST, 3.0, harness.clock.wall() - 3.0)
    assert (lost.metadata["may_have_run"], lost.metadata["evidence"]) == (True, {"sandbox": "it burnt down"})


async def test_what_never_was_sent_cannot_have_run(harness: DispatchHarness) -> None:
    harness.slot_locator.errors["a"] = SandboxLost("it burnt down")

    (lost,) = await results(harness, call("a", "true"))

    assert (lost.reason, lost.metadata["may_have_run"]) == (Reason.SANDBOX_LOST, False)


async def test_what_an_ending_agent_refused_has_not_run(harness: DispatchHarness) -> None:
    harness.slot_locator.lost = SandboxLost("its agent has ended")

    ran, refused, behind = await results(harness, call("a", "true", "c1"), call("a", "refuse slot_unavailable", "c2"), call("a", "true", "c3"))

    assert ran.reason is Reason.EXIT
    for lost in (refused, behind):
        assert (lost.reason, lost.duration_s, lost.metadata["may_have_run"]) == (Reason.SANDBOX_LOST, 0.0, False)


async def test_an_agent_that_shuts_down_is_sent_no_call_again(harness: DispatchHarness) -> None:
    harness.slot_locator.while_waiting = lambda: harness.slot_locator.errors.update(a=SandboxLost("its agent has ended"))
    batch = harness.dispatcher.start_calls("alice", [call("a", "refuse agent_ends")])
    while not harness.agent.ran:
        await asyncio.sleep(0)
    await asyncio.sleep(0.3)  # three times as long as the pause before a call that was refused is sent again
    harness.agent.hang_up()

    (lost,) = await batch.all_results()

    assert (lost.reason, lost.metadata["may_have_run"]) == (Reason.SANDBOX_LOST, False)
    assert len(harness.agent.ran) == 1


async def test_what_was_sent_over_a_lost_link_may_have_run_although_the_next_link_refuses_it(harness: DispatchHarness) -> None:
    batch = harness.dispatcher.start_calls("alice", [call("a", "hang", "c1"), call("a", "true", "c2")])
    await harness.until_running()
    harness.slot_locator.reconnect = await harness.link()
    harness.agent.slots["0"].epoch = 2  # so the agent refuses what is sent from now on
    harness.agent._peers[0].close()
    while sum(request["op"] == "calls" for request in harness.agent.requests) < 2:
        await asyncio.sleep(0)
    harness.slot_locator.lost = SandboxLost("its agent has ended")

    found = await batch.all_results()

    assert [(lost.reason, lost.metadata["may_have_run"]) for lost in found] == [(Reason.SANDBOX_LOST, True)] * 2


async def test_a_call_of_an_earlier_life_may_have_run(harness: DispatchHarness) -> None:
    dispatcher = Dispatcher(harness.slot_locator, harness.store, harness.clock, harness.telemetry, CallLimits(), CallTracker(["a"]))
    for lease_id in "ab":
        harness.slot_locator.errors[lease_id] = SandboxLost("it burnt down")

    earlier, new = await dispatcher.start_calls("alice", [call("a", "true"), call("b", "true")]).all_results()

    assert (earlier.metadata["may_have_run"], new.metadata["may_have_run"]) == (True, False)


async def test_a_call_that_was_sent_and_never_answered_may_have_run_also_when_it_is_asked_for_again(harness: DispatchHarness) -> None:
    (unknown,) = await results(harness, call("a", "nonsense"))
    harness.slot_locator.errors["a"] = SandboxLost("it burnt down")

    (again,) = await results(harness, call("a", "nonsense"))

    assert (unknown.reason, again.reason, again.metadata["may_have_run"]) == (Reason.BACKEND_ERROR, Reason.SANDBOX_LOST, True)


async def test_a_call_that_runs_for_somebody_else_may_have_run(harness: DispatchHarness) -> None:
    first = harness.dispatcher.start_calls("alice", [call("a", "hang")])
    await harness.until_running()
    harness.slot_locator.errors["a"] = SandboxLost("it burnt down")

    (second,) = await results(harness, call("a", "hang"))

    assert (second.reason, second.metadata["may_have_run"]) == (Reason.SANDBOX_LOST, True)
    await harness.dispatcher.end_all_calls()
    await first.all_results()


def test_beyond_its_limit_every_lease_is_uncertain() -> None:
    some = CallTracker(["a"], max_uncertain_leases=2)
    some.add_unknown_outcome("b")
    assert [some.has_unknown_outcome(name) for name in "abc"] == [True, True, False]
    some.add_unknown_outcome("c")
    assert some.has_unknown_outcome("z")


@pytest.mark.parametrize(
    ("error", "reason", "fault"),
    [
        (LeaseLost("it was released"), Reason.LEASE_LOST, Fault.AMBIGUOUS),
        (SandboxLost("it burnt down"), Reason.SANDBOX_LOST, Fault.INFRA),
    ],
)
async def test_a_lease_without_a_slot_says_why(harness: DispatchHarness, error: LeaseLost, reason: Reason, fault: Fault) -> None:
    harness.slot_locator.errors["a"] = error

    lost, kept = await results(harness, call("a", "true"), call("b", "true"))

    assert (lost.reason, lost.fault, lost.error, lost.exit_code) == (reason, fault, error.detail, None)
    assert kept.success


async def test_a_single_call_under_a_lost_lease_is_an_error(harness: DispatchHarness) -> None:
    harness.slot_locator.errors["a"] = LeaseLost("it was released")

    with pytest.raises(LeaseLost):
        await harness.dispatcher.run_call("alice", call("a", "true"))
    with pytest.raises(LeaseNotFound):
        await harness.dispatcher.run_call("bob", call("b", "true"))


async def test_more_than_the_pools_max_timeout_is_refused_by_name(harness: DispatchHarness) -> None:
    long, short = await results(harness, call("a", "true", "c1", timeout_s=601.0), call("a", "true", "c2", timeout_s=600.0))

    assert (long.reason, long.fault, short.reason) == (Reason.INVALID_ARGS, Fault.INFRA, Reason.EXIT)
    assert long.metadata["evidence"]["field"] == "timeout_s"
    assert "timeout_s" in long.error


async def test_an_unknown_reason_of_the_agents_is_a_backend_error(harness: DispatchHarness) -> None:
    (result,) = await results(harness, call("a", "nonsense"))

    assert (result.reason, result.fault, result.metadata["may_have_run"]) == (Reason.BACKEND_ERROR, Fault.INFRA, True)
    assert harness.store.find_result("a", "c") is None


@pytest.mark.parametrize(("code", "reason"), [("internal", Reason.BACKEND_ERROR), ("not_implemented", Reason.NOT_IMPLEMENTED)])
async def test_a_refusal_of_the_agents(harness: DispatchHarness, code: str, reason: Reason) -> None:
    refused, after = await results(harness, call("a", f"refuse {code}", "c1"), call("a", "true", "c2"))

    assert [refused.reason, after.reason] == [reason, reason]
    assert "told to refuse" in refused.error


async def test_a_slot_that_has_moved_on_is_a_lost_lease(harness: DispatchHarness) -> None:
    harness.agent.slots["0"].epoch = 2
    harness.slot_locator.errors["b"] = LeaseLost("b was released")
    running = harness.dispatcher.start_calls("alice", [call("a", "true")])
    harness.slot_locator.errors["a"] = LeaseLost("a was released meanwhile")

    (result,) = await running.all_results()

    assert (result.reason, result.error) == (Reason.LEASE_LOST, "a was released meanwhile")
    assert harness.agent.ran == []


async def test_a_lost_link_that_comes_back_joins_what_still_runs(harness: DispatchHarness) -> None:
    batch = harness.dispatcher.start_calls("alice", [call("a", "hang", "c1"), call("a", "echo 2", "c2")])
    await harness.until_running()
    harness.slot_locator.reconnect = await harness.link()
    harness.agent._peers[0].close()

    while sum(request["op"] == "calls" for request in harness.agent.requests) < 2:
        await asyncio.sleep(0)
    await harness.dispatcher.cancel_call("alice", "a", "c1")

    assert [result.reason for result in await batch.all_results()] == [Reason.CANCELLED, Reason.EXIT]
    assert [call_id for call_id, _ in harness.agent.ran] == ["c1", "c2"]


async def test_a_lost_sandbox_ends_its_calls_and_is_recorded(harness: DispatchHarness) -> None:
    batch = harness.dispatcher.start_calls("alice", [call("a", "hang", "c1"), call("a", "true", "c2")])
    await harness.until_running()
    harness.slot_locator.lost = SandboxLost("it burnt down")
    harness.agent.hang_up()

    found = await batch.all_results()

    assert [(result.reason, result.fault) for result in found] == [(Reason.SANDBOX_LOST, Fault.INFRA)] * 2
    assert harness.store.find_result("a", "c1") is not None
    assert found[0].metadata["evidence"] == {"sandbox": "it burnt down"}


async def test_a_call_recorded_before_its_sandbox_was_lost_is_served(harness: DispatchHarness) -> None:
    (first,) = await results(harness, call("a", "echo 1", "c1"))
    harness.slot_locator.errors["a"] = SandboxLost("it burnt down")

    again, other, new = await results(harness, call("a", "echo 1", "c1"), call("a", "echo 2", "c1"), call("a", "true", "c2"))

    assert again == first
    assert await harness.dispatcher.run_call("alice", call("a", "echo 1", "c1")) == first
    assert (other.reason, new.reason) == (Reason.CALL_CONFLICT, Reason.SANDBOX_LOST)


async def test_an_agent_that_stays_away_is_a_backend_error_that_may_have_run(harness: DispatchHarness) -> None:
    batch = harness.dispatcher.start_calls("alice", [call("a", "hang")])
    await harness.until_running()
    harness.slot_locator.errors["a"] = BackendUnavailable("nobody answers")
    harness.slot_locator.while_waiting = lambda: harness.clock.pass_time(60.0)
    harness.agent.hang_up()

    (result,) = await batch.all_results()

    assert (result.reason, result.metadata["may_have_run"]) == (Reason.BACKEND_ERROR, True)
    assert result.metadata["evidence"] == {"detail": "the agent cannot be reached: nobody answers"}


async def test_stopping_ends_what_runs_and_says_that_it_may_have_run(harness: DispatchHarness) -> None:
    batch = harness.dispatcher.start_calls("alice", [call("a", "hang"), call("b", "true")])
    ((_, done),) = await batch.next_results(5.0) or ()

    await harness.dispatcher.end_all_calls()

    ((_, hung),) = await batch.next_results(5.0) or ()
    assert (hung.reason, hung.metadata["may_have_run"], hung.metadata["stopping"]) == (Reason.BACKEND_ERROR, True, True)
    assert done.success


async def test_too_many_calls_at_once_are_refused_as_a_whole(harness: DispatchHarness) -> None:
    with pytest.raises(QuotaExceeded, match="calls_in_flight"):
        harness.dispatcher.start_calls("alice", [call("a", "true", f"c{n}") for n in range(101)])

    assert len(await results(harness, *(call("a", "true", f"c{n}") for n in range(100)))) == 100
    assert len(await results(harness, *(call("a", "true", f"d{n}") for n in range(100)))) == 100


async def test_a_tenant_with_all_its_calls_under_way_leaves_as_many_for_others(harness: DispatchHarness) -> None:
    hanging = harness.dispatcher.start_calls("alice", [call("a", "hang", f"c{n}") for n in range(100)])

    with pytest.raises(QuotaExceeded, match=r"100 calls of this tenant .* 100 of the 200 of `limits.calls_in_flight`"):
        harness.dispatcher.start_calls("alice", [call("b", "true", "more")])
    (answered,) = await harness.dispatcher.start_calls("bob", [call("b", "true", "bobs")]).all_results()

    assert answered.reason is Reason.LEASE_LOST  # it was taken; that the lease is alice's is another matter
    await harness.dispatcher.end_all_calls()
    assert len(await hanging.all_results()) == 100
    assert (harness.dispatcher.call_tracker.count_of_tenant("alice"), harness.dispatcher.call_tracker.call_count) == (0, 0)


async def test_the_calls_that_wait_behind_the_first_of_a_released_lease_end_at_once(harness: DispatchHarness) -> None:
    batches = [harness.dispatcher.start_calls("alice", [call("a", "hang", f"c{n}-{m}") for m in range(30)]) for n in range(3)]
    await harness.until_running()
    harness.slot_locator.errors["a"] = LeaseLost("lease a was released")

    harness.dispatcher.handle_lease_end("a")
    while harness.dispatcher.call_tracker.count_of_tenant("alice") > 3:  # no word of the agent's is needed: it says nothing
        await asyncio.sleep(0)

    results_of = [await batch.next_results(5.0) or [] for batch in batches]
    assert [[place for place, _ in fresh] for fresh in results_of] == [list(range(1, 30))] * 3
    assert {result.reason for fresh in results_of for _, result in fresh} == {Reason.LEASE_LOST}
    await harness.dispatcher.end_all_calls()


async def test_calls_of_a_lease_that_still_holds_are_not_refused(harness: DispatchHarness) -> None:
    batch = harness.dispatcher.start_calls("alice", [call("a", "hang", "c1"), call("a", "true", "c2")])
    await harness.until_running()

    harness.dispatcher.handle_lease_end("a")
    assert await batch.next_results(0.05) == []
    assert harness.dispatcher.call_tracker.call_count == 2
    await harness.dispatcher.end_all_calls()


async def test_a_call_that_nobody_made_cannot_be_cancelled(harness: DispatchHarness) -> None:
    with pytest.raises(CallNotFound):
        await harness.dispatcher.cancel_call("alice", "a", "nobodys")


async def test_a_bug_costs_its_own_calls_only(harness: DispatchHarness, caplog: pytest.LogCaptureFixture) -> None:
    harness.slot_locator.locations["a"] = None  # type: ignore[assignment]

    broken, whole = await results(harness, call("a", "true"), call("b", "true"))

    assert (broken.reason, whole.reason) == (Reason.BACKEND_ERROR, Reason.EXIT)
    assert "calls failed" in caplog.text


async def test_results_are_counted_by_how_they_ended(harness: DispatchHarness) -> None:
    await results(harness, call("a", "true"), call("a", "exit 1", "d"), call("nobodys", "true"))

    def counted(pool: str, reason: str, fault: str) -> float:
        return harness.telemetry.value("sandbox_exec_total", pool=pool, tool="bash", reason=reason, fault=fault)

    assert (counted("default", "exit", "none"), counted("", "lease_lost", "ambiguous")) == (2.0, 1.0)
    assert harness.telemetry.value("sandbox_exec_seconds_count", pool="default", tool="bash") == 2.0
    assert harness.telemetry.value("sandbox_exec_overhead_seconds_count") == 2.0
