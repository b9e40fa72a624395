"""The terminal is not built; the door to it is."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.harness import ALICE, Harness


async def knock(harness: Harness, path: str, *, token: str | None = None, subprotocols: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Open a WebSocket; what the service sends."""
    headers = [] if token is None else [(b"authorization", f"Bearer {token}".encode())]
    scope = {
        "type": "websocket", "path": path, "headers": headers, "subprotocols": list(subprotocols), "query_string": b"",
        "extensions": {"websocket.http.response": {}},
    }  # fmt: skip
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        await asyncio.sleep(0)
        sent.append(message)

    await harness.application(scope, receive, send)
    return sent


async def test_without_a_token_it_closes_with_4401(harness: Harness) -> None:
    accepted, closed = await knock(harness, "/v1/leases/l/terminal", token="wrong")

    assert accepted["type"] == "websocket.accept"
    assert (closed["type"], closed["code"]) == ("websocket.close", 4401)


@pytest.mark.parametrize("by", [{"token": ALICE.token}, {"subprotocols": ("bearer.alices-token",)}])
async def test_with_a_token_it_says_that_it_is_not_built(harness: Harness, by: dict[str, Any]) -> None:
    start, body = await knock(harness, "/v1/leases/l/terminal", **by)

    assert (start["type"], start["status"]) == ("websocket.http.response.start", 501)
    assert b"not_implemented" in body["body"]
    assert b"x-request-id" in dict(start["headers"])


async def test_elsewhere_there_is_nothing(harness: Harness) -> None:
    start, _ = await knock(harness, "/v1/nowhere", token=ALICE.token)

    assert start["status"] == 404
