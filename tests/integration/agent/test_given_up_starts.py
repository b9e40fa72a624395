"""Agents that end while they start slots: no process of bubblewrap is left, at whatever moment it was killed."""

from __future__ import annotations

import asyncio
import functools
import os
import random
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from sandbox_server.agent.isolation import init_start
from sandbox_server.agent.isolation.bwrap_processes import find_bwrap_processes, kill_bwrap_processes
from sandbox_server.backends.local import LocalBackend
from sandbox_server.core.types import Handle
from tests.integration.agent.agent_harness import AgentHarness
from tests.integration.agent.conftest import BEST_USER, Maker

USERS = ["root", "user"] if BEST_USER == "root" else ["user"]
ROUNDS = 2
SLOTS = 4


@contextmanager
def full_pipe() -> Iterator[int]:
    """The write end of a full pipe, at which a writer blocks."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        while True:
            os.write(writer, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(writer, True)
    try:
        yield writer
    finally:
        os.close(writer)
        os.close(reader)


def stuck_command(folder: Path, writer: int) -> list[str]:
    """Bubblewrap's first process writes to the pipe after it has created the second one, and before it lets that go on."""
    mounts = ["--ro-bind", "/usr", "/usr", "--bind", str(folder / "workspace"), "/mnt"]
    return ["bwrap", "--unshare-pid", "--die-with-parent", "--as-pid-1", "--info-fd", str(writer), *mounts, "--", "/usr/bin/true"]


async def both_processes(folder: Path) -> set[int]:
    """The two processes of bubblewrap, once both exist."""
    while len(found := find_bwrap_processes(str(folder))) < 2:
        await asyncio.sleep(0.005)
    return set(found)


@asynccontextmanager
async def stuck_set_up(folder: Path) -> AsyncIterator[int]:
    """A process of bubblewrap that waits for ever, because the one that created it was killed before it let it go on."""
    (folder / "workspace").mkdir(parents=True)
    with full_pipe() as writer, subprocess.Popen(stuck_command(folder, writer), pass_fds=[writer]) as process:
        try:
            found = await both_processes(folder)
            process.kill()
            process.wait()
            (left,) = found - {process.pid}
            yield left
        finally:
            process.kill()
            kill_bwrap_processes(str(folder))


async def test_a_process_that_waits_for_a_killed_one_is_found_by_its_mounts_and_killed(tmp_path: Path) -> None:
    folder, other = tmp_path / "one", tmp_path / "one-more"
    async with stuck_set_up(folder) as pid, stuck_set_up(other) as spared:
        assert find_bwrap_processes(str(folder)) == [pid]

        kill_bwrap_processes(str(folder))

        assert find_bwrap_processes(str(folder)) == []
        assert find_bwrap_processes(str(other)) == [spared]


async def test_an_abandoned_start_also_kills_the_process_that_waits_for_the_killed_one(tmp_path: Path) -> None:
    (tmp_path / "workspace").mkdir()
    with full_pipe() as writer:
        agent_socket, init_socket = init_start.create_control_sockets()
        kill_rest = functools.partial(kill_bwrap_processes, str(tmp_path))
        starting = asyncio.create_task(
            init_start.start_init(stuck_command(tmp_path, writer), init_socket, agent_socket, {}, [writer], dict(os.environ), kill_rest=kill_rest)
        )
        await both_processes(tmp_path)

        starting.cancel()
        await asyncio.wait({starting})

        assert starting.cancelled()
        assert find_bwrap_processes(str(tmp_path)) == []


async def test_destroying_a_sandbox_ends_the_processes_of_an_interrupted_start(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path / "sandboxes", "me", lambda: tmp_path / "agent.pyz")
    folder = tmp_path / "sandboxes" / "s-1"
    async with stuck_set_up(folder / "base" / "slots" / "bwrap-1"):
        await backend.destroy(Handle(backend="local", pool="p", owner="me", sandbox_id="s-1"))

        assert find_bwrap_processes(str(folder)) == []
        assert not folder.exists()


async def resets(harness: AgentHarness) -> None:
    """Reset all slots of an agent at the same time, repeatedly, until the agent ends."""
    while True:
        await asyncio.gather(*(harness.reset(str(number)) for number in range(SLOTS)))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("user", USERS)
async def test_an_agent_that_shuts_down_while_it_starts_slots_leaves_nothing(make_harness: Maker, user: str) -> None:
    chance = random.Random(7)
    for _ in range(ROUNDS):
        harness = await make_harness(user=user, slots=SLOTS)
        working = asyncio.create_task(resets(harness))
        await asyncio.wait({working}, timeout=chance.uniform(0.0, 0.15))
        harness.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(harness.process.wait, 30)
        await asyncio.gather(working, return_exceptions=True)

        assert find_bwrap_processes(str(harness.folder)) == []
