"""Tests of what the demo says about its rollouts: a wrong reward, or a rollout that is missing, is found."""

from __future__ import annotations

from typing import Any

import pytest

from environments.demo.request_log import RequestRecord
from environments.demo.rollouts_seen import EXPECTED_REWARDS, SeenRollout, add_rewards, find_problems, see_rollouts
from environments.demo.trajectories import TrajectoryName, make_script

SCRIPT = make_script()
TRAJECTORIES = SCRIPT.prompts[0].trajectories


def requests() -> list[RequestRecord]:
    """Return the requests of the demo as they come if all goes well: the fourth rollout is lost, and the fifth fixes the bug."""
    played = [*TRAJECTORIES, TRAJECTORIES[0]]
    records = []
    for number, trajectory in enumerate(played):
        for turn in range(1, len(trajectory.turns) + 1 if trajectory.name != TrajectoryName.KILLED else 2):
            at_s = 100.0 + number + turn
            records.append(
                RequestRecord(len(records) + 1, "/generate", b"{}", 200, conversations=(number,), trajectory=trajectory.name, turn=turn, received_at_s=at_s)
            )
    return records


def group() -> dict[str, Any]:
    played = [TRAJECTORIES[0], TRAJECTORIES[2], TRAJECTORIES[1], TRAJECTORIES[0]]
    messages = [[{"role": "user", "content": "Go."}, *({"role": "assistant", "content": turn.text} for turn in one.turns)] for one in played]
    scores = [EXPECTED_REWARDS[one.name] for one in played]
    return {"scores": scores, "messages": messages, "masks": [[-100, 5, 6]] * 4, "tokens": [[4, 5, 6]] * 4, "inference_logprobs": [[1.0, -0.5, -0.5]] * 4}


def seen(written: dict[str, Any]) -> list[SeenRollout]:
    return add_rewards(SCRIPT, see_rollouts(SCRIPT, requests(), killed_at_s=110.0), written)


def test_all_went_well() -> None:
    rollouts = seen(group())
    assert [(one.reward, one.turns, one.tool_calls) for one in rollouts] == [(1.0, 4, 3), (0.4, 2, 2), (0.0, 3, 2), (None, 1, 1), (1.0, 4, 3)]
    assert [one.outcome for one in rollouts] == ["scored"] * 3 + ["killed, repeated", "scored (repeat)"]
    assert (rollouts[3].duration_s, rollouts[0].duration_s, rollouts[0].trained_tokens) == (6.0, 3.0, 2)
    assert find_problems(rollouts, group(), has_logprobs=True) == []


def test_what_is_not_as_it_must_be_is_said() -> None:
    wrong = group()
    wrong["scores"][1] = 1.0
    assert find_problems(seen(wrong), wrong, has_logprobs=True) == ["rollout 3 (breaks the project): reward 1.0, expected 0.0"]
    shorter = group() | {"inference_logprobs": [[1.0]] * 4}
    assert find_problems(seen(shorter), shorter, has_logprobs=True) == ["not every token has a log probability"]
    assert find_problems(seen(group()), group(), has_logprobs=False) == ["chat completions have no log probabilities, and the group has some"]
    without_repeat = [one for one in seen(group()) if one.number < 3]
    assert find_problems(without_repeat, group(), has_logprobs=True) == [
        "no rollout played the trajectory 'loses its sandbox'",
        "the lost rollout was not repeated",
    ]
    other = group()
    other["messages"][0][1]["content"] = "Something else"
    with pytest.raises(ValueError, match="did not play"):
        seen(other)
