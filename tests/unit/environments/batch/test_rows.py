"""The rows of a run: the ShareGPT form, the same columns in every row, and their sums."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from env_client import ExecutionResult
from env_client.tools import BASE_TOOLS, OPTIONAL_TOOLS, tool_schemas
from environments.agent_loop import AgentLoop, AgentLoopSettings, AgentResult, ToolReply
from environments.batch.attempts import infra_fault_of
from environments.batch.files.prompt_file import Prompt
from environments.batch.files.row_log import RowLog
from environments.batch.rows.sharegpt import describe_tools, to_conversation
from environments.batch.rows.statistics import RunStatistics
from environments.batch.rows.trajectory_row import Rollout, make_trajectory_row
from environments.rollouts.recordings import KeptRecording
from environments.rollouts.tool_handler import SlotToolHandler
from environments.tool_call_parsers import get_parser
from tests.unit.environments.scripted_model import RecordingTools, ScriptedModel, call, response

SCHEMAS = tool_schemas(("terminal", "read_file"))


def roll_out(*answers: Any, replies: tuple[Any, ...] = (), max_turns: int = 10) -> AgentResult:
    loop = AgentLoop(ScriptedModel(*answers), RecordingTools(*replies), SCHEMAS, AgentLoopSettings(max_turns=max_turns))
    return asyncio.run(loop.run([{"role": "system", "content": "secret"}, {"role": "user", "content": "Fix it."}], "t"))


def make_row(result: AgentResult, recording: KeptRecording | None = None, **prompt: Any) -> dict[str, Any]:
    made = Prompt(**{"line": 1, "text": "Fix it.", "pool": None, "image": None, "other_members": "{}", "prompt_id": "00ff", "occurrence": 0, **prompt})
    rollout = Rollout(
        result=result,
        end=result.end.value,
        system_message=describe_tools(SCHEMAS),
        toolsets=("terminal",),
        pool="default",
        attempts=1,
        duration_s=2,
        recording=recording,
    )
    return make_trajectory_row(made, rollout, run_name="run", model="m", now_s=0.0)


def test_a_conversation_in_sharegpt_form() -> None:
    replies = (ToolReply('{"output": "ü\\n", "exit_code": 0}', ok=True), ToolReply("plain text", ok=True))
    result = roll_out(
        response("I look.", call("terminal", {"command": "ls"}), call("read_file", {"path": "a"}, "call_2"), reasoning_content="Hm."),
        response(None, call("terminal", "")),
        response("Done."),
        replies=replies,
    )

    system, human, first, tool, second, second_tool, last = to_conversation(result.messages, describe_tools(SCHEMAS))

    assert [turn["from"] for turn in (system, human, first, tool, second, second_tool, last)] == ["system", "human", "gpt", "tool", "gpt", "tool", "gpt"]
    assert "secret" not in system["value"]
    tools = system["value"].partition("<tools>\n")[2].partition("\n</tools>")[0].split("\n")
    assert [json.loads(tool) for tool in tools] == SCHEMAS
    assert human["value"] == "Fix it."
    assert first["value"].startswith("<think>\nHm.\n</think>\nI look.\n<tool_call>\n")
    calls = get_parser("hermes").parse(first["value"]).calls
    assert [(one.name, json.loads(one.arguments)) for one in calls] == [("terminal", {"command": "ls"}), ("read_file", {"path": "a"})]
    responses = [json.loads(part.partition("\n</tool_response>")[0]) for part in tool["value"].split("<tool_response>\n")[1:]]
    assert responses == [{"name": "terminal", "content": {"output": "ü\n", "exit_code": 0}}, {"name": "read_file", "content": "plain text"}]
    assert second["value"] == '<tool_call>\n{"name": "terminal", "arguments": {}}\n</tool_call>'
    assert last["value"] == "Done."


@pytest.mark.timeout(180)  # the first import of `datasets` compiles some thousand modules
def test_every_row_has_the_same_columns_and_datasets_loads_them(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [
        make_row(roll_out(response("At once."))),
        make_row(
            roll_out(response(None, call("invented", {}), call("terminal", {"command": "x"})), response("y\ud800")),
            other_members='{"a": [1]}',
            image="python:3.11",
        ),
        make_row(roll_out(response("z" * 5_000_000)), KeptRecording(Path("data/run/recordings/a.cast"))),
        make_row(roll_out(response("z")), KeptRecording(None, "it was too late")),
    ]
    with RowLog(tmp_path / "rows.jsonl") as log:
        for row in rows:
            log.append(row)

    loaded = datasets.load_dataset("json", data_files=str(tmp_path / "rows.jsonl"), split="train", cache_dir=str(tmp_path / "cache"))

    assert len(loaded) == len(rows)
    assert set(loaded.column_names) == set(rows[0])
    assert set(loaded[1]["tool_stats"]) == {*BASE_TOOLS, *OPTIONAL_TOOLS, "unknown"}
    assert loaded[1]["tool_stats"]["unknown"] == {"count": 1, "success": 0, "failure": 1}
    assert loaded[1]["tool_stats"]["terminal"] == {"count": 1, "success": 1, "failure": 0}
    assert loaded[1]["conversations"][-1] == {"from": "gpt", "value": "y?"}
    assert json.loads(loaded[1]["metadata"]["row"]) == {"a": [1]}
    assert [row["metadata"]["recording"] for row in loaded] == ["", "", "recordings/a.cast", ""]
    assert [row["metadata"]["recording_error"] for row in loaded] == ["", "", "", "it was too late"]


def test_sums_over_rows_are_the_same_in_one_session_and_in_two() -> None:
    rows = [make_row(roll_out(response(None, call("terminal", {"command": "x"})), response("y"))), make_row(roll_out(response("z"), max_turns=1))]
    whole, resumed = RunStatistics(), RunStatistics()
    for row in rows:
        whole.add_row(row)
        resumed.add_row(json.loads(json.dumps(row)))

    document = whole.document()

    assert document == resumed.document()
    assert (document["completed"], document["turns"], document["turns_per_trajectory"]) == (2, 3, 1.5)
    assert document["tools"]["terminal"] == {"count": 1, "success": 1, "failure": 0, "success_rate": 1.0}
    assert document["ends"] == {"answered": 2}
    assert document["times"]["duration_s"] == 4.0


class Slot:
    """Runs calls as a slot does, with the next fault and reason."""

    def __init__(self, *ends: tuple[str, str]) -> None:
        self._ends = list(ends)

    async def run_model_call(self, tool: str, args: Any) -> ExecutionResult:
        fault, reason = self._ends.pop(0)
        return ExecutionResult(fault == "none", "", "" if fault == "none" else "it failed", {"fault": fault, "reason": reason, "exit_code": 0})


def infra_fault(*ends: tuple[str, str]) -> str | None:
    handler = SlotToolHandler(Slot(*ends))  # type: ignore[arg-type]
    answers = [response(None, call("terminal", {"command": "x"})) for _ in ends]
    loop = AgentLoop(ScriptedModel(*answers, response("end")), handler, SCHEMAS)
    fault = infra_fault_of(asyncio.run(loop.run([{"role": "user", "content": "Fix it."}], "t")), handler)
    return fault and fault.reason


def test_only_faults_of_the_infrastructure_repeat_a_rollout() -> None:
    exit_, timeout = ("none", "exit"), ("policy", "timeout")
    assert infra_fault(exit_, exit_) is None
    assert infra_fault(timeout, exit_) is None
    assert infra_fault(exit_, ("infra", "backend_error")) == "backend_error"
    assert infra_fault(exit_, ("ambiguous", "timeout"), exit_) == "ambiguous_timeout"
    assert infra_fault(timeout, ("ambiguous", "timeout")) is None
    assert infra_fault(timeout, ("infra", "sandbox_lost")) == "sandbox_lost"
    assert infra_fault(("none", "cancelled")) == "cancelled"
    assert infra_fault(("ambiguous", "lease_lost")) == "lease_lost"
    assert infra_fault(("policy", "sandbox_lost")) is None  # proven to be the model's own doing
