"""Tests of the tokens of trajectories, of scored groups, of items that are put back, and of the statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from environments.agent_loop import AgentResult, LoopEnd, ToolCallRecord
from environments.conversation.tool_replies import ToolReply
from environments.model_access.trajectory_tokens import NOT_TRAINED, TokensUnusable, TrajectoryTokens, tokens_of_state
from environments.rollouts.exec_tool import RolloutFault
from environments.rollouts.item_queue import PutBackItems, item_key, item_name
from environments.rollouts.scored_items import make_group, render_conversation
from environments.rollouts.scoring import check_reward
from environments.rollouts.statistics import RolloutStatistics
from environments.rollouts.summary_table import render_summary
from environments.rollouts.trajectory import TrajectoryRecord


@dataclass
class Node:
    tokens: list[int]
    masked_tokens: list[int]
    logprobs: list[float]


MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "Go."},
    {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "function": {"name": "terminal", "arguments": '{"command": "ls"}'}}]},
    {"role": "tool", "name": "terminal", "content": '{"output": "a"}'},
    {"role": "assistant", "content": "Done.", "reasoning_content": "I see a."},
]


def result_of(*calls: ToolCallRecord) -> AgentResult:
    return AgentResult(MESSAGES, LoopEnd.ANSWERED, 2, (None, None), calls, 1.0, 1.0)


def record_of(tokens: TrajectoryTokens | None = None, reward: float | None = 1.0) -> TrajectoryRecord:
    failed = ToolCallRecord(1, "terminal", '{"command": "ls"}', schema_valid=True, executed=True, reply=ToolReply("{}", ok=False, error="it took too long"))
    return TrajectoryRecord("t-1", result=result_of(failed), tokens=tokens, reward=reward)


def test_exact_tokens() -> None:
    tokens = tokens_of_state({"nodes": [Node([1, 2, 3], [NOT_TRAINED, 2, 3], [1.0, -0.5, 0.0])]})
    assert tokens == TrajectoryTokens([1, 2, 3], [NOT_TRAINED, 2, 3], [1.0, -0.5, 0.0])
    assert tokens.cut(2) == TrajectoryTokens([1, 2], [NOT_TRAINED, 2], [1.0, -0.5])
    assert tokens.cut(3) is tokens


@pytest.mark.parametrize(
    ("nodes", "sentence"),
    [
        ([], "0 sequences of tokens instead of one"),
        ([Node([1], [1], [0.0])] * 2, "2 sequences of tokens instead of one: a prompt did not continue"),
        ([Node([1, 2], [NOT_TRAINED, 2], [1.0, 1.0])], "no log probability for 1 tokens that the model wrote"),
        ([Node([1, 2], [NOT_TRAINED, 2], [1.0])], "1 log probabilities for 2 tokens"),
    ],
)
def test_tokens_that_are_not_exact_are_refused(nodes: list[Node], sentence: str) -> None:
    with pytest.raises(TokensUnusable, match=sentence):
        tokens_of_state({"nodes": nodes})


def test_a_group_has_log_probabilities_only_if_every_member_has_them() -> None:
    exact, tokenized = TrajectoryTokens([1, 2, 3], [NOT_TRAINED, 2, 3], [1.0, -1.0, -2.0]), TrajectoryTokens([4], [4])
    group, cut_count = make_group([record_of(exact), record_of(exact, 0.0)], 2)
    assert (group["tokens"], group["inference_logprobs"], group["scores"], cut_count) == ([[1, 2]] * 2, [[1.0, -1.0]] * 2, [1.0, 0.0], 2)
    assert all(isinstance(message["content"], str) for message in group["messages"][0])
    assert "inference_logprobs" not in make_group([record_of(exact), record_of(tokenized)], 10)[0]


def test_a_conversation_as_text() -> None:
    text = render_conversation(MESSAGES)
    assert text.startswith('[user]\nGo.\n\n[tool call] terminal({"command": "ls"})\n\n[tool result of terminal]\n{"output": "a"}')
    assert text.endswith("[assistant reasoning]\nI see a.\n\n[assistant]\nDone.")


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), None, "1", object()])
def test_a_reward_is_a_finite_number(reward: Any) -> None:
    with pytest.raises(TypeError, match="finite number"):
        check_reward(reward)


def test_rewards() -> None:
    class Scalar:
        def item(self) -> float:
            return 0.25

    assert [check_reward(value) for value in (1, True, 0.5, Scalar())] == [1.0, 1.0, 0.5, 0.25]


def test_items_are_put_back_a_few_times() -> None:
    items = PutBackItems(item_key, 2)
    first, second = {"instance_id": "a", "x": 1}, {"text": "b"}
    assert [items.put_back(item) for item in (first, second, first, first)] == [True, True, True, False]
    assert [items.take(), items.take(), items.take(), items.take()] == [first, second, first, None]
    assert (items.is_excluded({"instance_id": "a"}), items.is_excluded(second)) == (True, False)
    items.forget(second)
    items.return_unused(second)
    assert items.take() == second
    items.exclude(second)
    assert items.is_excluded({"text": "b"})
    assert (item_name(first), item_name({"text": "long " * 100})[:8], item_name("x")) == ("a", "{'text':", "x")


def test_statistics() -> None:
    statistics = RolloutStatistics()
    record = record_of()
    record.phase_s["model"], record.phase_s["acquire"] = 3.0, 1.0
    record.tool_faults["policy", "timeout"] = 1
    statistics.record_scored(record)
    statistics.record_scored(record_of(reward=0.0))
    statistics.record_fault(record, RolloutFault("the sandbox died", reason="sandbox_lost"))
    statistics.record_fault(record, RolloutFault("starved", reason="timeout", fault="ambiguous"))
    statistics.record_unusable_row("row-7", "there is no such commit")
    statistics.count(group_count=1, repeated_count=2)

    metrics = statistics.take_metrics()
    assert (metrics["train/reward_mean"], metrics["train/reward_std"], metrics["train/tool_errors_count"]) == (0.5, 0.5, 4)
    assert (metrics["train/faults/infra/sandbox_lost"], metrics["train/faults/ambiguous/timeout"], metrics["train/lost_to_faults_s"]) == (1, 1, 8.0)
    assert metrics["train/tool_error_details"].splitlines()[0] == 't-1 turn 1 terminal({"command": "ls"}): it took too long'
    assert statistics.take_metrics()["train/tool_errors_count"] == 0  # since the last call
    assert statistics.total.rewards.count == 2

    table = render_summary(statistics.total, 12.0)
    cells = [str(cell) for column in table.columns for cell in column.cells]  # type: ignore[attr-defined]  # a table
    assert "1 complete, 0 lost, in 12.0 s" in cells
    assert "infra/sandbox_lost 1, ambiguous/timeout 1" in cells
    assert "row-7: there is no such commit" in cells
