"""Fix a bug in a real repository; the tests of the repository decide.

`python environments/swe_smith_oracle_env.py process --env.total_steps 2 --env.group_size 1 --env.max_items 2 --env.tool_pool_mode default`
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from environments.agent_loop import AgentResult
from environments.conversation.answers import Message
from environments.dataset_rows import load_rows, refuse_row_image
from environments.hermes_base_env import HermesAgentBaseEnv, HermesAgentEnvConfig
from environments.rollouts.exec_tool import ExecTool
from environments.swe_smith.repositories import DEFAULT_BASE_URL, RepositoryError, parse_base_url
from environments.swe_smith.row_order import RowOrder
from environments.swe_smith.rows import SweRow, build_prompt, check_row, parse_row
from environments.swe_smith.scoring import Scorer
from environments.swe_smith.set_up import SEALED_ENTRIES, Workspace, WorkspaceSetUp

log = logging.getLogger(__name__)

DEFAULT_DATASET = "NousResearch/SWE-smith-oracle"
SYSTEM_PROMPT = (
    "You are a software engineer. You work in a sandbox: use the tools to read, change and test the source, and end with one sentence on what you did."
)


class SweSmithOracleConfig(HermesAgentEnvConfig):
    """The settings of `swe_smith_oracle`."""

    max_items: int = Field(default=0, ge=0, description="How many rows are used; 0 for all")
    shuffle: bool = Field(default=True, description="Whether the rows are shuffled")
    seed: int = Field(default=0, description="Decides about the order of shuffled rows")
    python_only: bool = Field(default=True, description="Leave out rows whose tests are not all in Python files")
    score_include_fail_to_pass: bool = Field(default=True, description="Whether the tests of FAIL_TO_PASS are run, too, and not PASS_TO_PASS alone")
    prompt_mode: Literal["problem_statement", "text", "problem_statement+text"] = Field(default="problem_statement", description="Which columns the model sees")
    repo_base_url: str = Field(default=DEFAULT_BASE_URL, description="Where repositories are: an https address, or a folder of this machine")
    install_timeout_s: float = Field(default=600.0, gt=0, description="How long the environment of a repository may take to build, in seconds")
    test_timeout_s: float = Field(default=600.0, gt=0, description="How long all tests of a row may take, in seconds")

    @model_validator(mode="after")
    def _check_repositories(self) -> Self:
        try:
            parse_base_url(self.repo_base_url)
        except RepositoryError as error:
            raise ValueError(str(error)) from error
        return self


class SweSmithOracleEnv(HermesAgentBaseEnv):
    """Gives the model a repository with a bug. The reward is 1.0 if its tests pass at the end; see `environments.swe_smith.scoring.reward`."""

    name = "swe_smith_oracle"
    env_config_cls = SweSmithOracleConfig

    def __init__(self, config: SweSmithOracleConfig, server_configs: Any, slurm: bool = False, testing: bool = False) -> None:
        super().__init__(config, server_configs, slurm, testing)
        self._workspaces = WorkspaceSetUp(parse_base_url(config.repo_base_url), install_timeout_s=config.install_timeout_s)
        self._scorer = Scorer(self._workspaces.set_up, include_fail_to_pass=config.score_include_fail_to_pass, test_timeout_s=config.test_timeout_s)
        self._order: RowOrder | None = None

    @classmethod
    def default_settings(cls) -> dict[str, Any]:
        """Return the settings whose defaults differ here, and those of environment variables."""
        return {
            "max_token_length": 16_384,
            "row_image": "never",  # the public rows name images that few backends have
            "system_prompt": SYSTEM_PROMPT,
            "dataset_name": os.environ.get("SWE_SMITH_DATASET") or DEFAULT_DATASET,
            "repo_base_url": os.environ.get("SWE_SMITH_REPO_BASE_URL") or DEFAULT_BASE_URL,
        }

    async def setup_data(self) -> None:
        """Open the data set.

        Raises:
            DatasetError: it cannot be read.
        """
        config = self.config
        if config.allow_network:
            log.warning(
                "allow_network is true: the model can fetch the fix of its bug from the network. Set --env.allow_network false where the pool can do that"
            )
        rows = await asyncio.to_thread(load_rows, config.dataset_name, split=config.dataset_split)
        self._order = RowOrder(rows, self._parse, self._report, max_items=config.max_items, shuffle=config.shuffle, seed=config.seed)

    async def next_item(self) -> Any:
        """Return the next usable row."""
        # Reading and checking rows of a large data set takes long, and other rollouts run meanwhile.
        return None if self._order is None else await asyncio.to_thread(self._order.next, self._put_back.is_excluded)

    def build_messages(self, item: Any) -> list[Message]:
        """Return the system prompt and the problem."""
        refuse_row_image(item, self.config.row_image)
        prompt = build_prompt(parse_row(item), self.config.prompt_mode)
        return super().build_messages({self.config.prompt_field: prompt})

    async def setup_trajectory_workspace(self, item: Any, *, trajectory_id: str, exec_tool: ExecTool) -> dict[str, Any]:
        """Get the repository, and build its environment."""
        return (await self._workspaces.set_up(self._parse(item), exec_tool)).as_meta()

    def sealed_entries(self, item: Any, workspace_meta: dict[str, Any]) -> Sequence[str]:
        """Return the environment and what is kept for scoring."""
        return SEALED_ENTRIES

    async def verify_and_score_trajectory(
        self, item: Any, result: AgentResult, *, trajectory_id: str, exec_tool: ExecTool, workspace_meta: dict[str, Any]
    ) -> tuple[float, dict[str, Any]]:
        """Run the tests."""
        workspace = Workspace.from_meta(workspace_meta)
        return await self._scorer.score(
            self._parse(item),
            exec_tool,
            workspace if exec_tool.sealed else workspace.unsealed(),
            tool_calls=result.tool_calls_attempted,
            valid_calls=result.tool_calls_schema_valid,
        )

    def _parse(self, item: Mapping[str, Any]) -> SweRow:
        """Check a row.

        Raises:
            UnusableRow: it cannot be used with these settings.
        """
        row, config = parse_row(item), self.config
        check_row(row, include_fail_to_pass=config.score_include_fail_to_pass, python_only=config.python_only, prompt_mode=config.prompt_mode)
        return row

    def _report(self, name: str, reason: str) -> None:
        log.warning("left out: %s", reason)
        self.statistics.record_unusable_row(name, reason)

    async def _end_run(self) -> None:
        await super()._end_run()
        self._workspaces.close()


if __name__ == "__main__":
    SweSmithOracleEnv.cli()
