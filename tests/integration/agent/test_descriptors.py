"""What slots of one user share with each other and with the agent: descriptors in flight on unix sockets. Only the slot that has used them up is ended."""

from __future__ import annotations

import asyncio

import pytest

from tests.integration.agent.agent_harness import AgentHarness, Answer
from tests.integration.agent.conftest import Maker

# Sends as many descriptors over sockets that nobody reads as the system lets it, says so, and keeps them there.
FILL = """
import array, errno, socket, time
pairs, sizes = [], [10] * 5 + [253] * 1000
while sizes:
    pairs.append(socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM))
    try:
        pairs[-1][0].sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0] * sizes.pop(0)))])
    except OSError as error:
        assert error.errno == errno.ETOOMANYREFS, error
        break
open("full", "w").close()
time.sleep(60)
"""

MODES = ["bwrap", "none"]


async def harness_with(make_harness: Maker, mode: str, most_files: int, slots: int = 3) -> AgentHarness:
    return await make_harness(mode, "user", slots=slots, prefix=["prlimit", f"--nofile={most_files}:{most_files}"])


async def fill(harness: AgentHarness, slot: str) -> asyncio.Task[Answer]:
    """A program in the slot that uses up the descriptors in flight."""
    return asyncio.create_task(harness.bash("exec python3 -", slot, stdin=FILL, timeout_s=60))


@pytest.mark.parametrize("mode", MODES)
async def test_one_slot_cannot_use_up_the_descriptors_in_flight(make_harness: Maker, mode: str) -> None:
    harness = await harness_with(make_harness, mode, 1024)
    filling = await fill(harness, "0")
    await harness.until("test -e full", "0")
    for _ in range(10):
        assert (await harness.bash("echo fine", "1")).text == "fine\n"

    assert not filling.done()
    assert (await harness.bash("ulimit -Hn", "1")).text == "256\n"


@pytest.mark.parametrize("mode", MODES)
async def test_only_the_slot_that_uses_up_the_descriptors_in_flight_is_ended(make_harness: Maker, mode: str) -> None:
    harness = await harness_with(make_harness, mode, 256)  # so few that one message exceeds the agent's limit
    waiting = asyncio.create_task(harness.bash("until [ -e go ]; do sleep 0.05; done; echo waited", "2", timeout_s=60))
    filling = await fill(harness, "0")
    ended = await asyncio.wait_for(works_until(harness, filling), 40)

    assert ended.reason == "sandbox_lost", ended.meta
    assert ended.metadata["evidence"]["own_work"] is True
    assert "descriptors in flight" in ended.error
    assert (await harness.bash("touch go; echo fine", "2")).text == "fine\n"
    assert (await waiting).text == "waited\n"
    assert (await harness.bash("echo fine", "1")).text == "fine\n"
    if mode == "bwrap":
        assert (await harness.reset("0"))["state"] == "ready"
        assert (await harness.bash("echo again", "0")).text == "again\n"


async def test_a_start_of_a_slot_ends_the_slot_that_uses_up_the_descriptors_in_flight(make_harness: Maker) -> None:
    harness = await harness_with(make_harness, "bwrap", 256)
    filling = await fill(harness, "0")
    await harness.until("test -e full", "0")
    resets_until_end = 0
    while not filling.done() and resets_until_end < 5:  # the first of them takes a prepared runtime
        assert (await harness.reset("1"))["state"] == "ready"
        resets_until_end += 1

    assert "descriptors in flight" in (await asyncio.wait_for(filling, 20)).error


async def works_until(harness: AgentHarness, filling: asyncio.Task[Answer]) -> Answer:
    """The result of the program, during which another slot runs calls."""
    while not filling.done():
        answer = await harness.bash("echo fine", "1")
        assert answer.text == "fine\n", answer.meta
        await asyncio.sleep(0.02)
    return await filling
