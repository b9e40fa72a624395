"""Plain uvicorn is not locked out by callers without a token: idle connections, half-sent requests, and no more than 1,024 descriptors."""

from __future__ import annotations

import contextlib
import resource
import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.lifetime.test_end import Process, acquire, uvicorn_on
from tests.support.service_main import ServiceParts

DESCRIPTORS = 1024
IDLE_CONNECTIONS = 3000
HEAD_WITHIN_S = 1.0
CLOSED_WITHIN_S = 20.0
AT_ONCE = 100
"""Fewer connections than the kernel queues for the service. It ignores the others, and the client would try them again a second later."""


@pytest.fixture(scope="module", autouse=True)
def _descriptors_for_this_process() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < IDLE_CONNECTIONS + 500:
        pytest.skip(f"this process may open no more than {hard} files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def flood(stack: contextlib.ExitStack, process: Process, count: int, first: bytes = b"") -> list[socket.socket]:
    """Open so many connections, and send on each what a request could begin with."""
    connections = []
    for number in range(1, count + 1):
        connection = stack.enter_context(process.connect())
        connections.append(connection)
        if first:
            with contextlib.suppress(ConnectionError):  # it has made room for another already
                connection.sendall(first)
        if number % AT_ONCE == 0:
            with process.http() as http:
                http.get("/readyz")  # the service has accepted the connections when it responds
    return connections


def wait_until_closed(connections: list[socket.socket]) -> None:
    """Wait until the service has closed each of them."""
    deadline = time.monotonic() + CLOSED_WITHIN_S
    for connection in connections:
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""


@pytest.mark.parametrize(("loop", "count"), [("uvloop", IDLE_CONNECTIONS), ("asyncio", IDLE_CONNECTIONS // 2)])
def test_idle_connections_keep_nobody_with_a_token_out(tmp_path: Path, loop: str, count: int) -> None:
    """As `ulimit -n 1024` sets it: the limit cannot be raised by an ordinary user, and root does not raise it either."""
    with uvicorn_on(tmp_path / "state", "--loop", loop, descriptors=DESCRIPTORS) as process, contextlib.ExitStack() as stack:
        with process.http() as http:
            acquire(http)
        connections = flood(stack, process, count)

        with process.http() as http:
            started = time.monotonic()
            acquire(http)
            took_s = time.monotonic() - started

        assert took_s < 5.0
        poll = select.poll()
        for connection in connections:
            poll.register(connection, select.POLLIN)
        assert len(poll.poll(0)) >= count - DESCRIPTORS
        assert process.end() < 10.0
    assert "out of system resource" not in "".join(process.said)


def test_connections_that_send_no_whole_head_are_closed(tmp_path: Path) -> None:
    with uvicorn_on(tmp_path / "state", parts=ServiceParts(scripted_agents=True, head_within_s=HEAD_WITHIN_S)) as process, contextlib.ExitStack() as stack:
        idle = flood(stack, process, 20)
        half_sent = flood(stack, process, 20, b"POST /v1/acquire HTTP/1.1\r\nHost: h\r\nX-Slow: ")
        wait_until_closed([*idle, *half_sent])

        with process.http() as http:
            assert http.get("/readyz").json()["warnings"] == []


def test_a_server_whose_connections_cannot_be_reached_is_said(tmp_path: Path) -> None:
    with uvicorn_on(tmp_path / "state", "--http", "h11") as process, process.http() as http:
        (said,) = http.get("/readyz").json()["warnings"]

    assert "H11Protocol" in said
    assert "without a token" in said
    assert any("connections are not limited" in line for line in process.said)
