"""The arithmetic of GRPO for a policy with one choice in each rollout: advantages in a group, importance ratios, and the clipped policy gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from environments.demo.small_model.policy import CommandPolicy, Vector

#: Keeps the advantages of a group with nearly equal scores small.
_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class ScoredChoice:
    """What the trainer uses of a rollout.

    Args:
        features: the features of the prompt.
        choice: the number of the command that was chosen.
        sampled_logprob: its log probability when it was chosen.
        advantage: how much better than its group the rollout was, in standard deviations.
    """

    features: Vector
    choice: int
    sampled_logprob: float
    advantage: float


def group_advantages(scores: Sequence[float]) -> list[float]:
    """Return how much better than the mean of its group each rollout is, in standard deviations of the group; 0 for all if the scores are equal."""
    values = np.asarray(scores, dtype=np.float64)
    advantages: list[float] = ((values - values.mean()) / (values.std() + _EPSILON)).tolist()
    return advantages


def clipped_loss(policy: CommandPolicy, rollouts: Sequence[ScoredChoice], clip: float) -> tuple[float, Vector]:
    """Return the clipped loss of a batch and its gradient with respect to the weights of the policy.

    The loss is the negative mean of `min(ratio * advantage, clipped ratio * advantage)`. A rollout of which the clipped term is the smaller one
    has no gradient.

    Args:
        policy: the policy with its present weights.
        rollouts: the rollouts.
        clip: how far from 1 the ratio of the present to the sampled probability counts.
    """
    loss = 0.0
    gradient: Vector = np.zeros_like(policy.weights)
    for rollout in rollouts:
        logprobs = policy.log_probabilities(rollout.features)
        ratio = float(np.exp(logprobs[rollout.choice] - rollout.sampled_logprob))
        plain = ratio * rollout.advantage
        clipped = float(np.clip(ratio, 1 - clip, 1 + clip)) * rollout.advantage
        loss -= min(plain, clipped)
        if plain <= clipped:
            of_logits = -np.exp(logprobs)
            of_logits[rollout.choice] += 1.0
            gradient -= plain * np.outer(of_logits, rollout.features)
    return loss / len(rollouts), gradient / len(rollouts)
