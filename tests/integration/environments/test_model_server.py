"""Tests of the scripted model server over HTTP: which trajectory a conversation plays, and every fault."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest

from environments.demo.model_server import ScriptedModelServer
from environments.demo.tokenizer import TextTokenizer, make_tokenizer
from environments.tool_call_parsers import get_parser
from tests.support.users import ROOT

TOOLS = [{"type": "function", "function": {"name": "terminal", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}}}]
LS = {"tool": "terminal", "arguments": {"command": "ls"}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return TextTokenizer.load(make_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def one_trajectory(*turns: Mapping[str, Any], **members: Any) -> dict[str, Any]:
    return {"prompts": [{"trajectories": [{"name": "only", "turns": list(turns)}], **members}]}


class Chat:
    """A conversation with chat completions."""

    def __init__(self, client: httpx.AsyncClient, prompt: str = "Go.", **options: Any) -> None:
        self.client = client
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": "You help."}, {"role": "user", "content": prompt}]
        self.options = options

    async def request(self, **options: Any) -> httpx.Response:
        body = {"model": "m", "messages": self.messages, "tools": TOOLS, **self.options, **options}
        return await self.client.post("/v1/chat/completions", json=body)

    async def turn(self) -> dict[str, Any]:
        """Ask for an answer, append it and a reply to each of its calls, and return its choice."""
        response = await self.request()
        assert response.status_code == 200, response.text
        choice: dict[str, Any] = response.json()["choices"][0]
        self.messages.append({key: value for key, value in choice["message"].items() if key != "reasoning_content"})
        self.messages += [{"role": "tool", "tool_call_id": call["id"], "content": "a.py"} for call in choice["message"].get("tool_calls", [])]
        return choice

    async def play(self) -> list[str]:
        """Return the texts of all turns until one has no calls."""
        texts = []
        while True:
            choice = await self.turn()
            texts.append(choice["message"]["content"])
            if not choice["message"].get("tool_calls"):
                return texts


class Generation:
    """A conversation with `/generate` of vLLM, which continues its own tokens."""

    def __init__(self, client: httpx.AsyncClient, tokenizer: TextTokenizer, prompt: str = "Go.") -> None:
        self.client = client
        self.tokenizer = tokenizer
        self.tokens = tokenizer.encode(f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n")

    async def request(self, **options: Any) -> httpx.Response:
        return await self.client.post("/generate", json={"prompt": {"prompt_token_ids": self.tokens}, "logprobs": 0, **options})

    async def turn(self) -> str:
        response = await self.request()
        assert response.status_code == 200, response.text
        self.tokens += response.json()["token_ids"][0]
        self.tokens += self.tokenizer.encode("\n<|im_start|>tool\na.py<|im_end|>\n<|im_start|>assistant\n")
        return str(response.json()["text"][0])

    async def play(self) -> list[str]:
        texts = [await self.turn()]
        while "<tool_call>" in texts[-1]:
            texts.append(await self.turn())
        return texts


@asynccontextmanager
async def serving(script: Mapping[str, Any], tokenizer: TextTokenizer | None = None) -> AsyncIterator[tuple[ScriptedModelServer, httpx.AsyncClient]]:
    async with (
        ScriptedModelServer(script, tokenizer=tokenizer) as server,
        httpx.AsyncClient(base_url=server.base_url.removesuffix("/v1"), timeout=20, limits=httpx.Limits(max_connections=300)) as client,
    ):
        yield server, client


async def test_conversations_play_the_trajectories_in_order_and_each_one_keeps_to_its_own(tokenizer: TextTokenizer) -> None:
    trajectories = [
        {"name": f"t{index}", "turns": [{"text": f"{index}a", "calls": [LS]}, {"text": f"{index}b", "calls": [LS]}, {"text": f"{index}c"}]}
        for index in range(3)
    ]
    script = {"prompts": [{"match": "Repair", "trajectories": trajectories, "after_last": "first"}, *one_trajectory({"text": "other"})["prompts"]]}
    async with serving(script, tokenizer) as (server, client):
        conversations = [Chat(client, "Repair it."), Chat(client, "Repair it."), Generation(client, tokenizer, "Repair it."), Chat(client, "Repair it.")]
        played = await asyncio.gather(*(conversation.play() for conversation in conversations))
        other = await Chat(client, "Something else").play()

        texts = sorted([text.partition("\n")[0] for text in one] for one in played)
        assert texts == [["0a", "0b", "0c"], ["0a", "0b", "0c"], ["1a", "1b", "1c"], ["2a", "2b", "2c"]]
        assert other == ["other"]
        assert (server.conversation_count, server.request_count) == (5, 13)
        assert [(record.turn, record.trajectory) for record in server.requests if record.conversations == (1,)] == [(1, "t1"), (2, "t1"), (3, "t1")]
        refused = await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}], "stream": True})
        assert (refused.status_code, "stream" in refused.json()["error"]["message"]) == (400, True)


async def test_a_chat_completion_has_calls_usage_and_reasoning_and_the_closing_text_comes_last(tokenizer: TextTokenizer) -> None:
    script = one_trajectory({"text": "Look.", "reasoning": "Hm.", "calls": [LS, {"tool": "read_file", "arguments": {"path": "ü"}}]}) | {"closing_text": "Bye."}
    async with serving(script, tokenizer) as (_, client):
        chat = Chat(client)
        first = (await chat.request()).json()
        message = first["choices"][0]["message"]
        assert (first["choices"][0]["finish_reason"], message["content"], message["reasoning_content"]) == ("tool_calls", "Look.", "Hm.")
        assert [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]] == [{"command": "ls"}, {"path": "ü"}]
        assert first["usage"]["total_tokens"] == first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"] > 20
        without_tools = (await chat.request(tools=[])).json()["choices"][0]
        assert get_parser("hermes").parse(without_tools["message"]["content"]).calls[0].name == "terminal"
        await chat.turn()
        assert (await chat.turn())["message"] == {"role": "assistant", "content": "Bye."}
        # The identifiers of the calls name the conversation, even if the client leaves out what came before.
        chat.messages = chat.messages[:2] + chat.messages[4:6]
        shortened = [chat.messages[0], chat.messages[1], message | {"tool_calls": message["tool_calls"]}, *chat.messages[2:]]
        assert (await chat.request(messages=[*shortened[1:3]])).json()["choices"][0]["message"]["content"] == "Bye."
        assert [model["id"] for model in (await client.get("/v1/models")).json()["data"]] == ["scripted"]
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/metrics")).status_code == 404


async def test_tokens_of_an_answer_are_its_text_and_each_has_a_log_probability(tokenizer: TextTokenizer) -> None:
    async with serving(one_trajectory({"text": "Look.", "calls": [LS]}, {"text": "x"}), tokenizer) as (_, client):
        vllm = Generation(client, tokenizer)
        result = (await vllm.request(n=2)).json()
        text = get_parser("hermes").parse(result["text"][0])
        assert (text.content, text.calls[0].arguments) == ("Look.", '{"command": "ls"}')
        assert tokenizer.decode(result["token_ids"][0]) == result["text"][0] + "<|im_end|>"
        assert (len(result["text"]), result["finish_reasons"]) == (2, ["stop", "stop"])
        logprobs = [next(iter(one[0].items())) for one in result["logprobs"][1]]
        assert [int(token) for token, _ in logprobs] == result["token_ids"][1]
        assert all(-2 <= logprob < 0 for _, logprob in logprobs)
        cut = (await vllm.request(max_tokens=3)).json()
        assert (cut["finish_reasons"], cut["token_ids"][0]) == (["length"], result["token_ids"][0][:3])

        sglang = {"input_ids": vllm.tokens, "sampling_params": {"n": 2, "max_new_tokens": 500}, "return_logprob": True}
        many = (await client.post("/generate", json=sglang)).json()
        meta = many[0]["meta_info"]
        assert (len(many), meta["finish_reason"]["type"], [one[1] for one in meta["output_token_logprobs"]]) == (2, "stop", result["token_ids"][0])
        one = (await client.post("/generate", json={"text": "<|im_start|>user\nGo.<|im_end|>\n", "sampling_params": {"max_new_tokens": 2}})).json()
        assert one["meta_info"]["finish_reason"] == {"type": "length", "length": 2}


@pytest.mark.parametrize(
    ("kind", "tool", "arguments", "in_text"),
    [
        ("malformed_call", "terminal", '{"command": "ls"', '"arguments": {"command": "ls"}\n'),
        ("double_encoded", "terminal", json.dumps('{"command": "ls"}'), '"arguments": ' + json.dumps('{"command": "ls"}')),
        ("bare_string", "terminal", "ls", '"arguments": "ls"}'),
        ("unknown_tool", "unknown_terminal", '{"command": "ls"}', '"name": "unknown_terminal"'),
    ],
)
async def test_faults_of_calls(tokenizer: TextTokenizer, kind: str, tool: str, arguments: str, in_text: str) -> None:
    async with serving(one_trajectory({"calls": [LS], "fault": {"kind": kind}}, {"text": "x"}), tokenizer) as (server, client):
        chat = Chat(client)
        assert (await chat.turn())["message"]["tool_calls"][0]["function"] == {"name": tool, "arguments": arguments}
        assert (await chat.turn())["message"]["content"] == "x"
        generation = Generation(client, tokenizer)
        text = await generation.turn()
        assert in_text in text
        assert bool(get_parser("hermes").parse(text).calls[0].problem) is (kind == "malformed_call")
        assert await generation.turn() == "x"
        assert [record.fault for record in server.requests] == [kind, "", kind, ""]


async def test_after_a_fault_without_an_answer_the_same_turn_is_answered(tokenizer: TextTokenizer) -> None:
    turns = [
        {"text": "1", "calls": [LS], "fault": {"kind": "http_error", "status": 429, "times": 2}},
        {"text": "2", "calls": [LS], "fault": {"kind": "no_choices"}},
        {"text": "3", "calls": [LS], "fault": {"kind": "cut"}},
        {"text": "4"},
    ]
    async with serving(one_trajectory(*turns), tokenizer) as (server, client):
        for conversation in (Chat(client), Generation(client, tokenizer)):
            assert [(await conversation.request()).status_code for _ in range(2)] == [429, 429]
            await conversation.turn()
            empty = (await conversation.request()).json()
            assert empty.get("choices", empty.get("text")) == []
            await conversation.turn()
            with pytest.raises(httpx.RemoteProtocolError):
                await conversation.request()
            await conversation.turn()
            await conversation.turn()
        assert server.conversation_count == 2
        assert [(record.turn, record.status) for record in server.requests[:8]] == [
            (1, 429),
            (1, 429),
            (1, 200),
            (2, 200),
            (2, 200),
            (3, 0),
            (3, 200),
            (4, 200),
        ]


async def test_silence_lasts_until_the_client_gives_up_and_ends_with_the_server(tokenizer: TextTokenizer) -> None:
    script = one_trajectory({"text": "1"}) | {
        "faults": [{"request": 1, "kind": "silence"}, {"request": 3, "kind": "silence"}, {"request": 4, "kind": "http_error"}]
    }
    async with serving(script, tokenizer) as (server, client):
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]}, timeout=0.2)
        assert (await Chat(client, "x").request(tools=[])).status_code == 200
        silent = asyncio.create_task(Chat(client).request())
        record = await server.wait_for_request(lambda record: record.number == 3)
        assert (record.fault, record.status, record.body["messages"][1]["content"], silent.done()) == ("silence", 0, "Go.", False)
        assert (await Chat(client).request()).status_code == 500
    with pytest.raises(httpx.TransportError):
        await silent


async def test_an_answer_that_never_ends_stops_at_the_limit_of_tokens(tokenizer: TextTokenizer) -> None:
    async with serving(one_trajectory({"text": "1", "calls": [LS], "fault": {"kind": "length"}}), tokenizer) as (_, client):
        choice = (await Chat(client, max_tokens=50).request()).json()["choices"][0]
        assert (choice["finish_reason"], "tool_calls" in choice["message"], len(tokenizer.encode(choice["message"]["content"])) in range(20, 51)) == (
            "length",
            False,
            True,
        )
        result = (await Generation(client, tokenizer).request(max_tokens=5000)).json()
        assert (result["finish_reasons"], len(result["token_ids"][0])) == (["length"], 5000)


async def test_a_conversation_whose_answers_were_changed_is_refused(tokenizer: TextTokenizer) -> None:
    async with serving(one_trajectory({"text": "1", "calls": [LS]}, {"text": "2"}), tokenizer) as (server, client):
        chat = Chat(client)
        await chat.turn()
        chat.messages[2]["tool_calls"][0]["id"] = "call_other"
        generation = Generation(client, tokenizer)
        await generation.turn()
        generation.tokens[-20] += 1
        generation.tokens[len(tokenizer.encode("<|im_start|>user\nGo.<|im_end|>\n<|im_start|>assistant\n"))] += 1
        for refused in (await chat.request(), await generation.request()):
            assert (refused.status_code, "did not give" in refused.json()["error"]["message"]) == (400, True)
        assert [record.error != "" for record in server.requests] == [False, False, True, True]
        assert server.conversation_count == 2


async def test_a_prompt_that_the_script_does_not_have_and_bodies_that_are_none() -> None:
    async with serving(one_trajectory({"text": "1"}, match="This")) as (_, client):
        problems = {
            "No prompt of the script": {"messages": [{"role": "user", "content": [{"type": "text", "text": "That"}]}]},
            "list of messages": {"messages": "x"},
            "whole number from 1": {"messages": [{"role": "user", "content": "This"}], "n": 0},
            "at least 1": {"messages": [{"role": "user", "content": "This"}], "max_tokens": "many"},
        }
        for problem, body in problems.items():
            refused = await client.post("/v1/chat/completions", json=body)
            assert (refused.status_code, problem in refused.json()["error"]["message"]) == (400, True), refused.text
        for body in ("{", "[]"):
            assert "JSON" in (await client.post("/v1/chat/completions", content=body)).json()["error"]["message"]
        assert "no tokenizer" in (await client.post("/generate", json={"prompt": "x"})).json()["error"]["message"]


async def test_two_hundred_conversations_at_once() -> None:
    turns = [{"text": f"turn {index}", "calls": [LS]} for index in range(4)] + [{"text": "end"}]
    async with ScriptedModelServer(one_trajectory(*turns)) as server, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:

        async def play() -> list[str]:
            messages: list[dict[str, Any]] = [{"role": "user", "content": "Go."}]
            while messages[-1].get("tool_calls") or messages[-1]["role"] != "assistant":
                messages += [{"role": "tool", "tool_call_id": call["id"], "content": "a.py"} for call in messages[-1].get("tool_calls", [])]
                async with client.post(f"{server.base_url}/chat/completions", json={"messages": messages, "tools": TOOLS}) as response:
                    messages.append((await response.json())["choices"][0]["message"])
            return [message["content"] for message in messages if message["role"] == "assistant"]

        played = await asyncio.gather(*(play() for _ in range(200)))
        assert played == [["turn 0", "turn 1", "turn 2", "turn 3", "end"]] * 200
        assert (server.conversation_count, server.request_count) == (200, 1000)


def test_as_a_process(tmp_path: Path) -> None:
    script = tmp_path / "script.yaml"
    script.write_text("prompts: [{trajectories: [{turns: [{text: hello}]}]}]")
    command = [sys.executable, "-m", "environments.demo.model_server", "--script", str(script), "--tokenizer", str(make_tokenizer(tmp_path / "tokenizer"))]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        address = process.stdout.readline().strip()
        answer = httpx.post(f"{address}/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
        assert answer.json()["choices"][0]["message"]["content"] == "hello"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 0
    script.write_text("prompts: [{trajectories: [{turns: [{txt: hello}]}]}]")
    failed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (failed.returncode, "prompts.0.trajectories.0.turns.0.txt" in failed.stderr, "Traceback" in failed.stderr) == (1, True, False)
