"""The base of all environments: atroposlib's `BaseEnv` on the slots of a sandbox service. This is the only module that imports atroposlib."""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # no torch is needed, and its absence no news

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer
from pydantic import Field
from tenacity import RetryError

from environments.agent_loop import AgentLoopSettings, AgentResult
from environments.conversation.answers import Message
from environments.dataset_rows import Rows, UnusableRow, load_rows, refuse_row_image
from environments.env_settings import (
    AgentEnvSettings,
    complete_servers,
    explained_errors,
    load_env_file,
    model_server_of_environ,
    phase_of_servers,
    settings_of_environ,
    take_api_key,
)
from environments.model_access.managed_model import ManagedModel
from environments.model_access.model_probe import wait_for_model_server
from environments.model_access.model_watch import ModelServerWatch, WatchedManagedModel, WatchedModel
from environments.model_access.response_limits import bound_answers
from environments.model_access.tokenization import ConversationTokens
from environments.model_access.tokenizer_source import check_tokenizer
from environments.model_access.trajectory_tokens import TrajectoryTokens, tokens_of_state
from environments.process_control import SCORING_THREAD_PREFIX, remove_if_empty, run_cli, run_until_failure, terminable
from environments.rollouts.cancellation import finish_despite_cancellation
from environments.rollouts.collector import GroupCollector, RunFailed
from environments.rollouts.evaluation import evaluate_items
from environments.rollouts.exec_tool import ExecTool, RunEndingFault
from environments.rollouts.group import GroupRunner
from environments.rollouts.item_queue import PutBackItems, item_key
from environments.rollouts.pool_spec import SettingsError
from environments.rollouts.recordings import find_recordings_folder
from environments.rollouts.scored_items import describe_recordings, make_group, render_conversation
from environments.rollouts.scoring import compute_reward_in_slot
from environments.rollouts.service import PoolConnection, PoolUnavailable
from environments.rollouts.statistics import RolloutStatistics
from environments.rollouts.summary_table import print_summary
from environments.rollouts.trajectory import OpenedModel, Schemas, TrajectoryRecord, TrajectoryRunner, TrajectorySettings
from environments.run_progress import RunProgress
from environments.tool_call_translator import ToolCallTranslator
from environments.tool_context import ToolContext
from environments.toolsets import ToolsetError

log = logging.getLogger(__name__)

#: How long a run waits for a model server that does not answer, in seconds. A trainer that serves the model itself may need minutes to start it.
_MODEL_WAIT_S = {"serve": 600.0, "process": 10.0, "evaluate": 10.0}
#: How many plain reward functions run at once.
_SCORING_THREADS = 64


class HermesAgentEnvConfig(AgentEnvSettings, BaseEnvConfig):  # type: ignore[misc]  # atroposlib has no types
    """The settings of an environment: atroposlib's own, and those of `AgentEnvSettings`."""

    use_wandb: bool = False
    wandb_name: str | None = None

    def __rich_repr__(self) -> Iterator[tuple[str, Any, Any]]:
        """Show the settings that differ from their defaults. atroposlib prints the settings at the start of `process` and `evaluate`."""
        for name, field in type(self).model_fields.items():
            if field.repr:
                yield name, getattr(self, name), field.get_default(call_default_factory=True)

    # Fields of atroposlib, which accepts every number for them, and then fails in the middle of the run or never ends.
    group_size: int = Field(default=4, ge=1, description="How many rollouts a group has")
    total_steps: int = Field(default=1000, ge=1, description="How many groups `process` rolls out, and how many steps `serve` runs")
    max_token_length: int = Field(default=2048, ge=1, description="Most tokens of a rollout")
    max_eval_workers: int = Field(default=16, ge=1, description="How many items `evaluate` rolls out at the same time")


class HermesAgentBaseEnv(BaseEnv):  # type: ignore[misc]  # atroposlib has no types
    """An environment whose model uses tools in slots. A subclass gives the items, prepares the workspaces and scores the rollouts."""

    name = "hermes_agent"
    env_config_cls = HermesAgentEnvConfig
    #: The key of the model server on the command line of this process, which atroposlib does not get to see.
    command_line_api_key: str | None = None

    def __init__(self, config: HermesAgentEnvConfig, server_configs: Any, slurm: bool = False, testing: bool = False) -> None:
        if config.wandb_name is None:  # the trainer's API requires a name, also without Weights & Biases
            config.wandb_name = self.name
        self._phase = phase_of_servers(server_configs)
        config.check_service_address()
        with explained_errors(config.tokenizer_name):
            check_tokenizer(config.tokenizer_name, self.name)
            super().__init__(config, complete_servers(server_configs, config.tokenizer_name, self.command_line_api_key), slurm, testing)
        bound_answers(self.server.servers)
        self.statistics = RolloutStatistics()
        self._progress = RunProgress(self.name, self.statistics)
        self.eval_metrics: list[tuple[str, float]] = []
        self.pool = PoolConnection(config.plan_pool(), config.connection_settings())
        self._put_back = PutBackItems(item_key, config.max_put_backs)
        self._toolsets = config.toolset_settings()
        self._rows: Rows | None = None
        self._next_row = 0
        self._group_number = 0
        self._command = "process"
        self._began_s = time.monotonic()
        self._failure: asyncio.Future[None] | None = None
        self._collector: GroupCollector | None = None
        self._watch: ModelServerWatch | None = None
        self._scoring_threads = ThreadPoolExecutor(_SCORING_THREADS, thread_name_prefix=SCORING_THREAD_PREFIX)
        self._conversation_tokens = ConversationTokens(copy.deepcopy(self.tokenizer), config.tool_call_parser, tokenize_for_trainer)

    # Hooks of an environment.

    async def setup_data(self) -> None:
        """Open the data. The default opens `dataset_name`, if there is one."""
        if self.config.dataset_name is not None:
            self._rows = await asyncio.to_thread(load_rows, self.config.dataset_name, split=self.config.dataset_split)

    async def next_item(self) -> Any:
        """Return the next new item, or None if there is none. The default goes through the rows of the data set again and again, without unusable ones."""
        rows = self._rows or ()
        for _ in range(len(rows)):
            number, self._next_row = self._next_row % len(rows), self._next_row + 1
            try:
                item = rows[number]
            except UnusableRow as error:
                self.statistics.record_unusable_row(f"number {number}", str(error))
                continue
            if not self.is_excluded(item):
                return item
        return None

    def is_excluded(self, item: Any) -> bool:
        """Return whether an item must not be used again, because it is unusable or its groups came to nothing too often."""
        return self._put_back.is_excluded(item)

    async def evaluation_items(self) -> Sequence[Any]:
        """Return the items of `evaluate`. The default takes the first ones that `next_item` gives."""
        items: dict[Any, Any] = {}
        while len(items) < self.config.eval_item_count:
            item = await self.next_item()
            if item is None or item_key(item) in items:
                break
            items[item_key(item)] = item
        return list(items.values())

    async def setup_trajectory_workspace(self, item: Any, *, trajectory_id: str, exec_tool: ExecTool) -> dict[str, Any]:
        """Prepare the workspace of a trajectory, and return metadata for the later hooks. The default does nothing."""
        return {}

    def sealed_entries(self, item: Any, workspace_meta: dict[str, Any]) -> Sequence[str]:
        """Return the names at the top of the workspace that the model cannot change. The default is none."""
        return ()

    def build_messages(self, item: Any) -> list[Message]:
        """Return the first messages: the system prompt, if there is one, and the item's prompt.

        Raises:
            UnusableRow: the item has no prompt, or names an image.
        """
        if isinstance(item, Mapping):
            refuse_row_image(item, self.config.row_image)
        prompt = item.get(self.config.prompt_field) if isinstance(item, Mapping) else None
        if not isinstance(prompt, str) or not prompt:
            raise UnusableRow(f"the row has no text in the column {self.config.prompt_field!r} (prompt_field)")
        system = [{"role": "system", "content": self.config.system_prompt}] if self.config.system_prompt else []
        return [*system, {"role": "user", "content": prompt}]

    async def verify_and_score_trajectory(
        self, item: Any, result: AgentResult, *, trajectory_id: str, exec_tool: ExecTool, workspace_meta: dict[str, Any]
    ) -> tuple[float, dict[str, Any]]:
        """Return the reward of a trajectory, and metadata about it. The default calls `compute_reward`, in a thread if it is a plain function."""
        context = ToolContext(self.pool.thread_client, exec_tool.lease.info)
        return await compute_reward_in_slot(self.compute_reward, item, result, context, self._scoring_threads), {}

    def compute_reward(self, item: Any, result: AgentResult, context: ToolContext) -> Any:
        """Return the reward of a trajectory. It may also be a coroutine function."""
        raise NotImplementedError(f"{type(self).__name__} must define compute_reward or verify_and_score_trajectory")

    # What atroposlib calls.

    @classmethod
    def config_init(cls) -> tuple[HermesAgentEnvConfig, list[Any]]:
        """Return the settings that environment variables and the `.env` file beside the environment give."""
        load_env_file(Path(inspect.getfile(cls)))
        return cls.env_config_cls(**{**cls.default_settings(), **settings_of_environ()}), [APIServerConfig(**model_server_of_environ())]

    @classmethod
    def default_settings(cls) -> dict[str, Any]:
        """Return the settings whose defaults differ in this environment."""
        return {}

    @classmethod
    def cli(cls) -> None:
        """Run the command line. What a person can repair ends in one sentence, with an exit code other than 0."""
        cls.command_line_api_key = take_api_key(sys.argv)
        run_cli(super().cli, cls.name)

    async def setup(self) -> None:
        """Open the data, find the model server, and connect to the pool.

        Raises:
            RunFailed: the model server does not answer.
            PoolUnavailable: there is no pool.
            DatasetError: the data cannot be read.
        """
        await self.setup_data()
        await self._wait_for_model_server()
        await self.pool.open()

    async def get_next_item(self) -> Any:
        """Return the next item: one that was put back, else a new one; None if there is none.

        Raises:
            RunFailed: there are no items, and no group was complete.
        """
        item = self._put_back.take()
        if item is None:
            item = await self.next_item()
        if item is None and not self.statistics.total.group_count and not self.running_items:
            raise RunFailed(f"no row could be used: {self._why_no_row()}")
        return item

    async def collect_trajectories(self, item: Any) -> tuple[ScoredDataGroup | None, list[Any]]:
        """Roll out a group of the item, or of the next one if it comes to nothing. The result is None only if there are no more items."""
        try:
            records = await self._group_collector().collect(item, self.config.group_size, self._select_tools)
        except (PoolUnavailable, RunFailed, SettingsError, ToolsetError) as error:
            if self._failure is not None and not self._failure.done():  # atroposlib logs exceptions of its workers and goes on
                self._failure.set_exception(error)
            raise
        if records is None:
            return None, []
        group, cut_count = make_group(records, self._max_tokens)
        if self._command == "process" and any(record.recording is not None for record in records):  # the trainer's API has no such field
            group["recordings"] = describe_recordings(records)
        self.statistics.count(cut_count=cut_count)
        self._keep_rollouts(records)
        if not self.config.include_messages:
            group.pop("messages")
        return ScoredDataGroup(**group), []

    async def evaluate(self, *args: Any, **options: Any) -> None:
        """Roll out each evaluation item once, and report the mean reward and the part of rewards of at least 1."""
        began_s = time.time()
        items = await self.evaluation_items()
        if self._command == "evaluate":
            self._progress.total_count, self._progress.unit = len(items), "items"
        try:
            evaluation = await evaluate_items(self._group_runner(), items, self._select_tools, self.statistics, max_concurrent=self.config.max_eval_workers)
        except RunEndingFault as error:
            raise RunFailed(error.message) from error
        except (PoolUnavailable, SettingsError, ToolsetError) as error:
            if self._failure is not None and not self._failure.done():  # in `serve` nobody waits for this task
                self._failure.set_exception(error)
            raise
        self.eval_metrics = list(evaluation.metrics.items())
        if self.config.data_dir_to_save_evals is not None:
            await self.evaluate_log(evaluation.metrics, start_time=began_s, end_time=time.time(), samples=evaluation.samples, verbose=False)
        if self._command == "serve":
            await self.wandb_log({})
        elif not evaluation.samples:
            raise RunFailed(f"no item could be evaluated: {self._why_no_row()}")

    async def process_manager(self) -> None:
        """Roll out `total_steps` groups and write them to a file."""
        self._progress.total_count = self.config.total_steps
        async with self._running("process"):
            await super().process_manager()

    async def _run_evaluate(self) -> None:
        async with self._running("evaluate"):
            await super()._run_evaluate()

    async def env_manager(self) -> None:
        """Roll out groups for a trainer, until it has enough."""
        async with self._running("serve"):
            self._failure = asyncio.get_running_loop().create_future()
            try:
                await run_until_failure(super().env_manager(), self._failure)
            except RetryError as error:
                reason = error.last_attempt.exception()
                raise RunFailed(f"rollout_server_url: the trainer's API at {self.config.rollout_server_url} does not answer: {reason}") from error

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        """Report metrics to Weights & Biases."""
        metrics = {**(wandb_metrics or {}), **self.statistics.take_metrics(), **dict(self.eval_metrics)}
        self.eval_metrics = []
        await super().wandb_log(metrics)

    async def add_rollouts_for_wandb(self, scored_data: Any, item: Any = None) -> None:
        """Do nothing: the rollouts of the group are kept already, as conversations instead of decoded tokens."""

    # What happens in a run.

    @asynccontextmanager
    async def _running(self, command: str) -> AsyncIterator[None]:
        """Run a command, and release everything at its end, however it ends."""
        self._command, self._began_s = command, time.monotonic()
        with terminable(), nullcontext() if command == "serve" else self._progress.reporting():
            try:
                yield
            except BaseException as error:  # also cancellation, SystemExit and KeyboardInterrupt: no slot stays
                await finish_despite_cancellation(self._end_run())
                if isinstance(error, asyncio.CancelledError):
                    for note in filter(None, (self.pool.describe_end(), self._describe_groups_file())):
                        error.add_note(note)  # for the sentence with which the process ends
                self._print_summary(only_if_begun=True)
                raise
            await finish_despite_cancellation(self._end_run())
        self._print_summary()

    def _print_summary(self, *, only_if_begun: bool = False) -> None:
        """Print what the rollouts of `process` or `evaluate` have come to so far; with `only_if_begun`, only if one has ended."""
        if self._command != "serve" and (self.statistics.total.has_ended_rollouts or not only_if_begun):
            print_summary(self.statistics.total, time.monotonic() - self._began_s, dict(self.eval_metrics), self._describe_groups_file())

    def _describe_groups_file(self) -> str:
        """Return where the groups of the run are, as a part of a sentence; empty if none was written."""
        path = self.config.data_path_to_save_groups
        return f"the groups are in {path}" if path is not None and Path(path).is_file() else ""

    async def _end_run(self) -> None:
        """End the workers, release the slots of the run, and close the files."""
        tasks = [task for task in (*self.workers, *self.eval_workers, self.eval_runner) if task is not None and not task.done()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self.pool.aclose()
        for server in self.server.servers:
            if getattr(server, "openai", None) is not None:  # atroposlib never closes its connections
                await server.openai.close()
        self._scoring_threads.shutdown(wait=False, cancel_futures=True)
        self._conversation_tokens.close()
        if self.jsonl_writer is not None:
            self.jsonl_writer.close()
            remove_if_empty(Path(self.config.data_path_to_save_groups))

    async def _wait_for_model_server(self) -> None:
        """Wait until the model server answers.

        Raises:
            RunFailed: it does not, for as long as this command waits.
        """
        for server in self.server.servers[:1]:
            problem = await wait_for_model_server(server.config.base_url, _MODEL_WAIT_S[self._command])
            if problem is not None:
                raise RunFailed(f"openai.base_url: {problem}")

    def _why_no_row(self) -> str:
        unusable = self.statistics.total.unusable_rows
        if unusable:
            row, reason = next(iter(unusable.items()))
            return f"unusable rows: {len(unusable)}, such as {row}: {reason}"
        if self.statistics.latest_fault is not None:
            return f"every group came to nothing; the last one because of: {self.statistics.latest_fault.message}"
        return "there is none; set dataset_name"

    @property
    def _max_tokens(self) -> int:
        """The most tokens of a trajectory. A trainer takes only those that are shorter than its own maximum."""
        most = int(self.config.max_token_length)
        return min(most, self.max_token_len - 1) if self.max_token_len > 0 else most

    def _group_collector(self) -> GroupCollector:
        if self._collector is None:
            self._collector = GroupCollector(
                self._group_runner(),
                self._put_back,
                self.statistics,
                next_item=self.get_next_item,
                wait_for_model_server=self._wait_for_model_server,
                max_lost_groups=self.config.max_lost_groups,
            )
        return self._collector

    def _group_runner(self) -> GroupRunner:
        config = self.config
        loop = AgentLoopSettings(
            max_turns=config.max_agent_turns,
            temperature=config.agent_temperature,
            max_tokens=config.agent_max_tokens,
            tool_delay_s=config.agent_tool_delay_s,
            max_context_tokens=self._max_tokens,
            shortens_context=self._phase == 1,
        )
        settings = TrajectorySettings(
            loop=loop,
            allow_network=config.allow_network,
            tool_timeout_s=config.tool_timeout_s,
            hook_timeout_s=config.hook_timeout_s,
            recordings_folder=find_recordings_folder(config.recordings_folder, config.data_path_to_save_groups),
        )
        trajectories = TrajectoryRunner(self.pool, self, settings, self._open_model, self._tokenize)
        return GroupRunner(self.pool, trajectories, self.statistics, max_attempts=config.max_rollout_attempts)

    async def _select_tools(self) -> Sequence[str]:
        self._group_number += 1
        return self._toolsets.select_tools(str(self._group_number), await self.pool.fetch_available_tools()).tools

    @asynccontextmanager
    async def _open_model(self, schemas: Schemas) -> AsyncIterator[OpenedModel]:
        """Open the model server for one trajectory."""
        if self._watch is None:
            self._watch = ModelServerWatch(self.server.servers[0].config.base_url, _MODEL_WAIT_S[self._command])
        if self._phase == 1:
            yield WatchedModel(self.server, self._watch), self._conversation_tokens.counter(schemas, self._max_tokens)
            return
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            translator = ToolCallTranslator.for_tokenizer(self.config.tool_call_parser, self.tokenizer)
            model = ManagedModel(managed, translator, self.tokenizer, schemas, self._max_tokens)
            yield WatchedManagedModel(model, self._watch), model.count_tokens

    async def _tokenize(self, result: AgentResult, schemas: Schemas) -> TrajectoryTokens:
        if self._phase == 2:
            return tokens_of_state(result.managed_state)
        return await self._conversation_tokens.tokenize(result.messages, schemas)

    def _keep_rollouts(self, records: Sequence[TrajectoryRecord]) -> None:
        """Keep some rollouts of a group for Weights & Biases, as readable conversations."""
        count = self.config.num_rollouts_per_group_for_logging
        kept = records if count == -1 else records[:count]
        self.rollouts_for_wandb.append([(render_conversation(record.result.messages), record.reward) for record in kept if record.result is not None])
        del self.rollouts_for_wandb[: -self.config.num_rollouts_to_keep]
