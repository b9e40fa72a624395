"""Callers without a token cannot keep out those who have one."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, MutableMapping
from typing import Any

import pytest
import uvicorn

from sandbox_server.connection_limiter import ConnectionLimiter, LimitedConnection, places_for

Scope = MutableMapping[str, Any]


async def application(scope: Scope, receive: Any, send: Any) -> None:
    """Marks the scope of who carries the token, as the service does, and says hello."""
    if scope["type"] == "http":
        scope["tenant"] = next((value.decode() for name, value in scope["headers"] if name == b"authorization"), None)
        if scope["path"] == "/endless":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"hello", "more_body": True})
            while (await receive())["type"] != "http.disconnect":
                pass
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
        await send({"type": "http.response.body", "body": b"hello"})


@contextlib.asynccontextmanager
async def harness(doors: ConnectionLimiter) -> AsyncIterator[int]:
    """A server behind these doors; gives its port."""
    config = uvicorn.Config(application, port=0, lifespan="off", log_config=None, http=functools.partial(LimitedConnection, doors=doors))  # type: ignore[arg-type]
    server = uvicorn.Server(config)
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


def doors(places: int, head_within_s: float = 60.0) -> ConnectionLimiter:
    return ConnectionLimiter(places=places, tenant_of=lambda scope: scope.get("tenant"), head_within_s=head_within_s)


async def test_strangers_make_room_the_oldest_first() -> None:
    async with harness(doors(3)) as port, Caller(port) as first, Caller(port) as second, Caller(port) as third:
        await second.ask(token=False)
        async with Caller(port) as friend:
            assert await friend.ask(token=True)
            assert await first.is_over()
            assert await second.ask(token=False)
            assert await third.ask(token=False)


async def test_a_flood_of_idle_connections_keeps_nobody_out() -> None:
    async with harness(doors(20)) as port, contextlib.AsyncExitStack() as stack:
        friend = await stack.enter_async_context(Caller(port))
        assert await friend.ask(token=True)
        for _ in range(200):
            flooder = await stack.enter_async_context(Caller(port))
            flooder.writer.write(b"G")
        newcomer = await stack.enter_async_context(Caller(port))

        assert await newcomer.ask(token=True)
        assert await friend.ask(token=True)


async def test_friends_are_not_sent_away_for_strangers() -> None:
    async with harness(doors(3)) as port, Caller(port) as one, Caller(port) as two:
        assert await one.ask(token=True)
        assert await two.ask(token=True)
        async with Caller(port) as stranger, Caller(port) as newer:
            assert await stranger.is_over()
            assert await newer.ask(token=False)
        assert await one.ask(token=True)
        assert await two.ask(token=True)


@pytest.mark.parametrize("path", ["/", "/endless"])
async def test_a_tenant_that_takes_every_place_keeps_no_other_out(path: str) -> None:
    """Idle connections, and such as carry an answer that does not end."""
    async with harness(doors(16)) as port, contextlib.AsyncExitStack() as stack:
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
    async with harness(doors(8)) as port, contextlib.AsyncExitStack() as stack:
        callers = [await stack.enter_async_context(Caller(port)) for _ in range(8)]
        for number, caller in enumerate(callers):
            assert await caller.ask(token=True, path="/" if number == 3 else "/endless")

        assert await callers[3].is_over()
        assert not any(caller.reader.at_eof() for number, caller in enumerate(callers) if number != 3)


async def test_a_place_is_free_again_when_its_connection_ends() -> None:
    door = doors(1)
    async with harness(door) as port:
        async with Caller(port) as one:
            assert await one.ask(token=True)
        while door.strangers or any(door.friends.values()):
            await asyncio.sleep(0)
        async with Caller(port) as two:
            assert await two.ask(token=True)


@pytest.mark.parametrize("first", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nhost: x\r\nx-slow: "])
async def test_a_head_that_does_not_come_ends_the_connection(first: bytes) -> None:
    async with harness(doors(10, head_within_s=0.05)) as port, Caller(port) as slow:
        slow.writer.write(first)
        assert await asyncio.wait_for(slow.is_over(), 5)


async def test_a_second_head_is_waited_for_no_longer_than_the_first() -> None:
    async with harness(doors(10, head_within_s=0.2)) as port, Caller(port) as slow:
        assert await slow.ask(token=True)
        slow.writer.write(b"GET / HT")
        assert await asyncio.wait_for(slow.is_over(), 5)


async def test_what_is_no_http_gets_a_problem_document() -> None:
    async with harness(doors(10)) as port, Caller(port) as odd:
        odd.writer.write(b"\x16\x03\x01 this is TLS\r\n\r\n")
        answer = await odd.reader.read()

    assert answer.startswith(b"HTTP/1.1 400")
    assert b"application/problem+json" in answer
    assert b"x-request-id" in answer


def test_there_are_always_some_places() -> None:
    assert places_for(100) == 64
    assert places_for(20_000) == 20_000 - 512
    assert places_for(1 << 20) == 1 << 16
