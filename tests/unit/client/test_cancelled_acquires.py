"""Tests of acquires that are cancelled: the clients release their request keys, wait for that only briefly, and leave the keys of the caller alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from env_client import AsyncSandboxClient, RetryPolicy, SandboxClient
from env_client.messages.leases import CANCELLED_TIMEOUT_S
from tests.support.scripted_responses import URL, Script, problem

RELEASED = httpx.Response(200, json={"released": [], "unknown": []})
ACQUIRES: dict[str, Callable[[Any], Any]] = {
    "acquire": lambda client: client.acquire("p", 2),
    "hold": lambda client: client.hold(2),
    "lease": lambda client: client.lease("p").__enter__(),
    "gang": lambda client: client.gang(2, request_key="own").__enter__(),
}


def interrupted(client: Any) -> Callable[[httpx.Request], httpx.Response]:
    """Return a step in which the acquire is cancelled, as each of the clients sees it."""

    def interrupt(request: httpx.Request) -> httpx.Response:
        raise KeyboardInterrupt if isinstance(client.inner, SandboxClient) else asyncio.CancelledError

    return interrupt


@pytest.mark.parametrize("acquire", ACQUIRES)
def test_its_key_is_released(client: Any, script: Script, acquire: str) -> None:
    script.steps = [interrupted(client), RELEASED]

    with pytest.raises((KeyboardInterrupt, asyncio.CancelledError)):
        ACQUIRES[acquire](client)

    asked, released = script.bodies()
    assert [request.url.path for request in script.requests] == ["/v1/acquire", "/v1/release"]
    assert released == {"request_key": asked["request_key"], "reset_workspace": True}
    assert script.requests[1].extensions["timeout"]["read"] == CANCELLED_TIMEOUT_S


@pytest.mark.parametrize("acquire", [lambda client: client.acquire(request_key="own"), lambda client: client.hold(request_key="own")])
def test_a_key_of_the_caller_is_not_released(client: Any, script: Script, acquire: Callable[[Any], Any]) -> None:
    script.steps = [interrupted(client), RELEASED]

    with pytest.raises((KeyboardInterrupt, asyncio.CancelledError)):
        acquire(client)

    assert [request.url.path for request in script.requests] == ["/v1/acquire"]


def test_a_failed_release_is_a_warning(client: Any, script: Script, caplog: pytest.LogCaptureFixture) -> None:
    script.steps = [interrupted(client), problem(500, "internal")]

    with pytest.raises((KeyboardInterrupt, asyncio.CancelledError)):
        client.acquire()

    key = script.bodies()[0]["request_key"]
    assert f"because its request_key {key} was not released: because of internal" in caplog.text


def test_an_acquire_that_fails_by_itself_releases_nothing(client: Any, script: Script) -> None:
    script.steps = [problem(503, "no_capacity"), RELEASED]

    with pytest.raises(Exception, match="no_capacity"):
        client.acquire()

    assert len(script.requests) == 1


class SlowTransport(httpx.AsyncBaseTransport):
    """Answers an acquire never, and a release once `may_answer` is set."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.may_answer = asyncio.Event()
        self.answered = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request.url.path)
        if request.url.path == "/v1/acquire":
            await asyncio.Event().wait()
        await self.may_answer.wait()
        assert "request_key" in json.loads(request.content)
        self.answered = True
        return RELEASED


async def cancelled_acquire(transport: SlowTransport) -> asyncio.Task[Any]:
    """Return an acquire that was cancelled and whose release is under way."""
    client = AsyncSandboxClient(URL, "s3cret", transport=transport, retry=RetryPolicy(total_s=0.0))
    acquire = asyncio.create_task(client.acquire())
    for path in ("/v1/acquire", "/v1/release"):
        while path not in transport.asked:
            await asyncio.sleep(0)
        if path == "/v1/acquire":
            acquire.cancel()
    return acquire


async def test_the_release_is_finished_despite_further_cancellations() -> None:
    transport = SlowTransport()
    acquire = await cancelled_acquire(transport)
    for _ in range(3):
        acquire.cancel()
        await asyncio.sleep(0)
    assert not acquire.done()
    transport.may_answer.set()

    with pytest.raises(asyncio.CancelledError):
        await acquire
    assert transport.answered


async def test_a_service_that_does_not_answer_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("env_client.client.CANCELLED_RELEASE_S", 0.05)
    acquire = await cancelled_acquire(SlowTransport())

    with pytest.raises(asyncio.CancelledError):
        await acquire
    assert "the release took longer than 0.05 s" in caplog.text


async def test_a_timeout_of_the_caller_is_a_cancellation() -> None:
    transport = SlowTransport()
    transport.may_answer.set()
    client = AsyncSandboxClient(URL, "s3cret", transport=transport)

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await client.hold()
    assert transport.asked == ["/v1/acquire", "/v1/release"]
