"""The server stops in order whatever its connections do."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, MutableMapping
from typing import Any

import pytest
import uvicorn

from sandbox_server.uvicorn_server import PromptServer

Scope = MutableMapping[str, Any]
#: More than the kernel holds for a connection whose client does not read.
LARGE_BYTES = 16 << 20


class Application:
    """Sends a large message to every WebSocket connection, answers no HTTP request until `answer` is set, and notes that it was shut down."""

    def __init__(self) -> None:
        self.was_shut_down = False
        self.has_request = asyncio.Event()
        self.answer = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            self.was_shut_down = True
            await send({"type": "lifespan.shutdown.complete"})
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.accept"})
            await send({"type": "websocket.send", "bytes": bytes(LARGE_BYTES)})
            self.has_request.set()
        else:
            self.has_request.set()
            await self.answer.wait()
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body"})


@contextlib.asynccontextmanager
async def connected(application: Application, head: str, stop_within_s: int | None = None) -> AsyncIterator[tuple[PromptServer, asyncio.StreamReader]]:
    """A server with one connection, which has sent this head and whose request is being answered. Also gives what the client reads."""
    config = uvicorn.Config(application, port=0, lifespan="on", log_config=None, timeout_graceful_shutdown=stop_within_s)
    server = PromptServer(config)
    config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.servers[0].sockets[0].getsockname()[1])
    try:
        writer.write(head.encode())
        await application.has_request.wait()
        yield server, reader
    finally:
        writer.close()


UPGRADE = "connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"


async def test_a_websocket_connection_that_does_not_read_is_closed_once() -> None:
    """Closing it a second time would be an error, which would leave the application running."""
    application = Application()
    async with connected(application, f"GET /ws HTTP/1.1\r\nhost: x\r\n{UPGRADE}\r\n") as (server, reader):
        stopping = asyncio.create_task(server.shutdown())
        assert len(await reader.read()) > LARGE_BYTES
        await stopping

    assert application.was_shut_down


async def test_a_request_that_is_being_answered_is_finished_before_the_application_is_shut_down() -> None:
    application = Application()
    async with connected(application, "GET / HTTP/1.1\r\nhost: x\r\n\r\n") as (server, reader):
        stopping = asyncio.create_task(server.shutdown())
        await asyncio.sleep(0)
        assert not application.was_shut_down
        application.answer.set()
        assert (await reader.read()).startswith(b"HTTP/1.1 204 ")
        await stopping

    assert application.was_shut_down


async def test_a_request_that_is_not_answered_in_time_is_cancelled(caplog: pytest.LogCaptureFixture) -> None:
    application = Application()
    async with connected(application, "GET / HTTP/1.1\r\nhost: x\r\n\r\n", stop_within_s=0) as (server, reader):
        await server.shutdown()
        await reader.read()

    assert application.was_shut_down
    assert "the time for stopping is over" in caplog.text
