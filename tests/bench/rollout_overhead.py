"""How much processor time of an environment one tool call costs, and what many concurrent trajectories leave behind: `python -m tests.bench.rollout_overhead`.

Every trajectory has a real slot of a service in a process of its own. The rollouts come in pairs of rounds: in one round each model makes a number of tool
calls, and in the other it answers at once. The difference between the processor times of the two, divided by the number of calls, is the cost of a call:
agent loop, dispatch, gatherer and client, without set-up and release of the slots. The models answer within the process and take no time of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from environments.agent_loop import AgentLoopSettings, AgentResult
from environments.conversation.context import estimate_tokens
from environments.rollouts.exec_tool import ExecTool
from environments.rollouts.group import GroupRunner
from environments.rollouts.pool_spec import PoolRequest, PoolSettings, plan_pool
from environments.rollouts.service import ConnectionSettings, PoolConnection
from environments.rollouts.statistics import RolloutStatistics
from environments.rollouts.trajectory import OpenedModel, Schemas, TrajectoryRunner, TrajectorySettings

ROUNDS = 7
CALLS = 10
GROUP_SIZE = 8
SLOTS_PER_SANDBOX = 50
TOOLS = ("terminal",)
_CALL = {"id": "c", "type": "function", "function": {"name": "terminal", "arguments": '{"command": "true"}'}}


@dataclass(frozen=True, kw_only=True)
class Report:
    """What the rounds came to.

    Args:
        scored_count: the trajectories that were scored, of `expected_count`.
        tool_call_count: the tool calls that ended without a fault, of `expected_call_count`.
        fault_count: the attempts that a fault ended.
        call_processor_ms_p50: processor time of this process for each tool call, in milliseconds; the median of the pairs.
        calls_per_s: tool calls in a second, in the median round.
        lease_count: the leases of the run after the last round.
        task_growth, descriptor_growth: how many more tasks and open files there are after the last round than after the first.
        memory_growth_bytes: how much larger the memory of this process is after the last round than after the first, in bytes.
    """

    scored_count: int
    expected_count: int
    tool_call_count: int
    expected_call_count: int
    fault_count: int
    call_processor_ms_p50: float
    calls_per_s: float
    lease_count: int
    task_growth: int
    descriptor_growth: int
    memory_growth_bytes: int


class InstantModel:
    """Makes as many tool calls as its prompt says, one in each turn, and then ends the rollout."""

    def __init__(self) -> None:
        self._turn = 0

    async def chat_completion(self, **request: Any) -> dict[str, Any]:
        """Answer a conversation."""
        self._turn += 1
        calls = [_CALL] if self._turn <= int(request["messages"][0]["content"]) else None
        return {"choices": [{"message": {"role": "assistant", "content": "", "tool_calls": calls}, "finish_reason": "stop"}]}


class NoWork:
    """Hooks that do nothing in the slot. The item is the number of the tool calls."""

    async def setup_trajectory_workspace(self, item: Any, *, trajectory_id: str, exec_tool: ExecTool) -> dict[str, Any]:
        """Do nothing."""
        return {}

    def sealed_entries(self, item: Any, workspace_meta: dict[str, Any]) -> Sequence[str]:
        """Seal nothing."""
        return ()

    def build_messages(self, item: Any) -> list[dict[str, Any]]:
        """Tell the model how many calls to make."""
        return [{"role": "user", "content": str(item)}]

    async def verify_and_score_trajectory(
        self, item: Any, result: AgentResult, *, trajectory_id: str, exec_tool: ExecTool, workspace_meta: dict[str, Any]
    ) -> tuple[float, dict[str, Any]]:
        """Return the number of the calls that succeeded."""
        return float(result.tool_calls_executed_ok), {}


async def select_tools() -> Sequence[str]:
    return TOOLS


@asynccontextmanager
async def open_instant_model(schemas: Schemas) -> AsyncIterator[OpenedModel]:
    """Open a model for one trajectory."""
    yield InstantModel(), estimate_tokens


class Rounds:
    """Rolls out rounds of concurrent groups in the slots of one pool.

    Args:
        pool: the connection to the pool.
        group_count: the groups of a round, all of them at once.
        group_size: the trajectories of a group.
    """

    def __init__(self, pool: PoolConnection, group_count: int, group_size: int) -> None:
        self.pool = pool
        self.statistics = RolloutStatistics()
        self.call_count = 0
        self._group_count = group_count
        self._group_size = group_size
        settings = TrajectorySettings(loop=AgentLoopSettings(max_turns=1000))
        self._groups = GroupRunner(pool, TrajectoryRunner(pool, NoWork(), settings, open_instant_model), self.statistics, max_attempts=3)

    async def roll_out(self, calls: int) -> tuple[float, float]:
        """Roll out one round, and return the processor time of this process and the wall time, in seconds."""
        gc.collect()
        began_s, processor_began_s = time.perf_counter(), time.process_time()
        groups = await asyncio.gather(*(self._groups.run(calls, self._group_size, select_tools) for _ in range(self._group_count)))
        used_s = time.process_time() - processor_began_s
        self.call_count += sum(int(record.reward or 0) for group in groups for record in group)
        return used_s, time.perf_counter() - began_s


async def measure(request: PoolRequest, settings: ConnectionSettings, *, group_count: int, group_size: int, rounds: int, calls: int) -> Report:
    """Roll out pairs of rounds.

    Args:
        request: the pool.
        settings: how the service is used.
        group_count: the groups of a round.
        group_size: the trajectories of a group.
        rounds: how many pairs of rounds.
        calls: the tool calls of a trajectory.
    """
    async with PoolConnection(request, settings) as pool:
        series = Rounds(pool, group_count, group_size)
        await series.roll_out(calls)  # connections are opened, and modules are loaded
        before = _Resources.now()
        in_round = group_count * group_size * calls
        costs_s, rates = [], []
        for _ in range(rounds):
            with_calls_s, wall_s = await series.roll_out(calls)
            without_s, _ = await series.roll_out(0)
            costs_s.append((with_calls_s - without_s) / in_round)
            rates.append(in_round / wall_s)
        after = _Resources.now()
        lease_count = len((await pool.client.leases(run_id=pool.run_id)).leases)
        total = series.statistics.total
        return Report(
            scored_count=total.rewards.count,
            expected_count=group_count * group_size * (2 * rounds + 1),
            tool_call_count=series.call_count,
            expected_call_count=in_round * (rounds + 1),
            fault_count=sum(total.faults.values()),
            call_processor_ms_p50=1000 * statistics.median(costs_s),
            calls_per_s=statistics.median(rates),
            lease_count=lease_count,
            task_growth=after.task_count - before.task_count,
            descriptor_growth=after.descriptor_count - before.descriptor_count,
            memory_growth_bytes=after.memory_bytes - before.memory_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class _Resources:
    task_count: int
    descriptor_count: int
    memory_bytes: int

    @classmethod
    def now(cls) -> _Resources:
        """Return what this process uses."""
        gc.collect()
        resident_pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
        return cls(
            task_count=len(asyncio.all_tasks()),
            descriptor_count=len(os.listdir("/proc/self/fd")),
            memory_bytes=resident_pages * os.sysconf("SC_PAGE_SIZE"),
        )


def main() -> None:
    """Measure with an embedded service, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trajectories", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--calls", type=int, default=CALLS)
    options = parser.parse_args()
    sandboxes = -(-options.trajectories // SLOTS_PER_SANDBOX)
    request = plan_pool(PoolSettings(slots_per_container=SLOTS_PER_SANDBOX, min_containers=sandboxes, max_containers=sandboxes, acquire_timeout_s=120))
    group_count = options.trajectories // GROUP_SIZE
    run = measure(request, ConnectionSettings(), group_count=group_count, group_size=GROUP_SIZE, rounds=options.rounds, calls=options.calls)
    print(json.dumps(asdict(asyncio.run(run)), indent=2))


if __name__ == "__main__":
    main()
