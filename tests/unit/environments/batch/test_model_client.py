"""The client of the model server: what it repeats, what it refuses, and when it gives up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from environments.batch import model_client
from environments.batch.model_client import ModelClient, ModelFault, ModelUnavailable, PromptRefused
from environments.demo.model_server import ScriptedModelServer

MESSAGES = [{"role": "user", "content": "Go."}]


def script(fault: dict[str, Any], *, prompt: str = "") -> dict[str, Any]:
    good = {"match": "good", "trajectories": [{"turns": [{"text": "Fine."}]}]}
    return {"prompts": [good, {"match": prompt, "trajectories": [{"turns": [{"text": "Done.", "fault": fault}]}]}]}


@asynccontextmanager
async def connected(fault: dict[str, Any], *, retries: int = 2, timeout_s: float = 20.0) -> AsyncIterator[tuple[ModelClient, ScriptedModelServer, list[float]]]:
    """A client of a server with a fault, and the delays that it waited."""
    delays: list[float] = []

    async def sleep(delay_s: float) -> None:
        delays.append(delay_s)

    options = {"api_key": "k", "model": "m", "timeout_s": timeout_s, "retries": retries, "max_connections": 4}
    async with ScriptedModelServer(script(fault)) as server, ModelClient(base_url=server.base_url, sleep=sleep, **options) as client:  # type: ignore[arg-type]
        yield client, server, delays


async def test_a_passing_fault_is_repeated() -> None:
    faults = [{"kind": "http_error", "status": 503}, {"kind": "http_error", "status": 429}, {"kind": "no_choices"}, {"kind": "cut"}]
    await asyncio.gather(*map(_repeat_a_passing_fault, faults))


async def _repeat_a_passing_fault(fault: dict[str, Any]) -> None:
    async with connected({**fault, "times": 2}) as (client, server, delays):
        answer = await client.chat_completion(messages=MESSAGES)

        assert answer["choices"][0]["message"]["content"] == "Done."
        assert (server.request_count, len(delays)) == (3, 2)
        assert 0 < delays[0] <= 0.5 < delays[1] <= 1.0 or delays[0] <= delays[1]


async def test_half_a_surrogate_pair_is_sent() -> None:
    async with connected({"kind": "http_error", "status": 500}) as (client, server, _):
        answer = await client.chat_completion(messages=[{"role": "user", "content": "good \ud800"}])

        assert answer["choices"][0]["message"]["content"] == "Fine."
        assert server.request_count == 1


async def test_a_server_that_fails_always_ends_the_run() -> None:
    async with connected({"kind": "http_error", "status": 500, "times": None}) as (client, server, _):
        with pytest.raises(ModelUnavailable, match=r"does not answer \(3 requests in .*HTTP 500"):
            await client.chat_completion(messages=MESSAGES)
        assert server.request_count == 3


async def test_a_silent_server_ends_the_run() -> None:
    async with connected({"kind": "silence", "times": None}, retries=1, timeout_s=0.2) as (client, _, _):
        with pytest.raises(ModelUnavailable, match="ReadTimeout"):
            await client.chat_completion(messages=MESSAGES)


async def test_a_server_that_answers_others_fails_one_prompt_only() -> None:
    async with connected({"kind": "http_error", "status": 500, "times": None}) as (client, _, delays):

        async def answer_another(delay_s: float) -> None:
            delays.append(delay_s)
            await client.chat_completion(messages=[{"role": "user", "content": "good"}])

        client._sleep = answer_another
        with pytest.raises(ModelFault, match="HTTP 500"):
            await client.chat_completion(messages=MESSAGES)


async def test_responses_that_are_no_answers_fail_one_prompt_only() -> None:
    contents = [b"null", b"", b'{"choices": []}', b'{"choices": [{"message": null}]}', b'\xff{"choices": []}', b"[" * 200_000]
    await asyncio.gather(*map(_fail_one_prompt, contents))


async def _fail_one_prompt(content: bytes) -> None:
    async with connected({"kind": "http_error", "status": 500}, retries=1) as (client, _, delays):
        client._connections = httpx.MockTransport(lambda request: httpx.Response(200, content=content))  # type: ignore[assignment]  # a transport like the real one
        with pytest.raises(ModelFault, match="no chat completion"):
            await client.chat_completion(messages=MESSAGES)
        assert len(delays) == 1


async def test_an_endless_response_fails_one_prompt_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_client, "MAX_RESPONSE_BYTES", 1 << 16)
    sent: list[int] = []

    async def endless() -> AsyncIterator[bytes]:
        while True:
            sent.append(1 << 12)
            yield b" " * (1 << 12)

    async with connected({"kind": "http_error", "status": 500}, retries=0) as (client, _, _):
        client._connections = httpx.MockTransport(lambda request: httpx.Response(200, content=endless()))  # type: ignore[assignment]  # a transport like the real one
        with pytest.raises(ModelFault, match="longer than 65536 bytes"):
            await client.chat_completion(messages=MESSAGES)
    assert sum(sent) <= (1 << 16) + (1 << 12)


async def test_a_refused_prompt_is_not_repeated() -> None:
    async with connected({"kind": "http_error", "status": 400, "times": None}) as (client, server, _):
        with pytest.raises(PromptRefused, match="HTTP 400"):
            await client.chat_completion(messages=MESSAGES)
        assert server.request_count == 1


async def test_a_wrong_key_or_address_ends_the_run_at_once() -> None:
    await asyncio.gather(*map(_end_the_run, [401, 403, 404]))


async def _end_the_run(status: int) -> None:
    async with connected({"kind": "http_error", "status": status, "times": None}) as (client, server, _):
        with pytest.raises(ModelUnavailable, match=f"HTTP {status}") as failure:
            await client.chat_completion(messages=MESSAGES)
        assert "--api_key" in failure.value.next_step
        assert server.request_count == 1
