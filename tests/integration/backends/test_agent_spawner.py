"""Agents that are forked while several sandboxes are created: they are processes like executed agents, and a failure of the forks costs no sandbox anything."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from sandbox_server.agent.build import content
from sandbox_server.backends import agent_spawner
from sandbox_server.backends.agent_folder import unpack_agent
from sandbox_server.backends.agent_spawner import AgentSpawner
from sandbox_server.backends.processes import end_process, start_time

ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
BAD_CONFIG = json.dumps({"nonsense": 1}).encode()


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack_agent(content(), tmp_path_factory.mktemp("agent") / "unpacked")


@pytest.fixture
def creations() -> Iterator[ExitStack]:
    """The creations that are under way; they end with the test."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def streams() -> Iterator[ExitStack]:
    """The streams of agents; they are closed at the end of the test, so that agents end that still wait for their configuration."""
    with ExitStack() as stack:
        yield stack


async def _forking(creations: ExitStack, agent: Path, count: int = agent_spawner.FORK_FROM_CREATIONS) -> AgentSpawner:
    spawner = AgentSpawner(ENVIRONMENT, forks=True)
    for _ in range(count):
        creations.enter_context(spawner.count_creation())
    spawner.start_forking(agent)
    await spawner.wait_until_forking(agent)
    return spawner


def _forking_processes() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "spawn" in child.cmdline()]


def _is_inheritable(fd: int) -> bool:
    try:
        return os.get_inheritable(fd)
    except OSError:
        return False  # it was the descriptor of the listing


class _Agent:
    """An agent that waits for its configuration, and what it writes."""

    def __init__(self, stack: ExitStack, spawner: AgentSpawner, agent: Path) -> None:
        self.stdin, theirs = map(stack.enter_context, socket.socketpair())
        self.output = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - the stack closes it
        with theirs:
            self.pid, self.started = spawner.spawn_agent(agent, theirs.fileno(), self.output.fileno())
        self.process = psutil.Process(self.pid)

    async def end_with(self, config: bytes) -> bytes:
        """Send the configuration, and return what the agent has written when it has ended."""
        self.stdin.sendall(config)
        self.stdin.close()
        await asyncio.to_thread(self.process.wait, 10)
        self.output.seek(0)
        return self.output.read()


async def test_forked_agents_are_children_of_this_process_with_nothing_but_their_own_streams(creations: ExitStack, streams: ExitStack, agent: Path) -> None:
    spawner = await _forking(creations, agent)
    (forking,) = _forking_processes()
    agents = [_Agent(streams, spawner, agent) for _ in range(2)]

    inherited = {name for name in os.listdir("/proc/self/fd") if int(name) > 2 and _is_inheritable(int(name))}
    for one in agents:
        async with asyncio.timeout(10):
            while set(os.listdir(f"/proc/{one.pid}/fd")) - inherited != {"0", "1", "2"}:
                await asyncio.sleep(0.005)
        assert one.process.cmdline() == forking.cmdline()
        assert (one.process.ppid(), os.getsid(one.pid), os.getpgid(one.pid)) == (os.getpid(), one.pid, one.pid)
        assert start_time(one.pid) == one.started
        assert one.process.environ() == ENVIRONMENT
        assert os.readlink(f"/proc/{one.pid}/fd/1") == os.readlink(f"/proc/self/fd/{one.output.fileno()}")
        assert one.process.num_threads() == 1
        assert json.loads(await one.end_with(BAD_CONFIG))["message"] == "unknown field nonsense"


async def test_the_forking_process_ends_with_the_last_creation_and_its_agents_run_on(creations: ExitStack, streams: ExitStack, agent: Path) -> None:
    spawner = await _forking(creations, agent)
    one = _Agent(streams, spawner, agent)
    creations.close()

    assert _forking_processes() == [one.process]
    await end_process(one.pid, one.started, 5.0, 5.0)
    assert _forking_processes() == []


async def test_a_single_creation_executes_its_agent(creations: ExitStack, streams: ExitStack, agent: Path) -> None:
    spawner = await _forking(creations, agent, count=1)
    one = _Agent(streams, spawner, agent)

    assert "spawn" not in one.process.cmdline()
    assert b"unknown field nonsense" in await one.end_with(BAD_CONFIG)


async def test_agents_are_executed_if_the_forking_process_has_been_killed(creations: ExitStack, streams: ExitStack, agent: Path) -> None:
    spawner = await _forking(creations, agent)
    (forking,) = _forking_processes()
    forking.kill()
    async with asyncio.timeout(10):
        while forking.status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.005)
    agents = [_Agent(streams, spawner, agent) for _ in range(2)]

    for one in agents:
        assert "spawn" not in one.process.cmdline()
        assert b"unknown field nonsense" in await one.end_with(BAD_CONFIG)
    assert _forking_processes() == []


async def test_agents_are_executed_if_no_process_can_fork_them(creations: ExitStack, streams: ExitStack, tmp_path: Path) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text("import sys\nif sys.argv[1:]:\n    sys.exit(1)\nprint('executed', sys.stdin.read())\n")
    spawner = await _forking(creations, agent)

    assert await _Agent(streams, spawner, agent).end_with(b"config") == b"executed config\n"


async def test_a_forked_agent_whose_service_ends_before_it_sends_the_configuration_ends(creations: ExitStack, streams: ExitStack, agent: Path) -> None:
    spawner = await _forking(creations, agent)

    assert json.loads(await _Agent(streams, spawner, agent).end_with(b""))["level"] == "error"


async def test_an_agent_that_may_have_been_forked_is_not_executed_as_well(
    creations: ExitStack, streams: ExitStack, agent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_spawner, "FORK_WITHIN_S", 0.05)
    spawner = await _forking(creations, agent)
    (forking,) = _forking_processes()
    forking.suspend()

    with pytest.raises(OSError, match="timed out"):
        _Agent(streams, spawner, agent)
    assert _forking_processes() == []
    assert "spawn" not in _Agent(streams, spawner, agent).process.cmdline()
