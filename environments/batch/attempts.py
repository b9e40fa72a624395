"""One prompt: attempts in new slots, until one of them comes to a trajectory. Only faults of the infrastructure are repeated."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from env_client import AsyncLease, SlotTools
from env_client.tools import tool_schemas
from environments.agent_loop import AgentLoop, AgentLoopSettings, AgentResult, ChatServer, ModelRequestFailed
from environments.batch.failures import RunStopped
from environments.batch.files.prompt_file import Prompt
from environments.batch.model_client import ModelUnavailable, PromptRefused
from environments.batch.rows.sharegpt import describe_tools
from environments.batch.rows.trajectory_row import Rollout
from environments.batch.settings import BatchSettings
from environments.batch.slots import RowRefused, RunSlots, max_timeout_s, tools_of
from environments.rollouts.exec_tool import RolloutFault
from environments.rollouts.recordings import KeptRecording, keep_recording, recording_file_name
from environments.rollouts.tool_handler import SlotToolHandler, find_rollout_fault
from environments.toolsets import ToolsetError, ToolsetSettings

#: The longest delay between two attempts, in seconds.
MAX_DELAY_S = 10.0
#: Why a rollout ended whose slot was ended by the commands of the model.
SANDBOX_LOST = "sandbox_lost"


class PromptFailed(Exception):
    """A prompt has no trajectory.

    Args:
        sentence: what happened.
        reason: the same in one word, for counting.
        is_ours: whether the infrastructure is to blame, and not the row.
    """

    def __init__(self, sentence: str, *, reason: str, is_ours: bool) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.reason = reason
        self.is_ours = is_ours


@dataclass(frozen=True, slots=True)
class _OfferedTools:
    """The tools of a model, as their schemas and as the system message of a trajectory."""

    schemas: tuple[dict[str, Any], ...]
    description: str


class PromptRunner:
    """Rolls out prompts.

    Args:
        settings: the settings of the run.
        slots: the slots of the run.
        model: the model server.
        count_fault: called with the reason of each fault of the infrastructure.
        recordings_folder: the folder for the recordings of terminals.
        sleep: waits; replaced in tests.
    """

    def __init__(
        self,
        settings: BatchSettings,
        slots: RunSlots,
        model: ChatServer,
        count_fault: Callable[[str], None],
        recordings_folder: Path,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._settings = settings
        self._slots = slots
        self._model = model
        self._count_fault = count_fault
        self._recordings_folder = recordings_folder
        self._sleep = sleep
        self._toolsets = ToolsetSettings(distribution=settings.distribution)
        self._offered: dict[tuple[str, ...], _OfferedTools] = {}

    async def run(self, prompt: Prompt, write: Callable[[Rollout], None]) -> None:
        """Roll out a prompt.

        Args:
            prompt: the prompt.
            write: called with the trajectory, before its slot is released.

        Raises:
            PromptFailed: the prompt has no trajectory.
            RunStopped: the run cannot go on.
            PoolUnavailable: the run cannot go on, because it has no pool any more.
        """
        last_fault: RolloutFault | None = None
        for attempt in range(1, self._settings.max_attempts + 1):
            if last_fault is not None:
                await self._sleep(min(MAX_DELAY_S, 0.5 * 2.0 ** (attempt - 2)))
            try:
                await self._attempt(prompt, attempt, write)
            except RolloutFault as fault:
                self._count_fault(fault.reason)
                last_fault = fault
            except RowRefused as error:
                raise PromptFailed(str(error), reason="row_refused", is_ours=False) from error
            else:
                return
        assert last_fault is not None
        sentence = f"{last_fault.message} (attempt {self._settings.max_attempts} of {self._settings.max_attempts})"
        raise PromptFailed(sentence, reason=last_fault.reason, is_ours=True) from last_fault

    async def _attempt(self, prompt: Prompt, attempt: int, write: Callable[[Rollout], None]) -> None:
        async with self._slots.slot(prompt, f"{prompt.prompt_id}-{prompt.occurrence}-{attempt}") as lease:
            began_s = time.monotonic()
            pool = await self._slots.pool_of(lease)
            try:
                selection = self._toolsets.select_tools(f"{prompt.prompt_id}-{prompt.occurrence}", tools_of(pool))
            except ToolsetError as error:
                if prompt.pool is None and prompt.image is None:
                    raise RunStopped(str(error), "choose another --distribution, or a --pool that offers the tools") from error
                raise PromptFailed(str(error), reason="toolset", is_ours=False) from error
            offered = self._offered_tools(selection.tools)
            timeout_s = min(self._settings.tool_timeout_s, max_timeout_s(pool))
            tools = SlotTools(lease, self._slots.gatherer, timeout_s=timeout_s, tools=selection.tools)
            result, end, recording_name = await self._roll_out(prompt, lease, tools, offered.schemas)
            rollout = Rollout(
                result=result,
                end=end,
                system_message=offered.description,
                toolsets=selection.toolsets,
                pool=pool.name,
                attempts=attempt,
                duration_s=time.monotonic() - began_s,
            )
            if recording_name is not None:
                rollout = await self._keep_recording(lease, recording_name, rollout, write)
            # Nothing but its recording is awaited between the end of a rollout and its row, so no cancellation can lose a finished trajectory.
            write(rollout)

    async def _keep_recording(self, lease: AsyncLease, name: str, rollout: Rollout, write: Callable[[Rollout], None]) -> Rollout:
        """Keep the recording of a rollout's terminal. Returns the rollout with what became of it. If this is cancelled, the rollout is written without it."""
        target = self._recordings_folder / recording_file_name(lease.info.trajectory_id or lease.lease_id)
        try:
            kept = await keep_recording(lease, name, target)
        except asyncio.CancelledError:
            write(replace(rollout, recording=KeptRecording(None, "the run was stopped before the recording of the terminal was kept")))
            raise
        return replace(rollout, recording=kept)

    def _offered_tools(self, tools: tuple[str, ...]) -> _OfferedTools:
        """Return the schemas of tools and their description, which are made once for each selection of tools."""
        if tools not in self._offered:
            schemas = tuple(tool_schemas(tools))
            self._offered[tools] = _OfferedTools(schemas, describe_tools(schemas))
        return self._offered[tools]

    async def _roll_out(self, prompt: Prompt, lease: AsyncLease, tools: SlotTools, schemas: Sequence[dict[str, Any]]) -> tuple[AgentResult, str, str | None]:
        """Return what the rollout came to, why it ended, and the name of the recording of its terminal, if it has used one."""
        settings, handler = self._settings, SlotToolHandler(tools)
        loop_settings = AgentLoopSettings(
            max_turns=settings.max_turns,
            temperature=settings.temperature,
            max_tokens=settings.max_tokens,
            max_context_tokens=settings.max_context_tokens,
        )
        loop = AgentLoop(self._model, handler, schemas, loop_settings)
        system = [{"role": "system", "content": settings.ephemeral_system_prompt}] if settings.ephemeral_system_prompt else []
        try:
            result = await loop.run([*system, {"role": "user", "content": prompt.text}], lease.info.trajectory_id or prompt.prompt_id)
        except ModelRequestFailed as error:
            raise _model_failure(error) from error
        fault = infra_fault_of(result, handler)
        if fault is not None:
            raise fault
        return result, SANDBOX_LOST if handler.lost_by_policy else result.end.value, handler.recording


def _model_failure(error: ModelRequestFailed) -> Exception:
    """Return what a failed request to the model server means for the prompt, or for the run."""
    match error.__cause__:
        case ModelUnavailable() as unavailable:
            return unavailable
        case PromptRefused() as refused:
            return PromptFailed(str(refused), reason="model_refused", is_ours=False)
        case cause:
            return RolloutFault(str(cause or error), reason="model_fault")


def infra_fault_of(result: AgentResult, handler: SlotToolHandler) -> RolloutFault | None:
    """Return the fault because of which a rollout must be repeated, or None. The statistics count ambiguous faults by reasons of their own."""
    fault = find_rollout_fault(result, handler)
    if fault is not None and fault is handler.ambiguous:
        return RolloutFault(fault.message, reason=f"ambiguous_{fault.reason}", fault=fault.fault)
    return fault
