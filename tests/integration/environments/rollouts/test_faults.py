"""Tests of faults in real rollouts: those of the infrastructure are repeated, counted and never scored, wherever they strike."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pytest

from env_client import AsyncSandboxClient
from environments.agent_loop import AgentResult
from environments.rollouts.collector import GroupCollector, RunFailed
from environments.rollouts.exec_tool import ExecTool
from environments.rollouts.group import GroupLost
from environments.rollouts.item_queue import PutBackItems, item_key
from environments.rollouts.pool_spec import PoolRequest
from environments.rollouts.scoring import compute_reward_in_slot
from environments.rollouts.service import ConnectionSettings, PoolConnection
from environments.tool_context import ToolContext
from tests.integration.client.test_restarts import Restarting
from tests.integration.environments.rollouts.rollout_parts import Hooks, OnceFor, Pause, Rollouts, command, kill_sandboxes, only_terminal, rollouts
from tests.support.cutting_proxy import CuttingProxy
from tests.support.service import SMALL_POOL, Service, end_sandboxes_left, running_service, short_folder

SLOW = command("touch begun; sleep 0.5; echo done")


@pytest.fixture(scope="module")
def own_service() -> Iterator[Service]:
    """A service whose sandboxes these tests kill."""
    with running_service({"pools": {"default": {"min_sandboxes": 0}}}) as service:
        yield service


@pytest.fixture
def own(own_service: Service) -> Service:
    """The same service, whose pool `own` replaces the first sandbox that is killed as soon as if no earlier test had killed one."""
    with own_service.http() as http:
        http.put("/v1/pools/own", json=dict(SMALL_POOL)).raise_for_status()
    return own_service


async def wait_for_call(group: Rollouts) -> None:
    """Wait until a tool call is on its way."""
    statistics = group.pool.gatherer.statistics
    while statistics.sent_count == statistics.answered_count:
        await asyncio.sleep(0.005)  # no event reports it
        statistics = group.pool.gatherer.statistics


def assert_repeated_and_counted(group: Rollouts, scored: list[str]) -> None:
    assert scored == group.hooks.scored == ["g/0/attempt-2"]
    total, metrics = group.statistics.total, group.statistics.take_metrics()
    assert (total.rewards.count, total.repeated_count, sum(total.faults.values())) == (1, 1, 1)
    ((fault, reason),) = total.faults
    assert fault in ("infra", "ambiguous")
    assert (metrics[f"train/faults/{fault}/{reason}"], metrics["train/rollouts_repeated"]) == (1, 1)
    assert metrics["train/lost_to_faults_s"] > 0


@pytest.mark.parametrize("phase", ["set-up", "model", "tools", "scoring"])
async def test_a_sandbox_that_dies_is_not_scored(own: Service, phase: str) -> None:
    killers: list[asyncio.Task[None]] = []

    async def kill(trajectory_id: str) -> None:
        kill_sandboxes(own)

    async def kill_during_the_call(trajectory_id: str) -> None:
        async def wait_and_kill() -> None:
            await wait_for_call(group)
            kill_sandboxes(own)

        killers.append(asyncio.create_task(wait_and_kill()))

    once = OnceFor(kill_during_the_call if phase == "tools" else kill)
    hooks = Hooks(set_up=once) if phase == "set-up" else Hooks(score=once) if phase == "scoring" else Hooks()
    options: dict[str, Any] = {"before_answer": once} if phase in ("model", "tools") else {}
    async with rollouts(own, hooks, answers=[SLOW], pool="own", **options) as group:
        assert_repeated_and_counted(group, await group.run(size=1))


async def test_a_sandbox_that_dies_before_the_release_changes_nothing(own: Service) -> None:
    async with rollouts(own, pool="own") as group:
        release = group.pool.release

        async def kill_and_release(leases: Any, **options: Any) -> None:
            kill_sandboxes(own)
            await release(leases, **options)

        group.pool.release = kill_and_release  # type: ignore[method-assign]  # there is no other way to be just in front of the release
        assert await group.run(size=1) == ["g/0"]
        assert group.statistics.total.faults == {}


@pytest.mark.parametrize("moment", ["model", "scoring"])
async def test_a_lost_lease_is_not_scored(service: Service, moment: str) -> None:
    async def lose(trajectory_id: str) -> None:
        await group.client.release(run_id=group.pool.run_id)

    hooks = Hooks(score=OnceFor(lose)) if moment == "scoring" else Hooks()
    options: dict[str, Any] = {"before_answer": OnceFor(lose)} if moment == "model" else {}
    async with rollouts(service, hooks, answers=[command("true")], **options) as group:
        assert_repeated_and_counted(group, await group.run(size=1))
        assert {reason for _, reason in group.statistics.total.faults} == {"lease_lost"}


@dataclass
class CatchingHooks(Hooks):
    """Hooks whose reward function catches whatever its calls raise."""

    async def verify_and_score_trajectory(
        self, item: Any, result: AgentResult, *, trajectory_id: str, exec_tool: ExecTool, workspace_meta: dict[str, Any]
    ) -> tuple[float, dict[str, Any]]:
        await self.score(trajectory_id)

        def reward(item: Any, result: AgentResult, context: ToolContext) -> float:
            try:
                return float(context.terminal("true")["exit_code"] == 0)
            except Exception:  # as careless reward functions do
                return 0.0

        context = ToolContext(group_of[trajectory_id].pool.thread_client, exec_tool.lease.info)
        with ThreadPoolExecutor(1) as threads:
            scored = await compute_reward_in_slot(reward, item, result, context, threads)
        self.scored.append(trajectory_id)
        return scored, {}


group_of: dict[str, Rollouts] = {}


async def test_a_reward_function_that_catches_everything_does_not_score_a_fault(service: Service) -> None:
    async def lose(trajectory_id: str) -> None:
        await group.client.release(run_id=group.pool.run_id)

    async with rollouts(service, CatchingHooks(score=OnceFor(lose))) as group:
        group_of.update({"g/0": group, "g/0/attempt-2": group})
        assert_repeated_and_counted(group, await group.run(size=1))


async def test_connections_that_are_cut_are_no_faults(service: Service) -> None:
    with CuttingProxy(service.url, [None, 0, 40, 300, 0, 900, 1200] * 2).running() as proxy:
        async with rollouts(replace(service, url=proxy.url), answers=[command("echo one"), SLOW]) as group:
            assert sorted(await group.run(size=3)) == ["g/0", "g/1", "g/2"]
            assert group.statistics.total.faults == {}
        assert proxy.cut_count > 2


async def test_a_service_that_is_killed_and_started_again_is_no_fault() -> None:
    with short_folder() as folder:
        restarting = Restarting(folder)
        try:

            async def restart(trajectory_id: str) -> None:
                await wait_for_call(group)
                await asyncio.to_thread(restarting.again, signal.SIGKILL)

            async with rollouts(restarting.service, answers=[SLOW, command("test -e begun")]) as group:
                restarts: list[asyncio.Task[None]] = []

                async def begin(trajectory_id: str) -> None:
                    restarts.append(asyncio.create_task(restart(trajectory_id)))

                group.hooks.set_up = OnceFor(begin)
                (record,) = await group.groups.run("item", 1, only_terminal, group_id="g")
                await asyncio.gather(*restarts)
                assert (record.trajectory_id, group.statistics.total.faults) == ("g/0", {})
                assert record.result is not None
                assert record.result.tool_calls_executed_ok == 2
        finally:
            restarting.end(signal.SIGKILL)
            end_sandboxes_left(restarting.service.state_dir)


async def test_a_pool_without_room_ends_the_run_in_a_sentence(service: Service) -> None:
    async with AsyncSandboxClient(service.url, service.token) as other:
        await other.pool_put("full", {"slots_per_sandbox": 1, "max_sandboxes": 1})
        try:
            async with other.lease("full", wait_s=60), rollouts(service, pool="full", acquire_timeout_s=0.1, max_attempts=2) as group:
                put_back, items = PutBackItems(item_key, 1), ["second"]

                async def next_item() -> Any:
                    return put_back.take() or (items.pop(0) if items else None)

                async def no_wait() -> None:
                    raise AssertionError("the model server is not to blame")

                async def tools() -> tuple[str, ...]:
                    return ("terminal",)

                collector = GroupCollector(group.groups, put_back, group.statistics, next_item=next_item, wait_for_model_server=no_wait, max_lost_groups=3)
                with pytest.raises(
                    RunFailed, match=r"3 groups in a row came to nothing \(max_lost_groups\); the last one because of: no slots could be acquired: "
                ):
                    await collector.collect("first", 1, tools)
                total = group.statistics.total
                assert (total.faults, total.lost_group_count, total.put_back_count) == ({("infra", "no_capacity"): 6}, 3, 2)
                assert group.hooks.set_up_in == []
        finally:
            await other.pool_delete("full")


async def test_a_hook_that_hangs_is_ended_and_not_scored(service: Service) -> None:
    async def hang_in(hook: str) -> None:
        async with rollouts(service, replace(Hooks(), **{hook: OnceFor(Pause())}), hook_timeout_s=1.0) as group:
            scored = await group.run(size=1)
            assert_repeated_and_counted(group, scored)
            assert group.statistics.total.faults == {("infra", "hook_timeout"): 1}

    await asyncio.gather(hang_in("set_up"), hang_in("score"))


async def test_a_hook_that_always_hangs_loses_the_group(service: Service) -> None:
    async with rollouts(service, Hooks(set_up=Pause()), hook_timeout_s=0.5, max_attempts=2) as group:
        with pytest.raises(GroupLost, match=r"setup_trajectory_workspace did not end within 0\.5 s \(hook_timeout_s\)"):
            await group.run(size=1)


async def test_a_service_that_does_not_answer_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("environments.rollouts.service._END_REQUEST_S", 0.5)
    monkeypatch.setattr("environments.rollouts.service._UNRESPONSIVE_S", 0.1)
    with running_service() as stopped:
        pool = PoolConnection(
            PoolRequest(name="default", spec=None, acquire_timeout_s=30), ConnectionSettings(sandbox_url=stopped.url, sandbox_token=stopped.token)
        )
        await pool.open()
        held = asyncio.Event()

        async def hold() -> None:
            async with pool.slot("t-1"):
                held.set()
                await asyncio.Event().wait()

        holding = asyncio.create_task(hold())
        await held.wait()
        pid = stopped.process.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            async with asyncio.timeout(20):
                holding.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await holding
                await pool.aclose()
        finally:
            os.kill(pid, signal.SIGCONT)
    assert pool.describe_end() == "slots that are still leased end after 300 s"
    assert "could not be released; they end after 300 s: the service did not answer within 0.5 s" in caplog.text
