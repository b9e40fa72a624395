"""Tests of the connections: one request at a time uses a connection, and the connection returned last is used next."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from env_client.transport import connections
from env_client.transport.connections import AsyncConnections, Connections, default_max_connections, environment_proxy


class GeneratedBody(httpx.AsyncByteStream, httpx.SyncByteStream):
    """A body that is created when it is read."""

    def __iter__(self) -> Iterator[bytes]:
        yield b"hello"

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b"hello"


class Carrier(httpx.MockTransport):
    """A transport that counts its requests."""

    def __init__(self) -> None:
        super().__init__(self._answer)
        self.carried = 0
        self.closed = False

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.carried += 1
        if request.url.path == "/fail":
            raise httpx.ConnectError("refused")
        return httpx.Response(200, stream=GeneratedBody())

    def close(self) -> None:
        self.closed = True

    async def aclose(self) -> None:
        self.closed = True


@pytest.fixture
def made() -> list[Carrier]:
    return []


def make(made: list[Carrier]) -> Carrier:
    made.append(Carrier())
    return made[-1]


def a_request(path: str = "/") -> httpx.Request:
    return httpx.Request("GET", f"http://pool.test{path}")


def test_consecutive_requests_share_a_connection(made: list[Carrier]) -> None:
    pool = Connections(lambda: make(made), 10)
    for _ in range(3):
        response = pool.handle_request(a_request())
        assert response.read() == b"hello"
        response.close()

    assert [carrier.carried for carrier in made] == [3]


def test_concurrent_requests_have_connections_of_their_own(made: list[Carrier]) -> None:
    pool = Connections(lambda: make(made), 10)
    responses = [pool.handle_request(a_request()) for _ in range(3)]
    for response in responses:
        response.close()
        response.close()
    pool.handle_request(a_request()).close()

    assert [carrier.carried for carrier in made] == [1, 1, 2]


def test_a_failed_request_frees_its_place_and_closes_its_connection(made: list[Carrier]) -> None:
    pool = Connections(lambda: make(made), 1)
    with pytest.raises(httpx.ConnectError):
        pool.handle_request(a_request("/fail"))
    pool.handle_request(a_request()).close()

    assert [(carrier.carried, carrier.closed) for carrier in made] == [(1, True), (1, False)]


def test_close_closes_all_idle_connections(made: list[Carrier]) -> None:
    pool = Connections(lambda: make(made), 10)
    for response in [pool.handle_request(a_request()) for _ in range(3)]:
        response.close()
    pool.close()

    assert [carrier.closed for carrier in made] == [True] * 3


def test_idle_connections_beyond_the_limit_are_closed(made: list[Carrier], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_IDLE", 1)
    pool = Connections(lambda: make(made), 10)
    for response in [pool.handle_request(a_request()) for _ in range(3)]:
        response.close()

    assert [carrier.closed for carrier in made] == [False, True, True]


async def test_asynchronous_connections_are_reused_and_closed(made: list[Carrier]) -> None:
    pool = AsyncConnections(lambda: make(made), 10)
    responses = [await pool.handle_async_request(a_request()) for _ in range(2)]
    for response in responses:
        assert await response.aread() == b"hello"
        await response.aclose()
    with pytest.raises(httpx.ConnectError):
        await pool.handle_async_request(a_request("/fail"))
    await (await pool.handle_async_request(a_request())).aclose()
    await pool.aclose()

    assert [carrier.carried for carrier in made] == [2, 2]
    assert all(carrier.closed for carrier in made)


async def test_requests_beyond_the_limit_wait(made: list[Carrier]) -> None:
    pool = AsyncConnections(lambda: make(made), 1)
    first = await pool.handle_async_request(a_request())
    waiting = asyncio.ensure_future(pool.handle_async_request(a_request()))
    await asyncio.wait([waiting], timeout=0)
    assert not waiting.done()
    await first.aclose()
    await (await waiting).aclose()

    assert [carrier.carried for carrier in made] == [2]


async def test_a_cancelled_wait_takes_no_connection(made: list[Carrier]) -> None:
    pool = AsyncConnections(lambda: make(made), 1)
    first = await pool.handle_async_request(a_request())
    waiting = asyncio.ensure_future(pool.handle_async_request(a_request()))
    await asyncio.wait([waiting], timeout=0)
    waiting.cancel()
    await asyncio.wait([waiting])
    await first.aclose()
    await (await pool.handle_async_request(a_request())).aclose()

    assert [carrier.carried for carrier in made] == [2]


async def test_a_broken_body_frees_its_place(made: list[Carrier]) -> None:
    class Broken(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            yield b"par"
            raise httpx.ReadError("reset")

    pool = AsyncConnections(lambda: httpx.MockTransport(lambda _: httpx.Response(200, stream=Broken())), 1)
    for _ in range(2):
        response = await pool.handle_async_request(a_request())
        with pytest.raises(httpx.ReadError):
            await response.aread()
        await response.aclose()


def test_the_default_limit_depends_on_the_open_file_limit() -> None:
    assert 8 <= default_max_connections() <= 1000


def test_the_environments_proxy_is_used_but_not_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", "inside.test")

    assert environment_proxy(httpx.URL("http://pool.test:8700")) == "http://proxy:3128"
    assert environment_proxy(httpx.URL("http://inside.test")) is None
    assert environment_proxy(httpx.URL("http://127.0.0.1:8700")) is None
    assert environment_proxy(httpx.URL("https://pool.test")) is None
