"""How long the service waits for a result: an agent that does not respond is given up soon after the deadline of the call, a late one is not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import pytest

from sandbox_server.core.errors import BackendUnavailable
from sandbox_server.core.execution import Fault, Reason
from sandbox_server.dispatch.call_admission import CallLimits
from sandbox_server.dispatch.call_queries import CallQueries
from sandbox_server.dispatch.dispatcher import Dispatcher
from sandbox_server.dispatch.files import SlotFiles
from sandbox_server.dispatch.limits.concurrency import ConcurrencyLimiter
from sandbox_server.dispatch.outputs import output_bytes
from sandbox_server.dispatch.runner.decisions import CallTimings
from tests.support.scripted_agent import ScriptedAgent
from tests.unit.dispatch.conftest import DispatchHarness, call, make_harness

SHORT = CallTimings(ping_after_s=0.1, ping_within_s=0.2)


@pytest.fixture
async def harness() -> DispatchHarness:
    """Leases `a`, `b` and `c` of alice's, on one agent that is given up soon."""
    return await make_harness(ScriptedAgent("s-1", slots=3), SHORT)


def test_a_call_has_its_result_within_five_seconds_of_its_deadline() -> None:
    assert CallTimings().ping_after_s + CallTimings().ping_within_s < 5.0


async def test_the_calls_of_a_stopped_agent_may_have_run_and_can_be_asked_for_again(harness: DispatchHarness) -> None:
    batch = harness.dispatcher.start_calls("alice", [call("a", "live", "c1", timeout_s=0.1), call("a", "echo 2", "c2")])
    await harness.until_running()
    harness.agent.is_stopped = True

    first, second = await batch.all_results()

    assert [(result.reason, result.fault, result.metadata["may_have_run"]) for result in (first, second)] == [(Reason.BACKEND_ERROR, Fault.INFRA, True)] * 2
    assert harness.store.find_result("a", "c1") is None
    assert harness.slot_locator.running == {"a": 0}
    harness.agent.is_stopped = False
    harness.agent.finish("c1")
    (again,) = await harness.dispatcher.start_calls("alice", [call("a", "live", "c1", timeout_s=0.1)]).all_results()
    assert again.reason is Reason.EXIT
    assert harness.agent.ran.count(("c1", "live")) == 1


async def test_a_call_that_was_not_sent_yet_when_its_agent_stopped_has_not_run(harness: DispatchHarness) -> None:
    limiter = ConcurrencyLimiter(lambda tenant: 1)
    limited = Dispatcher(harness.slot_locator, harness.store, harness.clock, harness.telemetry, CallLimits(), concurrency_limiter=limiter, timings=SHORT)
    harness.agent.is_stopped = True

    sent, held = await limited.start_calls("alice", [call("a", "true", "c1", timeout_s=0.1), call("a", "true", "c2")]).all_results()

    assert [result.reason for result in (sent, held)] == [Reason.BACKEND_ERROR] * 2
    assert [result.metadata["may_have_run"] for result in (sent, held)] == [True, False]


async def test_an_agent_that_answers_is_only_late_and_its_word_is_waited_for(harness: DispatchHarness) -> None:
    batch = harness.dispatcher.start_calls("alice", [call("a", "live", timeout_s=0.1)])
    await harness.until_running()
    assert await batch.next_results(1.0) == []

    harness.agent.finish("c")

    assert [result.reason for result in await batch.all_results()] == [Reason.EXIT]


async def test_an_agent_that_answers_and_never_says_how_the_call_ended_is_given_up_as_well() -> None:
    harness = await make_harness(ScriptedAgent("s-1", slots=3), replace(SHORT, result_grace_s=0.3))
    (result,) = await harness.dispatcher.start_calls("alice", [call("a", "hang", timeout_s=0.1)]).all_results()

    assert (result.reason, result.metadata["may_have_run"]) == (Reason.BACKEND_ERROR, True)


async def test_a_service_that_was_busy_past_a_deadline_reads_what_came_meanwhile(harness: DispatchHarness) -> None:
    batch = harness.dispatcher.start_calls("alice", [call("a", "live", timeout_s=0.05)])
    await harness.until_running()
    harness.agent.finish("c")
    time.sleep(0.5)

    assert [result.reason for result in await batch.all_results()] == [Reason.EXIT]


async def test_the_time_until_an_agent_can_be_reached_again_is_the_calls_as_well(harness: DispatchHarness) -> None:
    harness.slot_locator.errors["a"] = BackendUnavailable("nobody answers")
    harness.slot_locator.while_waiting = lambda: harness.clock.pass_time(1.0)
    before = harness.clock.monotonic()

    (result,) = await harness.dispatcher.start_calls("alice", [call("a", "true", timeout_s=2.0)]).all_results()

    assert (result.reason, result.metadata["may_have_run"]) == (Reason.BACKEND_ERROR, False)
    assert harness.clock.monotonic() - before < SHORT.lost_wait_s


async def test_questions_about_calls_and_files_of_a_stopped_agent_are_answered() -> None:
    harness = await make_harness(ScriptedAgent("s-1", slots=3), response_timeout_s=0.2)
    harness.agent.is_stopped = True
    found = CallQueries(harness.slot_locator, harness.store, harness.dispatcher.call_tracker, harness.clock, harness.dispatcher.outputs)
    slot_files = SlotFiles(harness.slot_locator)

    async def endless() -> AsyncGenerator[bytes, None]:
        while True:
            yield b"x" * (1 << 16)

    questions = (
        found.call_status("alice", "a", "c"),
        slot_files.list_folder("alice", "a", ".", recursive=False, max_entries=10),
        slot_files.write_file("alice", "a", "f", None, endless()),
    )
    for error in await asyncio.gather(*questions, return_exceptions=True):
        with pytest.raises(BackendUnavailable, match="has not answered"):
            raise error if isinstance(error, BaseException) else AssertionError(f"it was answered: {error}")


class StopsInTheMiddle(ScriptedAgent):
    """An agent whose outputs are to be fetched, and which stands still once it has sent the first half of one."""

    def _say(self, peer: Any, stream: int, meta: dict[str, Any], result: dict[str, Any], body: bytes) -> None:
        super()._say(peer, stream, meta, {**result, "output_waits": True}, b"")

    def _about_calls_or_files(self, peer: Any, stream: int, exchange: Any) -> None:
        if exchange.meta["op"] != "result_output":
            super()._about_calls_or_files(peer, stream, exchange)
            return
        body = self.live(exchange.meta["call_id"]).body
        peer.wire.send_data(stream, body[: len(body) // 2])
        if self.stops:
            self.is_stopped = True
            peer.flush()
        else:
            peer.wire.send_data(stream, body[len(body) // 2 :])
            peer.wire.end(stream)

    stops = True


async def test_an_output_that_a_stopped_agent_does_not_give_is_fetched_when_it_is_asked_for_again() -> None:
    agent = StopsInTheMiddle("s-1", slots=3)
    harness = await make_harness(agent, SHORT, response_timeout_s=0.2)
    big = call("a", "big 100000", "c1", output_limit_bytes=100_000)

    first, second = await harness.dispatcher.start_calls("alice", [big, call("a", "echo 2", "c2")]).all_results()

    assert [(result.reason, result.fault, result.metadata["may_have_run"]) for result in (first, second)] == [(Reason.BACKEND_ERROR, Fault.INFRA, True)] * 2
    assert "has not answered" in first.error
    assert harness.store.find_result("a", "c1") is None
    found = CallQueries(harness.slot_locator, harness.store, harness.dispatcher.call_tracker, harness.clock, harness.dispatcher.outputs)
    for ask in (
        found.call_status("alice", "a", "c1"),
        found.call_status("alice", "a", "c1", wait_s=1.0),
        anext(found.follow_call("alice", "a", "c1", 1 << 50)),
    ):
        agent.is_stopped = False
        with pytest.raises(BackendUnavailable, match="has not answered"):
            await ask
    agent.is_stopped, agent.stops = False, False
    (again,) = await harness.dispatcher.start_calls("alice", [big]).all_results()
    assert (again.reason, output_bytes(again)) == (Reason.EXIT, 100_000)
    assert agent.ran.count(("c1", "big 100000")) == 1
    await harness.store.close()
