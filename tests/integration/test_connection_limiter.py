"""Connections without a valid token cannot keep out those that have one."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, MutableMapping
from typing import Any

import pytest
import uvicorn

from sandbox_server.connection_limiter import ConnectionLimiter, LimitedConnection, places_for
from sandbox_server.uvicorn_server import PromptServer

Scope = MutableMapping[str, Any]


async def application(scope: Scope, receive: Any, send: Any) -> None:
    """Notes the tenant in the scope, as the service does, and answers with "hello". A WebSocket connection is accepted and kept open."""
    if scope["type"] in ("http", "websocket"):
        scope["tenant"] = next((value.decode() for name, value in scope["headers"] if name == b"authorization"), None)
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        while (await receive())["type"] != "websocket.disconnect":
            pass
    if scope["type"] == "http":
        if scope["path"] == "/endless":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"hello", "more_body": True})
            while (await receive())["type"] != "http.disconnect":
                pass
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
        await send({"type": "http.response.body", "body": b"hello"})


@contextlib.asynccontextmanager
async def running_server(limiter: ConnectionLimiter) -> AsyncIterator[int]:
    """A server whose connections this limiter counts; gives its port."""
    config = uvicorn.Config(application, port=0, lifespan="off", log_config=None, http=functools.partial(LimitedConnection, limiter=limiter))  # type: ignore[arg-type]
    server = PromptServer(config)
    config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield port
    finally:
        server.should_exit = True
        await server.shutdown()


class Caller:
    """One connection."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def __aenter__(self) -> Caller:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        return self

    async def open_websocket(self, token: bool, tenant: str = "t") -> None:
        """Upgrade the connection."""
        upgrade = "connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
        authorization = f"authorization: {tenant}\r\n" if token else ""
        self.writer.write(f"GET /ws HTTP/1.1\r\nhost: x\r\n{upgrade}{authorization}\r\n".encode())
        assert (await self.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    async def ask(self, token: bool, tenant: str = "t", path: str = "/") -> bytes:
        """One whole request; the answer to "/endless" does not end."""
        head = f"GET {path} HTTP/1.1\r\nhost: x\r\n".encode() + (f"authorization: {tenant}\r\n".encode() if token else b"") + b"\r\n"
        self.writer.write(head)
        await self.writer.drain()
        return await self.reader.readuntil(b"hello")

    async def is_over(self) -> bool:
        """Wait until the other side has ended the connection."""
        try:
            await self.reader.read()
            return self.reader.at_eof()
        except ConnectionResetError:
            return True


def limiter_of(places: int, head_within_s: float = 60.0) -> ConnectionLimiter:
    return ConnectionLimiter(places=places, tenant_of=lambda scope: scope.get("tenant"), head_within_s=head_within_s)


async def test_a_new_connection_takes_the_place_of_the_oldest_unauthenticated_one() -> None:
    async with running_server(limiter_of(3)) as port, Caller(port) as first, Caller(port) as second, Caller(port) as third:
        await second.ask(token=False)
        async with Caller(port) as authenticated:
            assert await authenticated.ask(token=True)
            assert await first.is_over()
            assert await second.ask(token=False)
            assert await third.ask(token=False)


async def test_a_flood_of_idle_connections_keeps_nobody_out() -> None:
    async with running_server(limiter_of(20)) as port, contextlib.AsyncExitStack() as stack:
        authenticated = await stack.enter_async_context(Caller(port))
        assert await authenticated.ask(token=True)
        for _ in range(200):
            flooder = await stack.enter_async_context(Caller(port))
            flooder.writer.write(b"G")
        newcomer = await stack.enter_async_context(Caller(port))

        assert await newcomer.ask(token=True)
        assert await authenticated.ask(token=True)


async def test_authenticated_connections_are_not_closed_for_unauthenticated_ones() -> None:
    async with running_server(limiter_of(3)) as port, Caller(port) as one, Caller(port) as two:
        assert await one.ask(token=True)
        assert await two.ask(token=True)
        async with Caller(port) as unauthenticated, Caller(port) as newer:
            assert await unauthenticated.is_over()
            assert await newer.ask(token=False)
        assert await one.ask(token=True)
        assert await two.ask(token=True)


@pytest.mark.parametrize("path", ["/", "/endless"])
async def test_a_tenant_that_takes_every_place_keeps_no_other_out(path: str) -> None:
    """Idle connections, and such as carry an answer that does not end."""
    async with running_server(limiter_of(16)) as port, contextlib.AsyncExitStack() as stack:
        greedy = [await stack.enter_async_context(Caller(port)) for _ in range(14)]
        for caller in greedy:
            assert await caller.ask(token=True, tenant="greedy", path=path)
        others = []
        for _ in range(6):
            other = await stack.enter_async_context(Caller(port))
            assert await other.ask(token=True, tenant="other")
            others.append(other)

        for other in others:
            assert await other.ask(token=True, tenant="other")
        ended = greedy[:6] if path == "/" else greedy[-6:]
        for caller in ended:
            assert await caller.is_over()


async def test_of_one_tenant_an_idle_connection_goes_before_one_at_work() -> None:
    async with running_server(limiter_of(8)) as port, contextlib.AsyncExitStack() as stack:
        callers = [await stack.enter_async_context(Caller(port)) for _ in range(8)]
        for number, caller in enumerate(callers):
            assert await caller.ask(token=True, path="/" if number == 3 else "/endless")

        assert await callers[3].is_over()
        assert not any(caller.reader.at_eof() for number, caller in enumerate(callers) if number != 3)


async def test_a_place_is_free_again_when_its_connection_ends() -> None:
    limiter = limiter_of(1)
    async with running_server(limiter) as port:
        async with Caller(port) as one:
            assert await one.ask(token=True)
        while limiter.unauthenticated or any(limiter.authenticated.values()):
            await asyncio.sleep(0)
        async with Caller(port) as two:
            assert await two.ask(token=True)


async def test_a_websocket_keeps_its_place_until_it_ends() -> None:
    limiter = limiter_of(1)
    async with running_server(limiter) as port:
        async with Caller(port) as one:
            await one.open_websocket(token=True)
            assert [tenant for tenant, connections in limiter.authenticated.items() if connections] == ["t"]
            async with Caller(port) as refused:
                assert await refused.is_over()
        while limiter.authenticated:
            await asyncio.sleep(0)
        async with Caller(port) as two:
            assert await two.ask(token=True)


async def test_an_unauthenticated_websocket_is_closed_for_a_new_connection() -> None:
    async with running_server(limiter_of(1)) as port, Caller(port) as first:
        await first.open_websocket(token=False)
        async with Caller(port) as second:
            assert await second.ask(token=True)
            assert await first.is_over()


async def test_an_idle_connection_of_a_tenant_is_closed_before_one_of_its_websockets() -> None:
    async with running_server(limiter_of(8)) as port, contextlib.AsyncExitStack() as stack:
        callers = [await stack.enter_async_context(Caller(port)) for _ in range(8)]
        for number, caller in enumerate(callers):
            if number == 3:
                assert await caller.ask(token=True)
            else:
                await caller.open_websocket(token=True)

        assert await callers[3].is_over()
        assert not any(caller.reader.at_eof() for number, caller in enumerate(callers) if number != 3)


async def test_a_handshake_that_cannot_be_read_gets_a_problem_document_and_frees_its_place() -> None:
    limiter = limiter_of(2)
    async with running_server(limiter) as port, Caller(port) as odd:
        head = b"GET /ws HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
        odd.writer.write(head + b"x-long: " + b"x" * 20_000 + b"\r\n\r\n")
        answer = await asyncio.wait_for(odd.reader.read(), 5)
        while limiter.unauthenticated:
            await asyncio.sleep(0)

    assert answer.startswith(b"HTTP/1.1 400")
    assert b"application/problem+json" in answer


@pytest.mark.parametrize("first", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nhost: x\r\nx-slow: "])
async def test_a_head_that_does_not_come_ends_the_connection(first: bytes) -> None:
    async with running_server(limiter_of(10, head_within_s=0.05)) as port, Caller(port) as slow:
        slow.writer.write(first)
        assert await asyncio.wait_for(slow.is_over(), 5)


async def test_a_second_head_is_waited_for_no_longer_than_the_first() -> None:
    async with running_server(limiter_of(10, head_within_s=0.2)) as port, Caller(port) as slow:
        assert await slow.ask(token=True)
        slow.writer.write(b"GET / HT")
        assert await asyncio.wait_for(slow.is_over(), 5)


async def test_what_is_no_http_gets_a_problem_document() -> None:
    async with running_server(limiter_of(10)) as port, Caller(port) as odd:
        odd.writer.write(b"\x16\x03\x01 this is TLS\r\n\r\n")
        answer = await odd.reader.read()

    assert answer.startswith(b"HTTP/1.1 400")
    assert b"application/problem+json" in answer
    assert b"x-request-id" in answer


def test_there_are_always_some_places() -> None:
    assert places_for(100) == 64
    assert places_for(20_000) == 20_000 - 512
    assert places_for(1 << 20) == 1 << 16
