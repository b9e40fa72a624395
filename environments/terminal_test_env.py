"""A few small tasks without data set and network: the smoke test of a whole installation.

`python environments/terminal_test_env.py process --env.total_steps 3 --env.group_size 2 --openai.base_url URL --openai.model_name NAME`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from environments.agent_loop import AgentResult
from environments.hermes_base_env import HermesAgentBaseEnv
from environments.rollouts.exec_tool import ExecTool
from environments.tool_context import ToolContext


@dataclass(frozen=True, kw_only=True, slots=True)
class TerminalTask:
    """A task in the workspace.

    Args:
        task_id: the name of the task.
        prompt: what the model is asked to do.
        files: the files of the workspace at the beginning, by path.
        expected: the content of each file at the end, without whitespace around it; None for a file that must not be there.
    """

    task_id: str
    prompt: str
    files: dict[str, str] = field(default_factory=dict)
    expected: dict[str, str | None]


TASKS = (
    TerminalTask(
        task_id="write-file",
        prompt="Create the file greeting.txt in the workspace. It must contain exactly this line: Hello from the sandbox",
        expected={"greeting.txt": "Hello from the sandbox"},
    ),
    TerminalTask(
        task_id="count-lines",
        prompt="Count the lines of the file numbers.txt and write only the number into the file count.txt.",
        files={"numbers.txt": "".join(f"{number * 7}\n" for number in range(137))},
        expected={"count.txt": "137"},
    ),
    TerminalTask(
        task_id="sum-column",
        prompt="The file orders.csv has a header line. Add up the column amount and write only the sum into the file total.txt.",
        files={"orders.csv": "item,amount\npen,3\nbook,12\nlamp,27\n"},
        expected={"total.txt": "42"},
    ),
    TerminalTask(
        task_id="move-files",
        prompt="Move all files that end with .log from the workspace into a new folder named archive. Leave the other files where they are.",
        files={"a.log": "first\n", "b.log": "second\n", "keep.txt": "stay\n"},
        expected={"archive/a.log": "first", "archive/b.log": "second", "a.log": None, "b.log": None, "keep.txt": "stay"},
    ),
)


class TerminalTestEnv(HermesAgentBaseEnv):
    """Gives the model one of `TASKS` after another. The reward is the part of the expected files that are right at the end."""

    name = "terminal_test"

    @classmethod
    def default_settings(cls) -> dict[str, Any]:
        """Return settings with which a small task fits into the context."""
        return {
            "max_token_length": 8192,
            "max_agent_turns": 10,
            "system_prompt": "You work in a sandbox. Use the tools to do the task, and then answer with one sentence.",
        }

    async def next_item(self) -> TerminalTask | None:
        """Return the tasks in turn, or None if none of them can be used."""
        for _ in TASKS:
            task = TASKS[self._next_row % len(TASKS)]
            self._next_row += 1
            if not self.is_excluded(task):
                return task
        return None

    async def evaluation_items(self) -> Sequence[TerminalTask]:
        """Return every task once."""
        return TASKS[: self.config.eval_item_count]

    def build_messages(self, item: TerminalTask) -> list[dict[str, Any]]:
        """Return the system prompt and the task."""
        return super().build_messages({self.config.prompt_field: item.prompt})

    async def setup_trajectory_workspace(self, item: TerminalTask, *, trajectory_id: str, exec_tool: ExecTool) -> dict[str, Any]:
        """Write the files of the task."""
        for path, content in item.files.items():
            result = await exec_tool("write_file", {"path": path, "content": content})
            if not result.success:
                raise RuntimeError(f"the file {path} of the task {item.task_id} could not be written: {result.error}")
        return {}

    def compute_reward(self, item: TerminalTask, result: AgentResult, context: ToolContext) -> float:
        """Return the part of the expected files that are right. Without a tool call it is 0, whatever the workspace has been from the beginning."""
        if not result.tool_calls_attempted:
            return 0.0
        right = sum(_is_right(context.read_file(path), expected) for path, expected in item.expected.items())
        return right / len(item.expected)


def _is_right(read: dict[str, Any], expected: str | None) -> bool:
    content = read.get("content")
    return content is None if expected is None else content is not None and content.strip() == expected


if __name__ == "__main__":
    TerminalTestEnv.cli()
