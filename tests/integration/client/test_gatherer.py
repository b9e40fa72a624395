"""Tests of the gatherer and of the dispatch of tools with a real service: many trajectories, cancellations, hostile arguments, a service that is killed."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from env_client import AsyncLease, AsyncSandboxClient, CallGatherer, CallNotFound, CallStatus, InvalidRequest, RetryPolicy, SlotTools
from tests.support.service import Service, running_service

TRAJECTORIES = 16
TURNS = 20
#: Writes `begun`, waits for the file `go`, and writes `done`.
WAITS = "touch begun; while [ ! -e go ]; do sleep 0.05; done; touch done"


@pytest.fixture
async def client(service: Service) -> AsyncIterator[AsyncSandboxClient]:
    async with AsyncSandboxClient(service.url, service.token) as opened:
        yield opened


def slot_tools(lease: AsyncLease, gatherer: CallGatherer, **options: Any) -> SlotTools:
    return SlotTools(lease, gatherer, **{"timeout_s": 30.0, **options})


async def test_hundreds_of_calls_of_many_trajectories(client: AsyncSandboxClient) -> None:
    async def trajectory(tools: SlotTools, name: int) -> list[Any]:
        return [json.loads(await tools.call_tool("terminal", {"command": f"echo {name} >> turns; wc -l < turns; exit {turn}"})) for turn in range(TURNS)]

    async with client.gang(TRAJECTORIES, wait_s=60) as leases, CallGatherer(client) as gatherer:
        slow = asyncio.ensure_future(slot_tools(leases[0], gatherer).exec_tool("bash", {"command": "sleep 60"}, timeout=60))
        replies = await asyncio.gather(*(trajectory(slot_tools(lease, gatherer), name) for name, lease in enumerate(leases)))
        assert not slow.done()  # nobody waited for it
        slow.cancel()
        written = await asyncio.gather(*(slot_tools(lease, gatherer).exec_tool("read_file", {"path": "turns"}) for lease in leases))

    assert replies == [[{"output": f"{turn + 1}\n", "exit_code": turn} for turn in range(TURNS)]] * TRAJECTORIES
    assert [result.output for result in written] == [f"{name}\n" * TURNS for name in range(TRAJECTORIES)]
    assert gatherer.statistics.call_count == gatherer.statistics.answered_count == TRAJECTORIES * (TURNS + 1) + 1
    assert gatherer.statistics.request_count < gatherer.statistics.call_count / 2


async def test_a_quick_call_does_not_wait_for_a_slow_one_of_its_request(client: AsyncSandboxClient) -> None:
    async with client.gang(3, wait_s=60) as (first, slow, quick), CallGatherer(client, window_ms=60_000) as gatherer:
        begun = asyncio.ensure_future(gatherer.execute(first.call("bash", {"command": "true"})))
        waiting = asyncio.ensure_future(gatherer.execute(slow.call("bash", {"command": WAITS})))
        await asyncio.sleep(0)  # the first call is sent, and the second one waits for its answer
        result = await gatherer.execute(quick.call("bash", {"command": "echo quick"}))
        assert (result.output, gatherer.statistics.request_count, waiting.done()) == ("quick\n", 2, False)
        await slow.bash("touch go")
        assert (await waiting).success
        assert (await begun).success


async def test_cancelled_trajectories_end_their_calls_and_no_others(client: AsyncSandboxClient) -> None:
    async with client.gang(8, wait_s=60) as leases, CallGatherer(client) as gatherer:
        calls = [lease.call("bash", {"command": WAITS}) for lease in leases]
        tasks = [asyncio.ensure_future(gatherer.execute(call)) for call in calls]
        async with asyncio.timeout(20):
            for lease in leases:
                while not (await lease.exec("bash", {"command": "test -e begun"})).success:
                    await asyncio.sleep(0.05)
        for task in tasks[::2]:
            task.cancel()
        ended = [await lease.call_status(str(call.call_id), wait_s=20) for lease, call in zip(leases[::2], calls[::2], strict=True)]
        running = [await lease.call_status(str(call.call_id)) for lease, call in zip(leases[1::2], calls[1::2], strict=True)]
        for lease in leases:
            await lease.bash("touch go")
        results = await asyncio.gather(*tasks, return_exceptions=True)
        finished = [(await lease.bash("test -e done")).success for lease in leases]

    assert [isinstance(result, asyncio.CancelledError) for result in results] == [True, False] * 4
    assert [state.result.reason if state.result else None for state in ended] == ["cancelled"] * 4
    assert [state.state for state in running] == ["running"] * 4
    assert finished == [False, True] * 4


async def test_a_call_that_is_cancelled_at_any_moment_does_not_run_on(client: AsyncSandboxClient) -> None:
    async with client.lease(wait_s=60) as lease, CallGatherer(client) as gatherer:
        calls = [lease.call("bash", {"command": "sleep 60"}, timeout_s=60) for _ in range(7)]
        for call, delay_s in zip(calls, (0, 0, 0.001, 0.002, 0.004, 0.008, 0.016), strict=True):
            task = asyncio.ensure_future(gatherer.execute(call))
            await asyncio.sleep(delay_s)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            while gatherer.statistics.answered_count < gatherer.statistics.sent_count:  # the next call is sent at once, too
                await asyncio.sleep(0.005)
        states = await asyncio.gather(*(lease.call_status(str(call.call_id)) for call in calls), return_exceptions=True)

    reasons = [state.result.reason if isinstance(state, CallStatus) and state.result is not None else type(state) for state in states]
    assert set(reasons) <= {"cancelled", CallNotFound}  # not found: it was cancelled before it was sent
    assert reasons[-1] == "cancelled"


async def test_a_slot_that_was_released_gives_results(client: AsyncSandboxClient) -> None:
    async with client.gang(2, wait_s=60) as (lease, other), CallGatherer(client) as gatherer:
        await other.release()
        calls = [lease.call("bash", {"command": "echo here"}), other.call("bash", {"command": "echo here"})]
        found, lost = await asyncio.gather(*(gatherer.execute(call) for call in calls))

    assert (found.output, lost.reason, lost.fault) == ("here\n", "lease_lost", "ambiguous")


async def test_what_a_model_writes_breaks_nothing_but_its_own_call(client: AsyncSandboxClient) -> None:
    deep: Any = "x"
    for _ in range(100):
        deep = [deep]
    hostile: list[Any] = [
        "ls", None, 7, ["ls"], {}, {"command": None}, {"command": deep}, {"command": "x" * (9 << 20)}, {"command": "a\0b"},
        {"command": json.loads('"\\ud83d"')}, {"command": float("nan")}, {"command": "ls", "env": {"": "x"}}, {"command": "ls", "Command": "id"}, {"": ""},
        {"command": "ls", "env": dict.fromkeys(map(str, range(2000)), "")}, {"command": ["ls"] * 210_000},
    ]  # fmt: skip
    async with client.gang(2, wait_s=60) as (lease, other), CallGatherer(client) as gatherer:
        model, neighbour = slot_tools(lease, gatherer), slot_tools(other, gatherer)
        given = [asyncio.ensure_future(model.run_model_call("terminal", args)) for args in hostile]
        beside = [asyncio.ensure_future(neighbour.run_model_call("terminal", {"command": f"echo {number}"})) for number in range(20)]
        results, others = await asyncio.gather(*given), await asyncio.gather(*beside)

    assert [(result.success, result.reason, result.fault) for result in results] == [(False, "invalid_args", "policy")] * len(hostile)
    assert all(result.error for result in results)
    assert [result.output for result in others] == [f"{number}\n" for number in range(20)]


async def test_a_model_gets_no_more_than_the_environment_gives(client: AsyncSandboxClient) -> None:
    async with client.gang(2, wait_s=60) as (lease, other), CallGatherer(client) as gatherer:
        tools = slot_tools(lease, gatherer, timeout_s=1.0, output_limit_bytes=1000)
        began_s = time.monotonic()
        longer = await tools.run_model_call("terminal", {"command": "sleep 30", "timeout": 600, "timeout_s": 600})
        shorter = await tools.run_model_call("terminal", {"command": "sleep 30", "timeout": 0.1})
        took_s = time.monotonic() - began_s
        elsewhere = await tools.run_model_call("terminal", {"command": "touch mine; pwd", "lease_id": other.lease_id, "allow_network": True})
        large = await tools.run_model_call("terminal", {"command": "seq 100000", "output_limit_bytes": 10**6, "encoding": "base64"})
        refused = await tools.run_model_call("bash", {"command": "id"})
        theirs = await other.bash("ls")

    assert (longer.reason, shorter.reason) == ("timeout", "timeout")
    assert (longer.metadata["duration_s"] < 10, shorter.metadata["duration_s"] < 10, took_s < 20) == (True, True, True)
    assert (elsewhere.success, elsewhere.metadata["dropped_args"], theirs.output) == (True, ["allow_network", "lease_id"], "")
    assert (large.metadata["truncated"], len(large.output) < 1200, large.output.startswith("1\n2\n")) == (True, True, True)
    assert (refused.reason, refused.fault) == ("invalid_args", "policy")


async def test_a_mistake_of_a_hook_is_an_error(client: AsyncSandboxClient) -> None:
    async with client.lease(wait_s=60) as lease, CallGatherer(client) as gatherer:
        tools = slot_tools(lease, gatherer)
        with pytest.raises(InvalidRequest, match="no tool"):
            await tools.exec_tool("sudo", {})
        with pytest.raises(InvalidRequest, match="max_timeout_s"):
            await tools.exec_tool("bash", {"command": "true"}, timeout=10**6)
        assert (await tools.exec_tool("bash", {"command": "echo hi"})).output == "hi\n"


async def test_a_service_that_is_killed_is_a_fault_of_ours() -> None:
    with running_service() as own:
        client = AsyncSandboxClient(own.url, own.token, retry=RetryPolicy(total_s=1.0))
        async with client:
            leases = await client.hold(8, wait_s=60)
            async with CallGatherer(client) as gatherer:
                running = [asyncio.ensure_future(gatherer.execute(lease.call("bash", {"command": "sleep 60"}))) for lease in leases]
                cancelled = asyncio.ensure_future(gatherer.execute(leases[0].call("bash", {"command": "sleep 60"})))
                await gatherer.execute(leases[0].call("bash", {"command": "true"}))
                own.process.send_signal(signal.SIGKILL)
                own.process.wait()
                cancelled.cancel()
                async with asyncio.timeout(30):
                    later = [await gatherer.execute(leases[0].call("bash", {"command": "true"}))]
                    results = await asyncio.gather(*running)

    assert {(result.success, result.reason, result.fault) for result in [*results, *later]} == {(False, "backend_error", "infra")}
    assert all(result.metadata["may_have_run"] for result in results)
