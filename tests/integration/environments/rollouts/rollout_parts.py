"""Parts for tests of rollouts: a model that plays answers, hooks that do what a test says, and a pool of a real service."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from env_client import AsyncSandboxClient
from environments.agent_loop import AgentLoopSettings, AgentResult
from environments.conversation.context import estimate_tokens
from environments.rollouts.exec_tool import ExecTool
from environments.rollouts.group import GroupRunner
from environments.rollouts.pool_spec import PoolRequest
from environments.rollouts.service import ConnectionSettings, PoolConnection
from environments.rollouts.statistics import RolloutStatistics
from environments.rollouts.trajectory import OpenedModel, Schemas, TrajectoryRunner, TrajectorySettings
from tests.support.service import Service

#: What happens at a moment of a rollout. It gets the trajectory.
Action = Callable[[str], Awaitable[None]]


async def nothing(trajectory_id: str) -> None:
    """Do nothing."""


def command(text: str) -> dict[str, Any]:
    """Return an answer that runs a command."""
    return {"content": "", "tool_calls": [{"id": "c", "type": "function", "function": {"name": "terminal", "arguments": json.dumps({"command": text})}}]}


class PlayedModel:
    """A chat server that gives each conversation the same answers, and then ends it.

    Args:
        answers: the messages of the model.
        before: happens before each answer.
    """

    def __init__(self, answers: Sequence[dict[str, Any]], before: Action) -> None:
        self._answers = answers
        self._before = before
        self._turn = 0

    async def chat_completion(self, **request: Any) -> Any:
        """Answer a conversation."""
        await self._before("")
        answers = [*self._answers, {"content": "Done."}]
        answer = answers[min(self._turn, len(answers) - 1)]
        self._turn += 1
        return {"choices": [{"message": {"role": "assistant", **answer}, "finish_reason": "stop"}]}


async def only_terminal() -> Sequence[str]:
    """Select the terminal for a group, and nothing else."""
    return ("terminal",)


@dataclass
class Hooks:
    """Hooks that do what a test says, and remember what they were called with."""

    set_up: Action = nothing
    score: Action = nothing
    sealed: tuple[str, ...] = ()
    set_up_in: list[str] = field(default_factory=list)
    scored: list[str] = field(default_factory=list)
    reward: Any = 1.0
    exec_tools: dict[str, ExecTool] = field(default_factory=dict)

    async def setup_trajectory_workspace(self, item: Any, *, trajectory_id: str, exec_tool: ExecTool) -> dict[str, Any]:
        """Remember the slot, and write a file."""
        self.exec_tools[trajectory_id] = exec_tool
        self.set_up_in.append(exec_tool.lease.lease_id)
        await exec_tool("write_file", {"path": "kept/task.txt", "content": str(item)})
        await self.set_up(trajectory_id)
        return {"trajectory": trajectory_id}

    def sealed_entries(self, item: Any, workspace_meta: dict[str, Any]) -> Sequence[str]:
        """Return what the test seals."""
        return self.sealed

    def build_messages(self, item: Any) -> list[dict[str, Any]]:
        """Return the item as prompt."""
        return [{"role": "user", "content": str(item)}]

    async def verify_and_score_trajectory(
        self, item: Any, result: AgentResult, *, trajectory_id: str, exec_tool: ExecTool, workspace_meta: dict[str, Any]
    ) -> tuple[float, dict[str, Any]]:
        """Remember the trajectory, and return the reward."""
        assert workspace_meta == {"trajectory": trajectory_id}
        await self.score(trajectory_id)
        await exec_tool("terminal", {"command": "true"})
        self.scored.append(trajectory_id)
        return self.reward, {}


@dataclass
class Rollouts:
    """A group runner with everything around it."""

    pool: PoolConnection
    hooks: Hooks
    statistics: RolloutStatistics
    groups: GroupRunner
    client: AsyncSandboxClient

    async def run(self, size: int = 2) -> list[str]:
        """Roll out one group; return the trajectories that were scored."""
        return [record.trajectory_id for record in await self.groups.run("item", size, only_terminal, group_id="g")]

    async def held(self) -> int:
        """Return how many leases of the run the service has."""
        return len((await self.client.leases(run_id=self.pool.run_id)).leases)


@asynccontextmanager
async def rollouts(
    service: Service,
    hooks: Hooks | None = None,
    *,
    answers: Sequence[dict[str, Any]] = (),
    before_answer: Action = nothing,
    max_attempts: int = 3,
    pool: str = "default",
    acquire_timeout_s: float = 30,
    **settings: Any,
) -> AsyncIterator[Rollouts]:
    """Connect to the default pool of a service, and check at the end that no slot is left."""
    hooks = hooks or Hooks()

    @asynccontextmanager
    async def open_model(schemas: Schemas) -> AsyncIterator[OpenedModel]:
        yield PlayedModel(answers, before_answer), estimate_tokens

    request = PoolRequest(name=pool, spec=None, acquire_timeout_s=acquire_timeout_s)
    async with PoolConnection(request, ConnectionSettings(sandbox_url=service.url, sandbox_token=service.token)) as connection:
        statistics = RolloutStatistics()
        trajectories = TrajectoryRunner(connection, hooks, TrajectorySettings(loop=AgentLoopSettings(max_turns=5), **settings), open_model)
        groups = GroupRunner(connection, trajectories, statistics, max_attempts=max_attempts)
        async with AsyncSandboxClient(service.url, service.token) as client:
            opened = Rollouts(connection, hooks, statistics, groups, client)
            yield opened
            assert await opened.held() == 0


def kill_sandboxes(service: Service, sandbox_id: str = "*") -> None:
    """Kill the agent of a sandbox, or of all."""
    for record in service.state_dir.glob(f"sandboxes/{sandbox_id}/handle.json"):
        with suppress(ProcessLookupError, FileNotFoundError):  # it is dead already
            os.kill(json.loads(record.read_text(encoding="utf-8"))["data"]["pid"], signal.SIGKILL)


class OnceFor:
    """An action that happens only once, for the first trajectory that comes.

    Args:
        action: the action.
    """

    def __init__(self, action: Action) -> None:
        self._action = action
        self.happened = False

    async def __call__(self, trajectory_id: str) -> None:
        if not self.happened:
            self.happened = True
            await self._action(trajectory_id)


class Pause:
    """An action that stops every trajectory until the test is over."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()

    async def __call__(self, trajectory_id: str) -> None:
        self.reached.set()
        await asyncio.Event().wait()
