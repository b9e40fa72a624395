"""Tests of the arithmetic of the small trainer."""

from __future__ import annotations

import numpy as np
import pytest

from environments.demo.small_model.grpo import ScoredChoice, clipped_loss, group_advantages
from environments.demo.small_model.policy import CommandPolicy, describe_message, find_user_message
from environments.demo.tokenizer import TextTokenizer

COMMANDS = ("echo 42 > answer.txt", "echo 41 > answer.txt", "ls -la")


@pytest.fixture
def policy(tokenizer: TextTokenizer) -> CommandPolicy:
    policy = CommandPolicy(COMMANDS, tokenizer)
    policy.weights = np.random.default_rng(1).normal(size=policy.weights.shape)
    return policy


def test_advantages_are_zero_in_a_group_of_equal_scores_and_in_standard_deviations_otherwise() -> None:
    assert group_advantages([0.5, 0.5, 0.5]) == [0.0, 0.0, 0.0]
    assert group_advantages([0.0, 1.0]) == pytest.approx([-1.0, 1.0], abs=1e-4)


def test_the_gradient_is_that_of_the_loss(policy: CommandPolicy) -> None:
    features = describe_message("Write the product of six and seven")
    logprobs = policy.log_probabilities(features)
    # The ratio is within the clipping range, above it with a positive advantage (no gradient), and above it with a negative one.
    rollouts = [
        ScoredChoice(features, 0, logprobs[0] - 0.1, 1.0),
        ScoredChoice(features, 1, logprobs[1] - 1.0, 2.0),
        ScoredChoice(features, 2, logprobs[2] - 1.0, -1.5),
    ]
    _, gradient = clipped_loss(policy, rollouts, clip=0.2)

    weights, step = policy.weights, 1e-6
    numeric = np.zeros_like(weights)
    for index in np.ndindex(weights.shape):
        losses = []
        for sign in (1, -1):
            policy.weights = weights.copy()
            policy.weights[index] += sign * step
            losses.append(clipped_loss(policy, rollouts, clip=0.2)[0])
        numeric[index] = (losses[0] - losses[1]) / (2 * step)
    assert gradient == pytest.approx(numeric, abs=1e-6)
    assert np.abs(gradient).max() > 0.01


def test_the_log_probabilities_of_the_tokens_sum_to_that_of_the_command(policy: CommandPolicy) -> None:
    features = describe_message("Write the product of six and seven")
    for choice, written in enumerate(policy.commands):
        logprobs = policy.token_logprobs(choice, features)
        assert len(logprobs) == len(written.tokens)
        assert sum(logprobs) == pytest.approx(policy.log_probabilities(features)[choice])
        assert policy.find_choice([*written.tokens, 1, 2]) == choice
    shared = len([token for token, others in zip(policy.commands[0].tokens, policy.commands[2].tokens, strict=False) if token == others])
    assert policy.token_logprobs(0, features)[: min(shared, 5)] == [0.0] * min(shared, 5)


def test_tokens_of_another_model_are_refused(policy: CommandPolicy) -> None:
    with pytest.raises(ValueError, match="another model has written them"):
        policy.find_choice([1, 2, 3])


def test_a_prompt_without_a_message_of_the_user_is_refused() -> None:
    assert find_user_message("<|im_start|>system\nx<|im_end|>\n<|im_start|>user\nDo\nit.<|im_end|>\n") == "Do\nit."
    with pytest.raises(ValueError, match="no message of the user"):
        find_user_message("plain text")


def test_equal_commands_are_refused(tokenizer: TextTokenizer) -> None:
    with pytest.raises(ValueError, match="must be different"):
        CommandPolicy(["ls", "ls"], tokenizer)
