"""One trajectory in one slot: set-up, narrowing, the agent loop, and scoring."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from env_client import AsyncLease, FileError, FileNotFound, InvalidRequest, NotImplementedYet, SandboxError, SlotTools, tool_schemas
from environments.agent_loop import AgentLoop, AgentLoopSettings, AgentResult, ChatServer, ModelRequestFailed
from environments.conversation.answers import Message
from environments.conversation.context import TokenCounter
from environments.dataset_rows import UnusableRow
from environments.model_access.model_watch import ModelServerGone
from environments.model_access.trajectory_tokens import TokensUnusable, TrajectoryTokens
from environments.rollouts.exec_tool import ExecTool, RolloutFault, RunEndingFault
from environments.rollouts.recordings import KeptRecording, keep_recording, recording_file_name
from environments.rollouts.scoring import check_reward
from environments.rollouts.service import PoolConnection, PoolUnavailable
from environments.rollouts.tool_handler import SlotToolHandler, find_rollout_fault, has_policy_fault

log = logging.getLogger(__name__)

V = TypeVar("V")

#: The reason of a fault whose cause is an exception of a hook.
HOOK_RAISED = "hook_raised"
#: The reason of a fault whose cause is a hook that does not end.
HOOK_TIMEOUT = "hook_timeout"
#: The reason of a fault whose cause is the model server.
MODEL_SERVER = "model_server"
#: How long the set-up or the scoring of a trajectory may take, in seconds.
DEFAULT_HOOK_TIMEOUT_S = 3600.0
#: The phases of a trajectory whose time is measured.
PHASES = ("acquire", "set-up", "narrow", "model", "tools", "scoring", "release")


class RolloutHooks(Protocol):
    """What an environment decides about its trajectories."""

    async def setup_trajectory_workspace(self, item: Any, *, trajectory_id: str, exec_tool: ExecTool) -> dict[str, Any]:
        """Prepare the workspace. The slot has the set-up cache, and the network of the pool. Returns the metadata for the later hooks."""

    def sealed_entries(self, item: Any, workspace_meta: dict[str, Any]) -> Sequence[str]:
        """Return the names at the top of the workspace that the model cannot change."""

    def build_messages(self, item: Any) -> list[Message]:
        """Return the first messages of the conversation."""

    async def verify_and_score_trajectory(
        self, item: Any, result: AgentResult, *, trajectory_id: str, exec_tool: ExecTool, workspace_meta: dict[str, Any]
    ) -> tuple[float, dict[str, Any]]:
        """Return the reward of the trajectory, and metadata about it."""


#: The schemas of the tools that the model may call.
Schemas = Sequence[Mapping[str, Any]]
#: A model server for one trajectory, and what counts the tokens of its conversation.
OpenedModel = tuple[ChatServer, TokenCounter]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrajectorySettings:
    """How trajectories are rolled out.

    Args:
        loop: how the agent loop asks the model.
        allow_network: whether the model has the network of the pool.
        tool_timeout_s: the timeout of a model's tool call, in seconds; None for the default of the pool.
        hook_timeout_s: how long the set-up, and how long the scoring, of a trajectory may take, in seconds.
        recordings_folder: the folder for the recordings of terminals; None if they are not kept.
    """

    loop: AgentLoopSettings
    allow_network: bool = True
    tool_timeout_s: float | None = None
    hook_timeout_s: float = DEFAULT_HOOK_TIMEOUT_S
    recordings_folder: Path | None = None


@dataclass(slots=True)
class TrajectoryRecord:
    """What is known about one attempt at a trajectory, however it ends.

    Args:
        trajectory_id: the trajectory.
        phase_s: how long each phase took, in seconds.
        result: what the agent loop returned; None as long as it has not.
        tool_faults: how many tool calls ended with each fault and reason.
        reward: the reward; None if the trajectory was not scored.
        score_meta: what the scoring said about the reward.
        tokens: the tokens, if they were asked for.
        ambiguous_but_scored: whether it was scored despite an `ambiguous` fault, because a call of it was refused for the policy's sake.
        recording: what became of the recording of its terminal; None if it has used none, or if recordings are not kept.
    """

    trajectory_id: str
    phase_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    result: AgentResult | None = None
    tool_faults: Counter[tuple[str, str]] = field(default_factory=Counter)
    reward: float | None = None
    score_meta: Mapping[str, Any] = field(default_factory=dict)
    tokens: TrajectoryTokens | None = None
    ambiguous_but_scored: bool = False
    recording: KeptRecording | None = None

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Add the duration of a block to a phase."""
        began_s = time.monotonic()
        try:
            yield
        finally:
            self.phase_s[phase] += time.monotonic() - began_s


class TrajectoryRunner:
    """Rolls out trajectories, each in a slot that the caller holds.

    Args:
        pool: the connection to the pool.
        hooks: the environment.
        settings: how trajectories are rolled out.
        open_model: opens the model server for one trajectory with these tools.
        tokenize: returns the tokens of what the agent loop returned; None if nobody needs them.
    """

    def __init__(
        self,
        pool: PoolConnection,
        hooks: RolloutHooks,
        settings: TrajectorySettings,
        open_model: Callable[[Schemas], AbstractAsyncContextManager[OpenedModel]],
        tokenize: Callable[[AgentResult, Schemas], Awaitable[TrajectoryTokens]] | None = None,
    ) -> None:
        self._pool = pool
        self._hooks = hooks
        self._settings = settings
        self._open_model = open_model
        self._tokenize = tokenize
        self._sealing_refused = False
        #: The schemas of each selection of tools that was offered to a model. All its trajectories share them, and nothing changes them.
        self._schemas: dict[tuple[str, ...], Schemas] = {}

    async def run(self, item: Any, lease: AsyncLease, tools: Sequence[str], record: TrajectoryRecord) -> None:
        """Roll out and score one trajectory. What is known about it is written to `record`, however it ends.

        Args:
            item: the item.
            lease: the slot; the caller releases it.
            tools: the names of the tools that the model may call.
            record: what becomes known.

        Raises:
            RolloutFault: the trajectory failed through no fault of the model, and must not be scored.
            RunEndingFault: the same, and so would every other trajectory.
            UnusableRow: the item itself is bad.
            PoolUnavailable: the pool cannot do what the settings ask for.
        """
        exec_tool = self._pool.make_exec_tool(lease)
        with record.measure("set-up"), _hook_errors("setup_trajectory_workspace"):
            async with self._hook_timeout("setup_trajectory_workspace"):
                workspace_meta = await self._hooks.setup_trajectory_workspace(item, trajectory_id=record.trajectory_id, exec_tool=exec_tool)
        with record.measure("narrow"):
            await self._narrow(item, exec_tool, workspace_meta)
        handler = await self._run_agent(item, lease, tools, record)
        result = record.result
        assert result is not None
        fault = find_rollout_fault(result, handler)
        if fault is not None:
            raise fault
        if self._tokenize is not None:
            with _token_errors():
                record.tokens = await self._tokenize(result, self._offered_schemas(tools))
        if handler.recording is not None and self._settings.recordings_folder is not None:
            with record.measure("tools"):
                target = self._settings.recordings_folder / recording_file_name(record.trajectory_id)
                record.recording = await keep_recording(lease, handler.recording, target)
        if handler.lost_by_policy:  # there is no slot in which the trajectory could be scored
            record.reward, record.score_meta = 0.0, {"sandbox_lost": True}
            return
        with record.measure("scoring"), _hook_errors("verify_and_score_trajectory"):
            async with self._hook_timeout("verify_and_score_trajectory"):
                reward, record.score_meta = await self._hooks.verify_and_score_trajectory(
                    item, result, trajectory_id=record.trajectory_id, exec_tool=exec_tool, workspace_meta=workspace_meta
                )
            reward = check_reward(reward)
        if exec_tool.ambiguous_reasons and not has_policy_fault(result):
            reason = exec_tool.ambiguous_reasons[0]
            raise RolloutFault(f"a call of a hook ended with {reason}, and who caused that is not known", reason=reason, fault="ambiguous")
        record.ambiguous_but_scored = handler.ambiguous is not None or bool(exec_tool.ambiguous_reasons)
        record.reward = reward

    def _offered_schemas(self, tools: Sequence[str]) -> Schemas:
        """Return the schemas of a selection of tools, which are made once."""
        names = tuple(tools)
        if names not in self._schemas:
            self._schemas[names] = tuple(tool_schemas(names))
        return self._schemas[names]

    @asynccontextmanager
    async def _hook_timeout(self, hook: str) -> AsyncIterator[None]:
        """Cancel a hook that takes too long.

        Raises:
            RolloutFault: it did.
        """
        timeout_s = self._settings.hook_timeout_s
        try:
            async with asyncio.timeout(timeout_s) as limit:
                yield
        except TimeoutError as error:
            if not limit.expired():  # the hook itself raised it
                raise
            raise RolloutFault(f"{hook} did not end within {timeout_s:g} s (hook_timeout_s)", reason=HOOK_TIMEOUT) from error

    async def _narrow(self, item: Any, exec_tool: ExecTool, workspace_meta: dict[str, Any]) -> None:
        """Take away what only the set-up may have, and seal what the model must not change."""
        with _hook_errors("sealed_entries"):
            entries = tuple(self._hooks.sealed_entries(item, workspace_meta))
        network = None if self._settings.allow_network else False
        if entries and not self._sealing_refused:
            try:
                await exec_tool.narrow(cache="none", allow_network=network, read_only=entries)
            except NotImplementedYet as error:
                self._sealing_refused = True
                log.warning("the slots of pool %s cannot make %s read-only: %s", self._pool.request.name, ", ".join(entries), error.detail)
            else:
                exec_tool.sealed = True
                return
        try:
            await exec_tool.narrow(cache="none", allow_network=network)
        except NotImplementedYet as error:
            raise PoolUnavailable(f"allow_network: the slots of pool {self._pool.request.name!r} cannot be narrowed: {error.detail}") from error

    async def _run_agent(self, item: Any, lease: AsyncLease, tools: Sequence[str], record: TrajectoryRecord) -> SlotToolHandler:
        timeout_s = self._settings.tool_timeout_s or self._pool.default_timeout_s
        slot_tools = SlotTools(lease, self._pool.gatherer, timeout_s=timeout_s, tools=tools)
        handler = SlotToolHandler(slot_tools)
        record.tool_faults = handler.faults
        with _hook_errors("build_messages"):
            messages = self._hooks.build_messages(item)
        schemas = self._offered_schemas(tools)
        began_s = time.monotonic()
        try:
            async with self._open_model(schemas) as (server, count_tokens):
                loop = AgentLoop(server, handler, schemas, self._settings.loop, count_tokens=count_tokens)
                result = await loop.run(messages, record.trajectory_id)
        except TokensUnusable as error:  # while the tokens of the next prompt were counted
            raise RolloutFault(str(error), reason=error.reason) from error
        except ModelRequestFailed as error:
            record.phase_s["model"] += time.monotonic() - began_s
            if isinstance(error.__cause__, ModelServerGone):
                raise RunEndingFault(str(error.__cause__), reason=MODEL_SERVER) from error
            raise RolloutFault(str(error), reason=MODEL_SERVER) from error
        if not result.turns_used:  # no other rollout of this item could begin either
            most = self._settings.loop.max_context_tokens
            raise UnusableRow(f"its prompt does not fit into the {most} tokens of a rollout (max_token_length)")
        record.result = result
        record.phase_s["tools"] += result.tool_time_s
        record.phase_s["model"] += max(0.0, time.monotonic() - began_s - result.tool_time_s)
        return handler


@contextmanager
def _token_errors() -> Iterator[None]:
    """Raise `TokensUnusable` as a fault of ours."""
    try:
        yield
    except TokensUnusable as error:
        raise RolloutFault(str(error), reason=error.reason) from error


@contextmanager
def _hook_errors(hook: str) -> Iterator[None]:
    """Raise an exception of a hook as a fault of ours."""
    try:
        yield
    except (RolloutFault, UnusableRow, PoolUnavailable):
        raise
    except SandboxError as error:
        reason = HOOK_RAISED if isinstance(error, InvalidRequest | FileNotFound | FileError) else error.code
        raise RolloutFault(f"{hook}: {error.detail}", reason=reason) from error
    except Exception as error:  # whatever a hook raises, the rollout is not scored
        log.warning("the hook %s raised an exception", hook, exc_info=True)
        raise RolloutFault(f"{hook} raised {type(error).__name__}: {error}", reason=HOOK_RAISED) from error
