"""A connection without a valid token gets one answer, and one with it as many as it asks for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.service_harness import ALICE, ServiceHarness, open_service_harness_on_port

PIPELINED_COUNT = 50


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[ServiceHarness]:
    async with open_service_harness_on_port(tmp_path / "state") as running:
        yield running


async def pipelined_responses(harness: ServiceHarness, path: str, token: str | None) -> bytes:
    """All that comes for many requests that are sent at once, the last of which asks for the end of the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(harness.url).port)
    authorization = "" if token is None else f"authorization: Bearer {token}\r\n"
    request = f"GET {path} HTTP/1.1\r\nhost: x\r\n{authorization}"
    writer.write((f"{request}\r\n" * (PIPELINED_COUNT - 1) + f"{request}connection: close\r\n\r\n").encode())
    try:
        return await asyncio.wait_for(reader.read(), 30)
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("path", "token", "status"),
    [("/healthz", None, 200), ("/docs", None, 200), ("/healthz", "nobodys", 200), ("/v1/pools", None, 401), ("/v1/pools", "nobodys", 401)],
)
async def test_without_a_valid_token_one_request_is_answered(harness: ServiceHarness, path: str, token: str | None, status: int) -> None:
    answer = await pipelined_responses(harness, path, token)

    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert answer.count(b"HTTP/1.1 ") == 1
    assert answer.count(b"connection: close\r\n") == 1


@pytest.mark.parametrize("path", ["/healthz", "/v1/pools"])
async def test_with_a_token_every_request_is_answered(harness: ServiceHarness, path: str) -> None:
    assert (await pipelined_responses(harness, path, ALICE.token)).count(b"HTTP/1.1 200 ") == PIPELINED_COUNT


async def test_the_refusal_of_a_token_reaches_a_caller_that_still_sends(harness: ServiceHarness) -> None:
    answer = await harness.http.post("/v1/exec-batch", content=b" " * (8 << 20), headers={"authorization": "Bearer nobodys"})

    assert (answer.status_code, answer.json()["code"], answer.headers["connection"]) == (401, "unauthorized", "close")


async def test_the_agent_is_sent_whole(harness: ServiceHarness) -> None:
    first = await harness.http.get("/v1/agent.pyz", headers={"authorization": ""})
    again = await harness.http.get("/v1/agent.pyz")

    assert int(first.headers["content-length"]) == len(first.content) > 64 << 10
    assert (again.content, again.headers["etag"]) == (first.content, first.headers["etag"])
