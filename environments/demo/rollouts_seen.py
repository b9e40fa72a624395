"""What became of the rollouts of the demo, seen from outside: from the requests that the model got, and from the groups that the environment wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from environments.demo.request_log import RequestRecord
from environments.demo.script import Script
from environments.demo.trajectories import TrajectoryName

#: The reward that each trajectory must have. The one whose sandbox is killed must have none.
EXPECTED_REWARDS: Mapping[str, float | None] = {
    TrajectoryName.FIXES: 1.0,
    TrajectoryName.LOOKS: 0.4,
    TrajectoryName.BREAKS: 0.0,
    TrajectoryName.KILLED: None,
}


@dataclass(frozen=True, slots=True)
class SeenRollout:
    """One rollout.

    Args:
        number: the number of its conversation, counted from 0.
        trajectory: what the model played.
        turns: how many answers the model gave.
        tool_calls: how many tools it called.
        duration_s: the time from its first request to its last one, or to the end of its sandbox, in seconds.
        reward: the reward; None if it was not scored.
        trained_tokens: how many tokens the model wrote, of a rollout that was scored.
        repeats: whether it replaces one that was lost.
    """

    number: int
    trajectory: str
    turns: int
    tool_calls: int
    duration_s: float
    reward: float | None = None
    trained_tokens: int = 0
    repeats: bool = False

    @property
    def as_expected(self) -> bool:
        """Whether the reward is what it must be."""
        return self.reward == EXPECTED_REWARDS[self.trajectory]

    @property
    def outcome(self) -> str:
        """What became of it, in words."""
        if self.reward is None:
            return "killed, repeated" if self.trajectory == TrajectoryName.KILLED else "not scored"
        return "scored (repeat)" if self.repeats else "scored"


def see_rollouts(script: Script, requests: Sequence[RequestRecord], killed_at_s: float | None) -> list[SeenRollout]:
    """Return the rollouts that the model took part in, without rewards.

    Args:
        script: what the model played.
        requests: the requests that it got.
        killed_at_s: when the sandbox was killed, as `time.monotonic()`; None if it was not.
    """
    trajectories = {trajectory.name: trajectory for prompt in script.prompts for trajectory in prompt.trajectories}
    group_size = len(trajectories)
    by_conversation: dict[int, list[RequestRecord]] = {}
    for request in requests:
        for number in request.conversations:
            by_conversation.setdefault(number, []).append(request)
    seen = []
    for number, asked in sorted(by_conversation.items()):
        name = asked[0].trajectory
        turns = max(request.turn for request in asked)
        calls = sum(len(turn.calls) for turn in trajectories[name].turns[:turns])
        ends_at_s = killed_at_s if name == TrajectoryName.KILLED and killed_at_s is not None else asked[-1].received_at_s
        seen.append(SeenRollout(number, name, turns, calls, ends_at_s - asked[0].received_at_s, repeats=number >= group_size))
    return seen


def add_rewards(script: Script, seen: Sequence[SeenRollout], group: Mapping[str, Any]) -> list[SeenRollout]:
    """Return the rollouts with the rewards of the group that the environment wrote.

    Args:
        script: what the model played.
        seen: the rollouts.
        group: the group: `scores`, `messages` and `masks`.

    Raises:
        ValueError: the group has a rollout that the model did not play.
    """
    first_texts = {trajectory.turns[0].text: trajectory.name for prompt in script.prompts for trajectory in prompt.trajectories}
    rewarded = list(seen)
    for score, messages, mask in zip(group["scores"], group["messages"], group["masks"], strict=True):
        text = next(str(message["content"]) for message in messages if message["role"] == "assistant")
        name = next((name for first, name in first_texts.items() if text.startswith(first)), "")
        turns = sum(message["role"] == "assistant" for message in messages)
        matching = [index for index, one in enumerate(rewarded) if (one.trajectory, one.turns, one.reward) == (name, turns, None)]
        if not matching:
            raise ValueError(f"the group has a rollout that the model did not play: {text[:200]!r}")
        trained = sum(token != -100 for token in mask)
        rewarded[matching[0]] = replace(rewarded[matching[0]], reward=float(score), trained_tokens=trained)
    return rewarded


def find_problems(seen: Sequence[SeenRollout], group: Mapping[str, Any], *, has_logprobs: bool) -> list[str]:
    """Return what is not as it must be, one sentence each.

    Args:
        seen: the rollouts with their rewards.
        group: the group that the environment wrote.
        has_logprobs: whether the group must have the log probability of each token.
    """
    problems = [
        f"rollout {one.number + 1} ({one.trajectory}): reward {one.reward}, expected {EXPECTED_REWARDS[one.trajectory]}" for one in seen if not one.as_expected
    ]
    missing = [name for name in EXPECTED_REWARDS if name not in {one.trajectory for one in seen}]
    problems += [f"no rollout played the trajectory {str(name)!r}" for name in missing]
    if not any(one.repeats for one in seen):
        problems.append("the lost rollout was not repeated")
    logprobs = group.get("inference_logprobs")
    if has_logprobs and [len(one) for one in logprobs or []] != [len(tokens) for tokens in group["tokens"]]:
        problems.append("not every token has a log probability")
    if not has_logprobs and logprobs is not None:
        problems.append("chat completions have no log probabilities, and the group has some")
    return problems
