"""WebSocket handshakes pass the same authentication, limits and errors as requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosedError, InvalidStatus
from websockets.http11 import Response
from websockets.typing import Subprotocol

from sandbox_server.api.edge import EdgeMiddleware
from sandbox_server.api.limits import Limits
from sandbox_server.api.problems import STATUS_OF, close_code_of
from sandbox_server.api.websocket import CLOSED_AFTER_ACCEPT, close_reason
from sandbox_server.core import errors
from sandbox_server.core.errors import LeaseNotFound, PoolServiceError, Stopping
from sandbox_server.telemetry import configure_logging
from tests.support import tables
from tests.support.service_harness import ALICE, BOB, ServiceHarness, bearer
from tests.support.users import ROOT

TERMINAL = "/v1/leases/l/terminal"
REFUSED = "cols=0"
"""A query for which a handshake is refused."""


async def open_websocket(
    harness: ServiceHarness,
    path: str = TERMINAL,
    *,
    token: str | None = None,
    subprotocols: tuple[str, ...] = (),
    can_refuse: bool = True,
    query: bytes = REFUSED.encode(),
    application: Any = None,
) -> list[dict[str, Any]]:
    """Open a WebSocket over ASGI; what the service sends."""
    headers = [] if token is None else [(b"authorization", f"Bearer {token}".encode())]
    scope = {
        "type": "websocket", "path": path, "headers": headers, "subprotocols": list(subprotocols), "query_string": query,
        "extensions": {"websocket.http.response": {}} if can_refuse else {},
    }  # fmt: skip
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        await asyncio.sleep(0)
        sent.append(message)

    await (application or harness.application)(scope, receive, send)
    return sent


async def refusal(port: ServiceHarness, path: str = f"{TERMINAL}?{REFUSED}", **options: Any) -> Response:
    """The response with which a handshake over a real port is refused."""
    with pytest.raises(InvalidStatus) as refused:
        async with connect(port.url.replace("http", "ws", 1) + path, proxy=None, **options):
            pass
    return refused.value.response


async def close_of(port: ServiceHarness, path: str = TERMINAL, **options: Any) -> tuple[int, str]:
    """Code and reason with which a connection over a real port is closed after its handshake."""
    async with connect(port.url.replace("http", "ws", 1) + path, proxy=None, **options) as websocket:
        with pytest.raises(ConnectionClosedError) as closed:
            await websocket.recv()
    assert closed.value.rcvd is not None
    return closed.value.rcvd.code, closed.value.rcvd.reason


async def test_without_a_token_it_closes_with_4401(harness: ServiceHarness) -> None:
    accepted, closed = await open_websocket(harness, "/v1/leases/l/terminal", token="wrong")

    assert accepted["type"] == "websocket.accept"
    assert (closed["type"], closed["code"]) == ("websocket.close", 4401)


@pytest.mark.parametrize("by", [{"token": ALICE.token}, {"subprotocols": ("bearer.alices-token",)}])
async def test_with_a_token_it_is_read(harness: ServiceHarness, by: dict[str, Any]) -> None:
    start, body = await open_websocket(harness, "/v1/leases/l/terminal", **by)

    assert (start["type"], start["status"]) == ("websocket.http.response.start", 422)
    assert json.loads(body["body"])["field"] == "cols"
    assert b"x-request-id" in dict(start["headers"])


async def test_elsewhere_there_is_nothing(harness: ServiceHarness) -> None:
    start, _ = await open_websocket(harness, "/v1/nowhere", token=ALICE.token)

    assert start["status"] == 404


@pytest.mark.parametrize("path", ["/v1/nowhere", "/v1/pools", "/healthz"])
async def test_a_path_without_a_websocket_route_is_not_found(port: ServiceHarness, path: str) -> None:
    response = await refusal(port, path, additional_headers=bearer(ALICE))

    assert response.status_code == 404
    assert json.loads(response.body)["code"] == "not_found"
    assert path in json.loads(response.body)["detail"]


async def test_a_refused_handshake_has_the_error_document_of_http(port: ServiceHarness) -> None:
    response = await refusal(port, additional_headers={**bearer(ALICE), "X-Request-ID": "mine-1"})
    document = json.loads(response.body)

    assert response.status_code == document["status"] == 422
    assert response.headers["content-type"] == "application/problem+json"
    assert response.headers["x-request-id"] == document["request_id"] == "mine-1"
    assert document["code"] == "invalid_request"


async def test_a_token_in_a_subprotocol_is_taken(port: ServiceHarness) -> None:
    response = await refusal(port, subprotocols=[Subprotocol("bearer.bobs-token")])

    assert response.status_code == 422


async def test_a_lease_of_another_tenant_closes_the_connection_with_4404(port: ServiceHarness) -> None:
    (of_alice,) = await port.acquire()

    code, reason = await close_of(port, f"/v1/leases/{of_alice}/terminal", additional_headers=bearer(BOB))

    assert (code, reason) == (4404, f"there is no lease '{of_alice}', or it is not yours")


async def test_a_terminal_that_the_agent_does_not_have_is_not_implemented(port: ServiceHarness) -> None:
    (lease_id,) = await port.acquire()

    response = await refusal(port, f"/v1/leases/{lease_id}/terminal", additional_headers=bearer(ALICE))

    assert (response.status_code, json.loads(response.body)["code"]) == (501, "not_implemented")


@pytest.mark.parametrize("options", [{}, {"additional_headers": {"Authorization": "Bearer wrong"}}, {"subprotocols": [Subprotocol("bearer.wrong")]}])
async def test_an_invalid_token_closes_a_real_connection_with_4401(port: ServiceHarness, options: dict[str, Any]) -> None:
    code, reason = await close_of(port, **options)

    assert code == 4401
    assert "token" in reason


async def test_a_handshake_with_too_long_a_query_is_refused(harness: ServiceHarness) -> None:
    start, body = await open_websocket(harness, token=ALICE.token, query=b"x" * Limits().query_bytes)

    assert start["status"] == 422
    assert json.loads(body["body"])["limit"] == "query_bytes"


async def test_a_handshake_is_logged_with_its_request_and_without_its_token(port: ServiceHarness, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        await refusal(port, subprotocols=[Subprotocol("bearer.alices-token")])

    (line,) = [record for record in caplog.records if record.message == "request"]
    assert (getattr(line, "method", None), getattr(line, "path", None), getattr(line, "status", None)) == ("WEBSOCKET", TERMINAL, 422)
    assert "alices-token" not in caplog.text


@contextlib.contextmanager
def logging_restored() -> Iterator[None]:
    """Undo `configure_logging` at the end."""
    loggers = [logging.getLogger(name) for name in (None, "uvicorn", "uvicorn.error", "uvicorn.asgi", "uvicorn.access")]
    before = [(logger, logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    try:
        yield
    finally:
        for logger, handlers, level, propagate in before:
            logger.handlers[:] = handlers
            logger.setLevel(level)
            logger.propagate = propagate


async def test_no_log_level_shows_the_token_of_a_handshake(port: ServiceHarness, capsys: pytest.CaptureFixture[str]) -> None:
    """The WebSocket library logs every header of a handshake at its debug level."""
    with logging_restored():
        configure_logging("json", "debug")
        await refusal(port, subprotocols=[Subprotocol("bearer.alices-token")])
        await refusal(port, additional_headers=bearer(ALICE))

    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    of_service = [line for line in lines if not line["logger"].startswith("websockets.client")]
    assert any(line["message"] == "request" and line["status"] == 422 for line in of_service)
    assert "alices-token" not in json.dumps(of_service)


async def test_a_server_that_cannot_refuse_a_handshake_closes_with_the_code_of_the_error(harness: ServiceHarness) -> None:
    accepted, closed = await open_websocket(harness, token=ALICE.token, can_refuse=False)

    assert accepted["type"] == "websocket.accept"
    assert (closed["code"], closed["reason"]) == (4422, "cols: must be a whole number from 1 to 1000")


def edge_with(harness: ServiceHarness, route: Any) -> EdgeMiddleware:
    """The edge before a route of the test's own."""
    edge = EdgeMiddleware(route)
    edge.service = harness.application._edge.service
    return edge


@pytest.mark.parametrize(("error", "code"), [(LeaseNotFound("é" * 200), 4404), (Stopping(), 4503), (RuntimeError("a bug"), 4500)])
async def test_an_error_after_the_handshake_closes_the_connection(harness: ServiceHarness, error: Exception, code: int) -> None:
    async def route(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        raise error

    accepted, closed = await open_websocket(harness, subprotocols=("bearer.alices-token",), application=edge_with(harness, route))

    assert accepted["subprotocol"] == "bearer.alices-token"
    assert (closed["type"], closed["code"]) == ("websocket.close", code)
    assert len(closed["reason"].encode()) <= 123


async def test_a_caller_that_hangs_up_is_no_error(harness: ServiceHarness, caplog: pytest.LogCaptureFixture) -> None:
    async def route(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "websocket.accept"})

    async def refuse_to_send(message: Any) -> None:
        raise OSError("the connection is closed")

    scope = {"type": "websocket", "path": TERMINAL, "headers": [(b"authorization", b"Bearer alices-token")], "query_string": b""}
    with caplog.at_level(logging.INFO):
        await edge_with(harness, route)(scope, None, refuse_to_send)  # type: ignore[arg-type]

    assert [record.levelname for record in caplog.records if record.levelno > logging.INFO] == []
    assert "the client disconnected" in caplog.text


async def test_a_stop_closes_open_connections_with_4503(harness: ServiceHarness) -> None:
    opened = asyncio.Event()

    async def route(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        opened.set()
        await asyncio.Event().wait()

    edge = edge_with(harness, route)
    assert edge.service is not None
    serving = asyncio.create_task(open_websocket(harness, token=ALICE.token, application=edge))
    await opened.wait()
    assert serving in edge.service.requests
    edge.service.stopping.set_result(None)
    serving.cancel()

    *_, closed = await serving
    assert closed["code"] == 4503


def test_close_codes_are_those_of_the_contract() -> None:
    assert {close_code_of(code) for code in CLOSED_AFTER_ACCEPT} == {4401, 4404, 4410}
    assert all(4000 <= close_code_of(code) < 5000 for code in STATUS_OF)
    known = {one.code for one in vars(errors).values() if isinstance(one, type) and issubclass(one, PoolServiceError)}
    assert known >= CLOSED_AFTER_ACCEPT


def test_the_documentation_has_the_close_codes() -> None:
    rows = tables.parse((ROOT / "docs" / "http-api.md").read_text(encoding="utf-8").partition("## WebSocket connections")[2].partition("\n## ")[0])[1:]
    documented = {code: int(row[0]) for row in rows if row[0].isdecimal() for code in re.findall("`([a-z_]+)`", row[1])}

    assert documented == {code: close_code_of(code) for code in CLOSED_AFTER_ACCEPT}


def test_a_close_reason_is_cut_between_characters() -> None:
    assert close_reason("a" + "é" * 100) == "a" + "é" * 61
