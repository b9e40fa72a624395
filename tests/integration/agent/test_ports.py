"""Connections of the agent to programs that listen in slots with a network of their own, as root and as an ordinary user."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import psutil
import pytest

from sandbox_server.agent import wire
from sandbox_server.link.errors import LimitReachedAtAgent, NotSupportedByAgent, PortRefused, RequestInvalid
from sandbox_server.link.port_connection import PortConnection
from tests.integration.agent.agent_harness import AgentHarness
from tests.integration.agent.conftest import MODES, SharedAgents, clean_harness

BIG_BYTES = 256 << 20
REVERSES = """
import socket
server = socket.create_server(("127.0.0.1", 7000))
open("up", "w").close()
while True:
    peer, _ = server.accept()
    content = b"".join(iter(lambda: peer.recv(65536), b""))
    peer.sendall(content[::-1])
    peer.close()
"""
FORGETFUL = """
import socket
server = socket.create_server(("127.0.0.1", 7000))
open("up", "w").close()
peers = []
while True:
    peers.append(server.accept()[0])
    open("accepted", "w").write(str(len(peers)))
"""


@pytest.fixture(params=[mode for mode in MODES if mode[0] == "bwrap"], ids="-".join)
async def offline(request: pytest.FixtureRequest, shared_agents: SharedAgents) -> AsyncIterator[AgentHarness]:
    """An agent whose slot 0 has a network of its own."""
    async with clean_harness(shared_agents.get_agent(*request.param)) as harness:
        assert (await harness.reset(network=False))["state"] == "ready"
        yield harness


async def start(harness: AgentHarness, program: str) -> None:
    """Start a program in the slot and wait until it listens."""
    await harness.bash("cat > server.py && (python3 server.py > log 2>&1 &)", stdin=program)
    await harness.until("test -e up")


def port(harness: AgentHarness, number: int = 7000, slot: str = "0") -> PortConnection:
    return PortConnection(harness.link.stream({"op": "port", "slot": slot, "epoch": harness.epoch(slot), "port": number}))


async def everything(connection: PortConnection) -> bytes:
    parts = []
    while part := await connection.read():
        parts.append(part)
    return b"".join(parts)


async def test_bytes_go_both_ways_and_each_direction_ends_by_itself(offline: AgentHarness) -> None:
    await start(offline, REVERSES)
    content = bytes(range(256)) * 20_000
    agent = psutil.Process(offline.process.pid)
    before = agent.num_fds()
    for _ in range(5):
        async with port(offline) as connection:
            await connection.wait_until_connected()
            await connection.write(content)
            connection.end_writing()
            assert await everything(connection) == content[::-1]

    while agent.num_fds() > before:  # it closes the last connection in its own time
        await asyncio.sleep(0.01)


async def test_a_port_on_which_nobody_listens_is_closed(offline: AgentHarness) -> None:
    async with port(offline, 7001) as connection:
        with pytest.raises(PortRefused, match="nothing listens on port 7001 of the slot"):
            await connection.wait_until_connected()


async def test_what_is_no_port_and_a_slot_without_a_network_of_its_own_are_refused(offline: AgentHarness) -> None:
    for number in (0, 65536, -1):
        async with port(offline, number) as connection:
            with pytest.raises(RequestInvalid, match="port must be from 1 to 65535"):
                await connection.wait_until_connected()
    async with port(offline, slot="1") as connection:
        with pytest.raises(NotSupportedByAgent, match="shares the network"):
            await connection.wait_until_connected()


async def test_a_reset_ends_the_connections_of_the_slot_and_proves_it_clean(offline: AgentHarness) -> None:
    await start(offline, FORGETFUL)
    async with port(offline) as connection:
        await connection.wait_until_connected()
        reset = asyncio.create_task(offline.reset(network=False))
        with pytest.raises(PortRefused, match="the processes of the slot were ended"):
            await connection.read()
    assert (await reset)["state"] == "ready"


async def test_the_end_of_the_stream_closes_the_connection_in_the_slot(offline: AgentHarness) -> None:
    await start(offline, "import socket\nserver = socket.create_server(('127.0.0.1', 7000))\nopen('up', 'w').close()\n"
                "peer, _ = server.accept()\npeer.recv(1)\nopen('hung-up', 'w').close()\n")  # fmt: skip
    async with port(offline) as connection:
        await connection.wait_until_connected()
    await offline.until("test -e hung-up")


async def test_a_slot_has_a_bounded_number_of_connections(offline: AgentHarness) -> None:
    await start(offline, FORGETFUL)
    connections = [port(offline) for _ in range(64)]
    for connection in connections:
        async with asyncio.timeout(30):
            await connection.wait_until_connected()
    async with port(offline) as refused:
        with pytest.raises(LimitReachedAtAgent, match="64 connections to ports of this slot are open"):
            await refused.wait_until_connected()
    async with connections.pop():
        pass
    await _until_admitted(offline)
    for connection in connections:
        await connection.__aexit__(None, None, None)


async def _until_admitted(harness: AgentHarness) -> None:
    """Wait until the agent takes one more connection. It closes the last one in its own time."""
    while True:
        async with port(harness) as connection:
            try:
                await connection.wait_until_connected()
            except LimitReachedAtAgent:
                continue
            return


async def test_data_of_a_stream_that_the_program_does_not_read_stays_bounded(offline: AgentHarness) -> None:
    await start(offline, FORGETFUL)
    agent = psutil.Process(offline.process.pid)
    before = agent.memory_info().rss
    async with port(offline) as connection:
        await connection.wait_until_connected()
        sent_bytes = await send_until_full(connection, BIG_BYTES)

    assert sent_bytes < BIG_BYTES
    assert agent.memory_info().rss - before < BIG_BYTES // 16


async def send_until_full(connection: PortConnection, most_bytes: int) -> int:
    """Send until nothing more is taken. Returns how many bytes were taken."""
    sent_bytes = 0
    with contextlib.suppress(TimeoutError):
        while sent_bytes < most_bytes:
            async with asyncio.timeout(2):
                await connection.write(bytes(wire.DATA_BYTES))
            sent_bytes += wire.DATA_BYTES
    return sent_bytes
