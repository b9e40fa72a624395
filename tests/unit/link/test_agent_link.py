"""The link to an agent, tested against the agent's side of the protocol over each transport."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from sandbox_server.agent import relay, wire
from sandbox_server.agent.server.tls_listener import make_context
from sandbox_server.backends.certificate import make_certificate
from sandbox_server.backends.process_pipe import open_process_pipe
from sandbox_server.link import AgentEndpoint, AgentLink, AgentRefused, AgentStream, LinkLost, connect
from sandbox_server.link.agent_link import MAX_UNANSWERED_PINGS

RELAY_FILE = Path(relay.__file__)
Answer = Callable[[wire.Connection, wire.Event], None]


class ScriptedAgent(asyncio.Protocol):
    """The agent's side of a connection; `answer` says what to do at each event."""

    def __init__(self, peer: "Peer") -> None:
        self.connection = wire.Connection(opens_odd=False)
        self.peer = peer
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        assert self.transport is not None
        for event in self.connection.receive(data):
            if isinstance(event, wire.Hello):
                self.connection.hello({"v": 1, "boot": "b", "token_seen": event.meta.get("token")})
            else:
                self.peer.answer(self.connection, event)
        self.transport.write(self.connection.data_to_send())


CERTIFICATE = make_certificate("s-1")


class Peer:
    """A listening scripted agent."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tls_port = 0
        self.answer: Answer = lambda connection, event: None
        self.connections: list[ScriptedAgent] = []

    def make(self) -> ScriptedAgent:
        agent = ScriptedAgent(self)
        self.connections.append(agent)
        return agent

    def hang_up(self) -> None:
        for agent in self.connections:
            assert agent.transport is not None
            agent.transport.abort()


@pytest.fixture
async def peer(tmp_path: Path) -> AsyncIterator[Peer]:
    it = Peer(tmp_path / "agent.sock")
    loop = asyncio.get_running_loop()
    unix = await loop.create_unix_server(it.make, it.path)
    context = make_context(CERTIFICATE.certificate, CERTIFICATE.key, str(tmp_path))
    tls = await loop.create_server(it.make, "127.0.0.1", 0, ssl=context)
    it.tls_port = tls.sockets[0].getsockname()[1]
    yield it
    it.hang_up()
    unix.close()
    tls.close()


@pytest.fixture(params=["unix", "tls", "stdio"])
def endpoint(request: pytest.FixtureRequest, peer: Peer) -> AgentEndpoint:
    """Where the peer is, by one transport after the other."""
    if request.param == "unix":
        return AgentEndpoint(address=f"unix:{peer.path}", token="secret")
    if request.param == "tls":
        return AgentEndpoint(address=f"tls:127.0.0.1:{peer.tls_port}", token="secret", certificate=CERTIFICATE.certificate)
    relay = [sys.executable, "-I", "-S", str(RELAY_FILE), str(peer.path)]
    return AgentEndpoint(address="stdio:", token="secret", open_pipe=lambda: open_process_pipe(relay, {}))


@pytest.fixture
async def link(endpoint: AgentEndpoint) -> AsyncIterator[AgentLink]:
    it = await connect(endpoint, 20)
    yield it
    await it.close()


async def test_hellos_are_exchanged(link: AgentLink) -> None:
    assert link.hello == {"v": 1, "boot": "b", "token_seen": "secret"}


async def test_a_request_gets_the_end_of_the_agent(peer: Peer, link: AgentLink) -> None:
    def answer(connection: wire.Connection, event: wire.Event) -> None:
        if isinstance(event, wire.Opened):
            connection.end(event.stream, {"echo": event.meta})

    peer.answer = answer

    assert await link.request({"op": "stats"}) == {"echo": {"op": "stats"}}


async def test_many_streams_side_by_side_get_their_own_answers(peer: Peer, link: AgentLink) -> None:
    def answer(connection: wire.Connection, event: wire.Event) -> None:
        if isinstance(event, wire.Item):
            connection.send_item(event.stream, {"n": event.meta["n"]}, event.body * 2)
        elif isinstance(event, wire.Ended):
            connection.end(event.stream)

    peer.answer = answer

    async def one(number: int) -> tuple[int, bytes]:
        async with link.stream({"op": "calls"}) as stream:
            stream.send_item({"n": number}, b"%d" % number)
            stream.end()
            first = await anext(stream)
            assert isinstance(first, wire.Item)
            assert isinstance(await anext(stream), wire.Ended)
            return first.meta["n"], first.body

    assert await asyncio.gather(*(one(n) for n in range(200))) == [(n, b"%d" % n * 2) for n in range(200)]


async def test_a_refusal_is_raised_with_its_code(peer: Peer, link: AgentLink) -> None:
    def answer(connection: wire.Connection, event: wire.Event) -> None:
        if isinstance(event, wire.Opened):
            connection.abort(event.stream, {"code": "stale_epoch", "detail": "the slot has moved on"})

    peer.answer = answer

    with pytest.raises(AgentRefused, match="moved on") as caught:
        await link.request({"op": "calls"})
    assert caught.value.code == "stale_epoch"


async def test_a_code_outside_the_closed_set_is_internal(peer: Peer, link: AgentLink) -> None:
    peer.answer = lambda connection, event: connection.abort(event.stream, {"code": "os.system"}) if isinstance(event, wire.Opened) else None

    with pytest.raises(AgentRefused) as caught:
        await link.request({"op": "x"})
    assert caught.value.code == "internal"


async def test_everyone_who_waits_hears_that_the_link_is_lost(peer: Peer, link: AgentLink) -> None:
    waiting = [asyncio.ensure_future(link.request({"op": "calls"})) for _ in range(5)]
    seen = asyncio.Event()
    peer.answer = lambda connection, event: seen.set() if isinstance(event, wire.Ended) else None
    await seen.wait()
    peer.hang_up()

    outcomes = await asyncio.gather(*waiting, return_exceptions=True)

    assert [type(outcome) for outcome in outcomes] == [LinkLost] * 5
    assert link.closed.done()
    with pytest.raises(LinkLost):
        link.stream({"op": "x"})


async def test_a_long_upload_waits_for_a_slow_reader_and_arrives_whole(peer: Peer, link: AgentLink) -> None:
    got = bytearray()

    def answer(connection: wire.Connection, event: wire.Event) -> None:
        if isinstance(event, wire.Data):
            got.extend(event.body)
            connection.acknowledge(event.stream, event.size)
        elif isinstance(event, wire.Ended):
            connection.end(event.stream, {"size": len(got)})

    peer.answer = answer
    block = bytes(range(256)) * 1024
    async with link.stream({"op": "file_put"}) as stream:
        for _ in range(40):
            await stream.send_data(block)
        stream.end()
        last = await anext(stream)

    assert isinstance(last, wire.Ended)
    assert last.meta == {"size": 40 * len(block)}
    assert bytes(got) == block * 40


async def send_blocks(stream: AgentStream, count: int) -> None:
    for _ in range(count):
        await stream.send_data(bytes(64 << 10))


async def test_an_upload_ends_when_the_agent_refuses_it(peer: Peer, link: AgentLink) -> None:
    def answer(connection: wire.Connection, event: wire.Event) -> None:
        if isinstance(event, wire.Data):
            connection.abort(event.stream, {"code": "file_error", "detail": "no space"})

    peer.answer = answer
    async with link.stream({"op": "file_put"}) as stream:
        with pytest.raises(AgentRefused, match="no space"):
            await send_blocks(stream, 100)


async def test_leaving_a_stream_early_tells_the_agent(peer: Peer, link: AgentLink) -> None:
    aborted = asyncio.Event()
    opened = asyncio.Event()

    def answer(connection: wire.Connection, event: wire.Event) -> None:
        if isinstance(event, wire.Opened):
            opened.set()
        elif isinstance(event, wire.Aborted):
            aborted.set()

    peer.answer = answer
    async with link.stream({"op": "attach"}):
        await opened.wait()

    await asyncio.wait_for(aborted.wait(), 5)


async def test_nobody_at_the_address_is_said(tmp_path: Path) -> None:
    with pytest.raises(LinkLost, match="nobody answers"):
        await connect(AgentEndpoint(address=f"unix:{tmp_path / 'none.sock'}"), 1)


async def test_a_silent_agent_is_not_waited_for(tmp_path: Path) -> None:
    server = await asyncio.get_running_loop().create_unix_server(asyncio.Protocol, tmp_path / "mute.sock")
    with pytest.raises(LinkLost, match="did not say hello"):
        await connect(AgentEndpoint(address=f"unix:{tmp_path / 'mute.sock'}"), 0.05)
    server.close()


async def test_an_agent_that_breaks_the_protocol_is_dropped(peer: Peer, link: AgentLink) -> None:
    seen = asyncio.Event()
    peer.answer = lambda connection, event: seen.set()
    asked = asyncio.ensure_future(link.request({"op": "x"}))
    await seen.wait()
    transport = peer.connections[0].transport
    assert transport is not None
    transport.write(wire.frame(wire.OPEN, 2, b"{}"))

    with pytest.raises(LinkLost, match="opened a stream"):
        await asked


async def test_a_service_that_stood_still_does_not_take_it_for_silence(peer: Peer) -> None:
    peer.answer = lambda connection, event: connection.end(event.stream) if isinstance(event, wire.Opened) else None
    link = await connect(AgentEndpoint(address=f"unix:{peer.path}", token="secret"), 5, ping_interval_s=0.02)
    for _ in range(3):
        # As a loop whose timers come before what was received, uvloop's for one, does after it was held up.
        time.sleep(0.02 * MAX_UNANSWERED_PINGS * 2)
        link._ping()
        await link.request({"op": "stats"})

    assert not link.closed.done()
    await link.close()


async def test_an_agent_that_answers_no_ping_is_lost(peer: Peer) -> None:
    link = await connect(AgentEndpoint(address=f"unix:{peer.path}", token="secret"), 5, ping_interval_s=0.02)
    for agent in peer.connections:
        assert agent.transport is not None
        agent.transport.pause_reading()  # type: ignore[attr-defined]

    async with asyncio.timeout(20):
        assert "not answered 4 pings" in await link.closed


async def test_a_hello_that_came_while_the_service_stood_still_is_heard(peer: Peer) -> None:
    connecting = asyncio.create_task(connect(AgentEndpoint(address=f"unix:{peer.path}", token="secret"), 0.2))
    while not peer.connections:
        await asyncio.sleep(0)
    time.sleep(0.5)

    await (await connecting).close()
