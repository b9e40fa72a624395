"""The rows of `trajectories.jsonl`. Every row has the same columns with the same types and no null, so that `datasets` can load the file."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from env_client.tools import BASE_TOOLS, OPTIONAL_TOOLS
from environments.agent_loop import AgentResult, ToolCallRecord
from environments.batch.files.prompt_file import Prompt
from environments.batch.rows.sharegpt import to_conversation
from environments.rollouts.recordings import KeptRecording

#: The tools that have statistics. Calls of tools that the model invented are counted under `unknown`.
COUNTED_TOOLS = (*BASE_TOOLS, *OPTIONAL_TOOLS, "unknown")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """What an attempt that succeeded came to.

    Args:
        result: the conversation and its end.
        end: why it ended.
        system_message: describes the tools that the model could call.
        toolsets: the tool sets of these tools.
        pool: the pool of the slot.
        attempts: how many attempts the prompt needed.
        duration_s: how long the slot was held, in seconds.
        recording: what became of the recording of its terminal; None if it has used none.
    """

    result: AgentResult
    end: str
    system_message: str
    toolsets: Sequence[str]
    pool: str
    attempts: int
    duration_s: float
    recording: KeptRecording | None = None


def make_trajectory_row(prompt: Prompt, rollout: Rollout, *, run_name: str, model: str, now_s: float | None = None) -> dict[str, Any]:
    """Make the row of a prompt.

    Args:
        prompt: the prompt.
        rollout: what it came to.
        run_name: the name of the run.
        model: the name of the model.
        now_s: the time in Unix seconds; default the present.
    """
    result, recording = rollout.result, rollout.recording
    return {
        "prompt_id": prompt.prompt_id,
        "occurrence": prompt.occurrence,
        "conversations": to_conversation(result.messages, rollout.system_message),
        "completed": result.finished_naturally,
        "end": rollout.end,
        "turns": result.turns_used,
        "toolsets": list(rollout.toolsets),
        "tool_calls": {
            "attempted": result.tool_calls_attempted,
            "schema_valid": result.tool_calls_schema_valid,
            "executed_ok": result.tool_calls_executed_ok,
            "exec_error": result.tool_calls_exec_error,
            "policy_faults": sum(call.reply.fault == "policy" for call in result.calls),
            "ambiguous_faults": sum(call.reply.fault == "ambiguous" for call in result.calls),
        },
        "tool_stats": count_calls_by_tool(result.calls),
        "metadata": {
            "run_name": run_name,
            "model": model,
            "line": prompt.line,
            "pool": rollout.pool,
            "image": prompt.image or "",
            "attempts": rollout.attempts,
            "finished_at": float(time.time() if now_s is None else now_s),
            "duration_s": float(rollout.duration_s),
            "model_time_s": float(result.model_time_s),
            "tool_time_s": float(result.tool_time_s),
            "recording": f"{recording.path.parent.name}/{recording.path.name}" if recording is not None and recording.path is not None else "",
            "recording_error": recording.error if recording is not None else "",
            "row": prompt.other_members,
        },
    }


def count_calls_by_tool(calls: Sequence[ToolCallRecord]) -> dict[str, dict[str, int]]:
    """Return, for every tool, how many calls there were, how many did what they were asked to do, and how many did not."""
    counts = {tool: {"count": 0, "success": 0, "failure": 0} for tool in COUNTED_TOOLS}
    for call in calls:
        of_tool = counts[call.tool if call.tool in counts else "unknown"]
        of_tool["count"] += 1
        of_tool["success" if call.reply.ok else "failure"] += 1
    return counts
