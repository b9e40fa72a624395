"""Tests of groups of trajectories in real slots: one gang, faults that are repeated and never scored, and cancellation that leaves no slot."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from env_client import AsyncSandboxClient, NoCapacity
from environments.dataset_rows import UnusableRow
from environments.rollouts.collector import GroupCollector, RunFailed
from environments.rollouts.exec_tool import RolloutFault
from environments.rollouts.group import GroupLost
from environments.rollouts.item_queue import PutBackItems, item_key
from environments.rollouts.service import PoolUnavailable
from tests.integration.environments.rollouts.rollout_parts import Hooks, OnceFor, Pause, Rollouts, command, kill_sandboxes, only_terminal, rollouts
from tests.support.service import Service, running_service

LOOK = command("cat kept/task.txt; ls /cache 2>&1; exit 3")


async def test_a_group_has_one_gang_and_each_slot_is_set_up_once(service: Service) -> None:
    async with rollouts(service, answers=[LOOK, command("false")]) as group:
        records = await group.groups.run("the task", 3, only_terminal)

        assert len(set(group.hooks.set_up_in)) == len(group.hooks.set_up_in) == 3
        assert [record.reward for record in records] == [1.0] * 3
        for record in records:
            assert record.result is not None
            seen = record.result.calls[0].reply
            assert ("the task" in seen.content, "/cache" in seen.content) == (True, True)  # ls of /cache fails: the set-up cache is gone
            assert (seen.ok, record.result.tool_calls_executed_ok) == (True, 2)  # an exit code is no error
        total = group.statistics.total
        assert (total.group_count, total.rewards.count, total.tool_calls["attempted"], total.faults) == (1, 3, 6, {})
        assert all(total.phase_s[phase] > 0 for phase in ("acquire", "set-up", "narrow", "model", "tools", "scoring", "release"))


async def test_what_is_sealed_is_read_only_for_the_model(service: Service) -> None:
    async with rollouts(service, Hooks(sealed=("kept",)), answers=[command("echo x > kept/task.txt; cat kept/task.txt")]) as group:
        (record,) = await group.groups.run("the task", 1, only_terminal)
        assert record.result is not None
        assert "the task" in record.result.calls[0].reply.content
        assert group.hooks.exec_tools[record.trajectory_id].sealed


async def test_a_lost_sandbox_is_repeated_in_another_one_and_not_scored() -> None:
    with running_service() as own:
        async with rollouts(own, answers=[command("sleep 0.2")]) as group:

            async def kill(trajectory_id: str) -> None:
                kill_sandboxes(own, group.hooks.exec_tools[trajectory_id].lease.info.sandbox_id)

            group.hooks.set_up = OnceFor(kill)
            scored = await group.run(size=2)
            assert scored == ["g/0/attempt-2", "g/1/attempt-2"]
            assert sorted(group.hooks.scored) == scored
            total = group.statistics.total
            assert (total.rewards.count, total.repeated_count, total.group_count) == (2, 2, 1)
            assert all(fault in ("infra", "ambiguous") for fault, _ in total.faults)
            assert total.lost_s > 0


async def raises(trajectory_id: str) -> None:
    raise KeyError("a bug of the hook")


async def test_groups_wait_for_the_slots_of_other_groups_of_their_process(service: Service) -> None:
    async with AsyncSandboxClient(service.url, service.token) as client:
        await client.pool_put("small", {"slots_per_sandbox": 2, "max_sandboxes": 1})
        refused = asyncio.Event()

        async def wait_until_others_were_refused(trajectory_id: str) -> None:
            await refused.wait()

        async with rollouts(service, before_answer=wait_until_others_were_refused, pool="small", acquire_timeout_s=2.5) as group:
            hold_once = group.pool._hold_once

            async def count_refusals(trajectory_ids: list[str], cache: str | None) -> Any:
                try:
                    return await hold_once(trajectory_ids, cache)
                except NoCapacity:
                    if group.hooks.set_up_in:
                        refused.set()
                    raise

            group.pool._hold_once = count_refusals
            while (await client.pool("small")).slots.get("ready") != 2:
                await asyncio.sleep(0.05)
            records = await asyncio.gather(*(group.groups.run("item", 2, only_terminal) for _ in range(2)))
            assert [len(members) for members in records] == [2, 2]
            assert group.statistics.total.faults == {}
        await client.pool_delete("small")


@pytest.mark.parametrize("hook", ["set_up", "score"])
async def test_an_exception_of_a_hook_is_repeated_and_not_scored(service: Service, hook: str) -> None:
    async with rollouts(service, replace(Hooks(), **{hook: OnceFor(raises)})) as group:
        scored = await group.run(size=2)
        assert sorted(scored) in (["g/0", "g/1/attempt-2"], ["g/0/attempt-2", "g/1"])
        assert group.statistics.total.faults == {("infra", "hook_raised"): 1}


async def test_a_model_server_that_is_down_is_repeated_and_then_loses_the_group(service: Service) -> None:
    async with rollouts(service, before_answer=raises, max_attempts=2) as group:
        with pytest.raises(GroupLost, match="request to the model server failed"):
            await group.run(size=1)
        assert group.statistics.total.faults == {("infra", "model_server"): 2}
        assert (group.hooks.scored, group.statistics.total.rewards.count, group.statistics.total.repeated_count) == ([], 0, 1)


async def test_members_of_a_group_that_stays_incomplete_are_dropped(service: Service) -> None:
    other_scored = asyncio.Event()

    async def fail_first(trajectory_id: str) -> None:
        if trajectory_id.startswith("g/0"):
            await other_scored.wait()
            raise KeyError("a bug of the hook")
        asyncio.get_running_loop().call_later(0.3, other_scored.set)

    async with rollouts(service, Hooks(score=fail_first), max_attempts=1) as group:
        with pytest.raises(GroupLost):
            await group.run(size=2)
        total = group.statistics.total
        assert (total.rewards.count, total.dropped_count, total.group_count) == (0, 1, 0)


@pytest.mark.parametrize(("reward", "problem"), [(float("nan"), "finite number"), (None, "finite number"), ("1", "finite number")])
async def test_a_reward_that_is_no_number_is_a_fault_of_ours(service: Service, reward: Any, problem: str) -> None:
    async with rollouts(service, Hooks(reward=reward), max_attempts=1) as group:
        with pytest.raises(GroupLost, match=problem):
            await group.run(size=1)


async def test_a_fault_of_the_policy_is_scored(service: Service) -> None:
    unknown = {"content": "", "tool_calls": [{"id": "c", "type": "function", "function": {"name": "sudo", "arguments": "{}"}}]}
    async with rollouts(service, answers=[command("sleep 60"), unknown], tool_timeout_s=0.3) as group:
        assert await group.run(size=1) == ["g/0"]
        total = group.statistics.total
        assert (total.rewards.count, total.tool_faults, total.faults) == (1, {("policy", "timeout"): 1}, {})
        assert total.tool_errors == {"terminal": 1, "sudo": 1}
        metrics = group.statistics.take_metrics()
        assert metrics["train/tool_errors_count"] == 2
        assert "sudo({})" in metrics["train/tool_error_details"]


async def test_an_unusable_row_ends_its_group(service: Service) -> None:
    async def refuse(trajectory_id: str) -> None:
        raise UnusableRow("there is no such commit")

    async with rollouts(service, Hooks(set_up=refuse)) as group:
        with pytest.raises(UnusableRow, match="no such commit"):
            await group.run(size=2)


async def test_a_service_that_cannot_take_the_network_away_is_not_used_in_silence(service: Service) -> None:
    async with rollouts(service, answers=[command("ls /sys/class/net")], allow_network=False) as group:
        with suppress(PoolUnavailable):  # in the isolation mode uid
            (record,) = await group.groups.run("task", 1, only_terminal)
            assert record.result is not None
            assert not group.hooks.exec_tools[record.trajectory_id].lease.info.allow_network


@pytest.mark.parametrize("phase", ["acquire", "set-up", "model", "tools", "scoring", "release"])
async def test_cancellation_in_each_phase_leaves_no_slot(service: Service, phase: str) -> None:
    pause = Pause()
    hooks = Hooks(set_up=pause) if phase == "set-up" else Hooks(score=pause) if phase == "scoring" else Hooks()
    options: dict[str, Any] = {"before_answer": pause} if phase == "model" else {"answers": [command("touch begun; sleep 60")]} if phase == "tools" else {}
    async with rollouts(service, hooks, **options) as group:
        if phase == "release":
            release = group.pool.release

            async def slow_release(leases: Any, **options: Any) -> None:
                pause.reached.set()
                await asyncio.sleep(0.2)
                await release(leases, **options)

            group.pool.release = slow_release  # there is no other way to be in the middle of a release
        task = asyncio.create_task(group.run(size=2))
        if phase == "tools":
            while group.pool.gatherer.statistics.sent_count < 6:  # two calls of set-up and narrow, and the model's
                await asyncio.sleep(0.01)
                if group.pool.gatherer.statistics.sent_count - group.pool.gatherer.statistics.answered_count == 2:
                    break
        elif phase != "acquire":
            await pause.reached.wait()
        for _ in range(3):  # several cancellations, as atroposlib and the end of a process send them
            task.cancel()
            await asyncio.sleep(0.01)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await group.held() == 0


async def collector(group: Rollouts, items: list[Any], waits: list[int] | None = None, **options: Any) -> GroupCollector:
    async def next_item() -> Any:
        return items.pop(0) if items else None

    async def wait_for_model_server() -> None:
        if waits is not None:
            waits.append(1)

    put_back = PutBackItems(item_key, 1)
    return GroupCollector(
        group.groups, put_back, group.statistics, next_item=next_item, wait_for_model_server=wait_for_model_server, **{"max_lost_groups": 2, **options}
    )


async def tools() -> tuple[str, ...]:
    return ("terminal",)


async def test_an_item_whose_group_is_lost_is_replaced_by_the_next(service: Service) -> None:
    async with rollouts(service, Hooks(set_up=OnceFor(raises)), max_attempts=1) as group:
        found = await collector(group, ["second"])
        records = await found.collect("first", 1, tools)
        assert records is not None
        assert group.hooks.scored == [records[0].trajectory_id]
        total = group.statistics.total
        assert (total.lost_group_count, total.put_back_count, total.group_count) == (1, 1, 1)
        assert await found.collect(None, 1, tools) is None


async def test_a_run_whose_groups_are_all_lost_ends_with_a_sentence(service: Service) -> None:
    waits: list[int] = []
    async with rollouts(service, before_answer=raises, max_attempts=1) as group:
        with pytest.raises(RunFailed, match=r"2 groups in a row came to nothing \(max_lost_groups\); the last one because of: The request to the model"):
            await (await collector(group, list("abcdef"), waits)).collect("item", 1, tools)
    assert waits == [1]


async def test_rollout_faults_name_what_happened() -> None:
    fault = RolloutFault("the sandbox died", reason="sandbox_lost")
    assert (str(fault), fault.reason, fault.fault) == ("the sandbox died", "sandbox_lost", "infra")
