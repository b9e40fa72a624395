"""The evidence about limits: a result names what is proven, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.integration.agent.agent_harness import AgentHarness, AgentProcess, agent_process
from tests.integration.agent.conftest import BEST_USER, clean_harness, runner_of

HOG = "python3 -c 'x = bytearray(200 << 20); print(len(x))'"


@pytest.fixture(scope="module")
def limited_agent() -> Iterator[AgentProcess]:
    """An agent whose slots have little memory, for all tests of this file."""
    with agent_process(runner_of(BEST_USER), "bwrap", limits={"memory_mb": 64}) as agent:
        yield agent


@pytest.fixture
async def limited(limited_agent: AgentProcess) -> AsyncIterator[AgentHarness]:
    """A link to that agent."""
    async with clean_harness(limited_agent) as harness:
        if harness.link.hello["capabilities"]["limits"]["memory"] == "rlimit":
            pytest.skip("nothing counts memory here")
        yield harness


@pytest.mark.privileged
async def test_a_limit_that_is_hit_while_calls_run_at_the_same_time_proves_nothing(limited: AgentHarness) -> None:
    harness = limited
    beside = asyncio.create_task(harness.bash("touch up; until [ -e go ]; do sleep 0.02; done; exit 3"))
    await harness.until("test -e up")
    hog = await harness.bash(HOG)
    await harness.bash("touch go")

    for answer in (hog, await beside):
        assert answer.reason == "exit"
        assert answer.metadata["evidence"]["ambiguous"] is True
        assert answer.metadata["evidence"]["limits_near"] == ["memory"]
        assert answer.metadata["evidence"]["oom_kills"] >= 1


@pytest.mark.privileged
@pytest.mark.parametrize("concurrent_calls", ["job", "background"])
async def test_processes_of_earlier_calls_count_as_concurrent_work(limited: AgentHarness, concurrent_calls: str) -> None:
    harness = limited
    if concurrent_calls == "job":
        await harness.call("process", args={"action": "start", "command": "sleep 7301"})
    else:
        await harness.bash("sleep 7302 &")
    hog = await harness.bash(HOG)

    assert hog.reason == "exit"
    assert hog.metadata["evidence"]["ambiguous"] is True


@pytest.mark.privileged
async def test_a_call_that_runs_alone_again_is_proven_to_have_hit_the_limit(limited: AgentHarness) -> None:
    harness = limited
    for _ in range(3):
        await harness.bash("seq 100 | sort | tail -1")
        answer = await harness.bash(HOG)
        assert answer.reason == "oom", answer.meta


@pytest.mark.privileged
async def test_an_init_killed_for_memory_is_the_slots_own_work(limited: AgentHarness) -> None:
    harness = limited
    answer = await harness.bash("echo 0 > /proc/self/oom_score_adj; exec dd if=/dev/zero of=/dev/shm/x bs=64k 2> /dev/null", timeout_s=20)
    if answer.reason == "sandbox_lost":
        pytest.fail(f"the slot's own work is not named: {answer.meta}")

    assert answer.reason == "oom"
    assert answer.metadata["evidence"]["oom_kills"] >= 1
    assert (await harness.reset())["state"] == "ready"
    assert (await harness.bash("echo back")).text == "back\n"
