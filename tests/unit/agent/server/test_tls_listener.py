"""The agent's TLS port, to which slots that share the network can connect. Unauthenticated connections get no answer, use few resources and end soon."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest

from sandbox_server.agent import wire
from sandbox_server.agent.config import TlsListen
from sandbox_server.agent.server import connections
from sandbox_server.agent.server.connections import ServiceConnection, Stream, StreamHandler
from sandbox_server.agent.server.tls_listener import TlsListener, make_context
from sandbox_server.backends.certificate import make_certificate
from sandbox_server.link import AgentEndpoint, connect
from sandbox_server.link.transports.tls import pinning_context

MADE = make_certificate("s-1")
TOKEN = "token"
WITHIN_S = 10


class Agent:
    """What a connection needs from an agent."""

    token = TOKEN

    def __init__(self) -> None:
        self.connections: set[ServiceConnection] = set()

    def make_hello(self) -> dict[str, Any]:
        return {"v": wire.PROTOCOL_VERSION, "boot": "b"}

    def add_connection(self, connection: ServiceConnection) -> None:
        self.connections.add(connection)

    def remove_connection(self, connection: ServiceConnection) -> None:
        self.connections.discard(connection)

    def open_stream(self, stream: Stream, meta: dict[str, Any]) -> StreamHandler:
        raise NotImplementedError


@pytest.fixture
async def listener(tmp_path: Path) -> AsyncIterator[TlsListener]:
    it = TlsListener(Agent(), TlsListen("127.0.0.1", 0, MADE.certificate, MADE.key), str(tmp_path), max_unauthenticated=4, hello_within_s=1.0)
    it.start_listening()
    yield it
    it.stop_listening()


@pytest.fixture
def port(listener: TlsListener) -> int:
    number: int = listener._socket.getsockname()[1]
    return number


async def raw(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port)


async def greeted(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that has completed its TLS handshake."""
    return await asyncio.open_connection("127.0.0.1", port, ssl=pinning_context(MADE.certificate))


async def answer(reader: asyncio.StreamReader) -> bytes:
    """Everything that the agent sends until it closes the connection."""
    async with asyncio.timeout(WITHIN_S):
        whole = b""
        with suppress(ConnectionError, ssl.SSLError):
            while data := await reader.read(1 << 16):
                whole += data
        return whole


async def gets_in(port: int) -> bool:
    link = await connect(AgentEndpoint(address=f"tls:127.0.0.1:{port}", token=TOKEN, certificate=MADE.certificate), WITHIN_S)
    await link.close()
    return True


HELLO = wire.Connection(opens_odd=True)
HELLO.hello({"v": wire.PROTOCOL_VERSION, "token": TOKEN + "x"})
WRONG_TOKEN = HELLO.data_to_send()


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(WRONG_TOKEN, id="wrong token"),
        pytest.param(wire.frame(wire.PING, 0), id="no hello"),
        pytest.param(wire.HEADER.pack(wire.MAX_FRAME_BYTES + 1, wire.HELLO, 0), id="too long a frame"),
        pytest.param(wire.HEADER.pack(wire.MAX_FRAME_BYTES, wire.HELLO, 0) + bytes(connections.MAX_HELLO_BYTES), id="too long a hello"),
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", id="another protocol"),
    ],
)
async def test_a_client_that_sends_anything_but_the_token_gets_no_answer(port: int, said: bytes) -> None:
    reader, writer = await greeted(port)
    writer.write(said)

    assert await answer(reader) == b""
    writer.transport.abort()
    assert await gets_in(port)


async def test_garbage_instead_of_tls_ends_the_connection(port: int) -> None:
    reader, writer = await raw(port)
    writer.write(b"GET / HTTP/1.1\r\n\r\n" * 100)
    told = await answer(reader)
    writer.transport.abort()

    assert TOKEN.encode() not in told
    assert len(told) < 100  # an alert of TLS at most
    assert await gets_in(port)


async def test_idle_connections_make_room_for_the_service_and_end_and_its_own_stay(port: int, listener: TlsListener) -> None:
    endpoint = AgentEndpoint(address=f"tls:127.0.0.1:{port}", token=TOKEN, certificate=MADE.certificate)
    links = [await connect(endpoint, WITHIN_S) for _ in range(6)]
    idle = [await raw(port) for _ in range(12)]
    shaken = [await greeted(port) for _ in range(12)]

    assert await gets_in(port)
    assert len(listener._unauthenticated) <= 4
    for reader, writer in (*idle, *shaken):
        assert await answer(reader) == b""
        writer.transport.abort()
    # The last of them had as long as a connection without a token may stay, and the links are older.
    assert [link.closed.done() for link in links] == [False] * 6
    for link in links:
        await link.close()


async def test_only_a_connection_with_the_token_gets_a_large_buffer(port: int, listener: TlsListener) -> None:
    _, writer = await greeted(port)
    link = await connect(AgentEndpoint(address=f"tls:127.0.0.1:{port}", token=TOKEN, certificate=MADE.certificate), WITHIN_S)
    (authenticated,) = cast("Agent", listener._server).connections
    (unauthenticated,) = (pending.connection for pending in listener._unauthenticated.values())

    assert len(unauthenticated.get_buffer(-1)) == connections.RECEIVED_BEFORE_HELLO_BYTES
    assert len(authenticated.get_buffer(-1)) == connections.RECEIVED_AT_ONCE_BYTES
    writer.transport.abort()
    await link.close()


async def test_clients_that_send_slowly_or_do_not_complete_their_handshake_are_dropped(port: int, listener: TlsListener) -> None:
    await asyncio.gather(_send_slowly(port), _begin_a_handshake(port))

    assert not listener._unauthenticated


async def _send_slowly(port: int) -> None:
    reader, writer = await greeted(port)
    ended = asyncio.ensure_future(answer(reader))
    for byte in wire.HEADER.pack(10_000, wire.HELLO, 0) + bytes(10_000):
        writer.write(bytes([byte]))
        await asyncio.wait({ended}, timeout=0.02)
        if ended.done():
            break

    assert await ended == b""
    writer.transport.abort()


async def _begin_a_handshake(port: int) -> None:
    reader, writer = await raw(port)
    writer.write(b"\x16\x03\x01\x02\x00\x01")  # the head of a first message, and no more

    assert await answer(reader) == b""
    writer.transport.abort()


async def test_many_unauthenticated_connections_are_logged_as_a_number_only(port: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        for _ in range(20):
            _, writer = await raw(port)
            writer.write(b"nonsense\n" * 10)
            writer.transport.abort()
        reader, writer = await greeted(port)
        writer.write(wire.frame(wire.PING, 0))
        assert await answer(reader) == b""
        writer.transport.abort()

    assert caplog.records == []


async def test_keepalive_notices_a_service_whose_machine_has_vanished(port: int, listener: TlsListener) -> None:
    link = await connect(AgentEndpoint(address=f"tls:127.0.0.1:{port}", token=TOKEN, certificate=MADE.certificate), WITHIN_S)
    (connection,) = listener._server.connections
    accepted = connection._transport.get_extra_info("socket")

    assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
    await link.close()


async def test_an_old_tls_is_refused(port: int) -> None:
    context = pinning_context(MADE.certificate)
    context.minimum_version, context.maximum_version = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_2
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    assert writer.get_extra_info("ssl_object").version() == "TLSv1.2"
    writer.transport.abort()
    new = await greeted(port)
    assert new[1].get_extra_info("ssl_object").version() == "TLSv1.3"
    new[1].transport.abort()
    assert make_context(MADE.certificate, MADE.key, "/tmp").minimum_version == ssl.TLSVersion.TLSv1_2


def test_the_private_key_does_not_stay_in_a_file(tmp_path: Path) -> None:
    make_context(MADE.certificate, MADE.key, str(tmp_path))
    assert list(tmp_path.iterdir()) == []

    with pytest.raises(ssl.SSLError):
        make_context(MADE.certificate, make_certificate("s-2").key, str(tmp_path))
    assert list(tmp_path.iterdir()) == []
