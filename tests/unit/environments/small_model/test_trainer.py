"""Tests of the small trainer without environment and rollout API: groups that it cannot use, and how its program ends."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest

from environments.demo.model_server import LocalServer
from environments.demo.small_model.policy import CommandPolicy, describe_message
from environments.demo.small_model.server import PolicyApplication
from environments.demo.small_trainer import TrainerSettings, TrainingFailed, main, read_group, update_policy
from environments.demo.tokenizer import TextTokenizer

MESSAGE = "Six times seven?"
PROMPT = f"<|im_start|>user\n{MESSAGE}<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
def policy(tokenizer: TextTokenizer) -> CommandPolicy:
    return CommandPolicy(["echo 42 > answer.txt", "ls"], tokenizer)


def test_a_group_is_read_and_makes_the_better_command_more_probable(policy: CommandPolicy, tokenizer: TextTokenizer) -> None:
    prompt = tokenizer.encode(PROMPT)
    group: dict[str, list[list[float]]] = {"tokens": [], "masks": [], "inference_logprobs": []}
    features = describe_message(MESSAGE)
    for choice, written in enumerate(policy.commands):
        group["tokens"].append([*prompt, *written.tokens])
        group["masks"].append([-100] * len(prompt) + list(written.tokens))
        group["inference_logprobs"].append([1.0] * len(prompt) + policy.token_logprobs(choice, features))

    rollouts = read_group({**group, "scores": [1.0, 0.0]}, policy, tokenizer)
    assert [(rollout.choice, round(rollout.advantage, 3)) for rollout in rollouts] == [(0, 1.0), (1, -1.0)]
    assert [rollout.sampled_logprob for rollout in rollouts] == pytest.approx([math.log(0.5)] * 2)

    update_policy(policy, rollouts, TrainerSettings())
    assert math.exp(policy.log_probabilities(features)[0]) > 0.7


def test_a_group_without_log_probabilities_is_refused_with_what_to_do(policy: CommandPolicy, tokenizer: TextTokenizer) -> None:
    with pytest.raises(TrainingFailed, match=r"--openai\.server_type vllm"):
        read_group({"tokens": [], "masks": [], "scores": []}, policy, tokenizer)


async def test_an_api_that_refuses_the_trainer_ends_it_with_a_sentence(
    policy: CommandPolicy, tokenizer: TextTokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with LocalServer(PolicyApplication(policy, tokenizer)) as other:
        arguments = ["--api-url", other.base_url.removesuffix("/v1"), "--port", "0", "--tokenizer", str(tmp_path / "tokenizer")]
        assert await asyncio.to_thread(main, arguments) == 1

    errors = capsys.readouterr().err
    assert errors.startswith("The rollout API does not answer the trainer any more, or refuses its request: ")
    assert "Traceback" not in errors
