"""How the writes of one response reach the client, over a real connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from sandbox_server.response_writer import ResponseWriter

HEAD, BODY = b"HTTP/1.1 200 OK\r\n\r\n", b"hello"


class Receiver(asyncio.Protocol):
    """Notes each piece in which data arrives."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.pieces.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set_result(None)


async def pieces_of(*steps: Callable[[ResponseWriter], object]) -> list[bytes]:
    """Let a server respond with these steps, the event loop running and the client reading after each, and return what arrived in one piece each."""
    loop = asyncio.get_running_loop()
    accepted: asyncio.Future[asyncio.Transport] = loop.create_future()

    class Sender(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.Transport)
            accepted.set_result(transport)

    server = await loop.create_server(Sender, "127.0.0.1", 0)
    async with server:
        client, receiver = await loop.create_connection(Receiver, *server.sockets[0].getsockname())
        writer = ResponseWriter(await accepted, loop)
        for step in steps:
            step(writer)
            count = len(receiver.pieces)
            async with asyncio.timeout(5):
                while len(receiver.pieces) == count and not writer.is_closing():
                    await asyncio.sleep(0)
        writer.close()
        await receiver.ended
        client.close()
    return receiver.pieces


async def test_a_head_and_the_body_that_follows_at_once_arrive_together() -> None:
    assert await pieces_of(lambda writer: [writer.write(HEAD), writer.write(BODY)]) == [HEAD + BODY]


async def test_a_head_does_not_wait_for_a_body_that_comes_later() -> None:
    assert await pieces_of(lambda writer: writer.write(HEAD), lambda writer: writer.write(BODY)) == [HEAD, BODY]


async def test_a_response_that_is_closed_at_once_is_sent() -> None:
    assert await pieces_of(lambda writer: [writer.write(HEAD), writer.close()]) == [HEAD]


async def test_a_response_that_is_aborted_is_not_sent() -> None:
    assert await pieces_of(lambda writer: [writer.write(HEAD), writer.abort()]) == []


async def test_nothing_is_written_to_a_connection_that_something_else_has_aborted(caplog: pytest.LogCaptureFixture) -> None:
    assert await pieces_of(lambda writer: [writer.write(HEAD), writer._transport.abort()]) == []
    assert not caplog.records


async def test_parts_after_the_first_body_are_written_as_they_come() -> None:
    pieces = await pieces_of(lambda writer: [writer.write(HEAD), writer.write(BODY)], lambda writer: writer.write(b"more"))
    assert pieces == [HEAD + BODY, b"more"]
