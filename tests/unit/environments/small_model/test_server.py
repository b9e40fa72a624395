"""Tests of the server of the small model, and of programs that run with it."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from environments.demo.model_server import LocalServer
from environments.demo.small_model.__main__ import run_program
from environments.demo.small_model.policy import CommandPolicy, describe_message
from environments.demo.small_model.server import CLOSING_TEXT, PolicyApplication
from environments.demo.tokenizer import TextTokenizer

COMMANDS = ("echo 42 > answer.txt", "echo 41 > answer.txt", "ls")
PROMPT = "<|im_start|>user\nSix times seven?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
def policy(tokenizer: TextTokenizer) -> CommandPolicy:
    policy = CommandPolicy(COMMANDS, tokenizer)
    policy.weights[0] = 2 * describe_message("Six times seven?")
    return policy


@pytest.fixture
async def http(policy: CommandPolicy, tokenizer: TextTokenizer) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        LocalServer(PolicyApplication(policy, tokenizer)) as server,
        httpx.AsyncClient(base_url=server.base_url.removesuffix("/v1"), trust_env=False, verify=False) as client,
    ):
        yield client


async def test_commands_are_sampled_with_the_probability_that_is_returned(http: httpx.AsyncClient, policy: CommandPolicy, tokenizer: TextTokenizer) -> None:
    request = {"prompt": {"prompt_token_ids": tokenizer.encode(PROMPT)}, "logprobs": 0, "n": 300, "max_tokens": 500, "temperature": 1.0}
    answer = (await http.post("/generate", json=request)).raise_for_status().json()

    counts = dict.fromkeys(range(len(COMMANDS)), 0)
    returned = {}
    for entries, reason in zip(answer["logprobs"], answer["finish_reasons"], strict=True):
        tokens, logprobs = [int(token) for (entry,) in entries for token in entry], [value for (entry,) in entries for value in entry.values()]
        assert reason == "stop"
        choice = policy.find_choice(tokens)
        counts[choice] += 1
        returned[choice] = np.exp(sum(logprobs))
    for choice, count in counts.items():
        assert count / 300 == pytest.approx(returned[choice], abs=0.09)
    assert sum(returned.values()) == pytest.approx(1.0)


async def test_after_the_reply_of_a_tool_the_conversation_ends(http: httpx.AsyncClient, tokenizer: TextTokenizer) -> None:
    prompt = PROMPT + "<tool_call>…</tool_call><|im_end|>\n<|im_start|>tool\n{}<|im_end|>\n<|im_start|>assistant\n"
    answer = (await http.post("/generate", json={"prompt": {"prompt_token_ids": tokenizer.encode(prompt)}})).raise_for_status().json()

    assert answer["text"] == [CLOSING_TEXT]
    assert {value for (entry,) in answer["logprobs"][0] for value in entry.values()} == {0.0}


async def test_an_answer_is_cut_at_its_limit(http: httpx.AsyncClient, tokenizer: TextTokenizer) -> None:
    answer = (await http.post("/generate", json={"prompt": {"prompt_token_ids": tokenizer.encode(PROMPT)}, "max_tokens": 3})).raise_for_status().json()

    assert (answer["finish_reasons"], len(answer["logprobs"][0])) == (["length"], 3)


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/generate", {"prompt": {"prompt_token_ids": [5]}, "temperature": 0.5}, 400, "temperature 1"),
        ("/generate", {"input_ids": [5]}, 400, "set openai.server_type to vllm"),
        ("/generate", [], 400, "not a JSON object"),
        ("/generate", {"prompt": {"prompt_token_ids": [5]}}, 400, "no message of the user"),
        ("/v1/chat/completions", {}, 404, "set openai.server_type to vllm"),
    ],
)
async def test_what_the_model_does_not_answer_is_refused_with_the_reason(http: httpx.AsyncClient, path: str, body: object, status: int, message: str) -> None:
    response = await http.post(path, json=body)

    assert response.status_code == status
    assert message in response.json()["error"]["message"]


async def test_a_program_finds_the_model_and_the_tokenizer_in_its_environment(tmp_path: Path) -> None:
    program = """
import os, sys, urllib.request
urllib.request.urlopen(os.environ["ATROPOS_SERVER_BASE_URL"] + "/models").read()
assert os.path.exists(os.environ["TOKENIZER_NAME"] + "/tokenizer.json")
sys.exit(3)
"""
    assert await run_program(["ls"], [sys.executable, "-c", program]) == 3
