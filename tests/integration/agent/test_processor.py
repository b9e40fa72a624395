"""The processor: what a killed tree used, and whether a call that passed its deadline had its slot's share."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.integration.agent.conftest import Maker
from tests.integration.agent.house import Answer, House

SPIN = "while True: pass"
# Three processes that spin, of which the first waits for none, and each says again and again what it has used.
SPIN_AND_SAY = """
import os, sys, time
for number in range(2):
    if os.fork() == 0:
        os.setsid()
        break
else:
    number = 2
while True:
    begun = time.monotonic()
    while time.monotonic() < begun + 0.05:
        pass
    with open(f"used-{number}.new", "w") as file:
        file.write(str(time.process_time()))
    os.rename(f"used-{number}.new", f"used-{number}")
"""
# So many sessions that the kernel leaves none of its neighbours a fair part: it shares between sessions, not between slots.
HOGS = f"""
import os, time
for _ in range(40):
    if os.fork() == 0:
        os.setsid()
        {SPIN}
open("up", "w").close()
time.sleep(60)
"""
SLOTS = 16


async def test_a_killed_tree_is_said_to_have_used_what_it_used(house: House) -> None:
    answer = await house.bash("exec python3 -", stdin=SPIN_AND_SAY, timeout_s=1.5)
    said = await house.bash("cat used-0; echo; cat used-1; echo; cat used-2")
    used_s = sum(float(line) for line in said.text.split())

    assert answer.reason == "timeout"
    assert used_s > 0.1
    assert 0.8 * used_s <= answer.meta["cpu_s"] <= used_s + 4 * 2  # what they used until the kill, at most on every processor


@pytest.fixture
async def crowd(make_house: Maker) -> House:
    house = await make_house(slots=SLOTS)
    if house.link.hello["capabilities"]["kill"] != "cgroup2":
        pytest.skip("nothing counts here what a tree uses and waits for")
    return house


async def hog(house: House, slot: str) -> asyncio.Task[Answer]:
    """A slot whose processes take the machine, until the task is cancelled with the agent."""
    task = asyncio.create_task(house.bash("exec python3 -", slot, stdin=HOGS, timeout_s=4.0))
    await house.until("test -e up", slot)
    return task


def evidence(answer: Answer) -> dict[str, Any]:
    proof: dict[str, Any] = answer.metadata["evidence"]
    return proof


@pytest.mark.privileged
async def test_a_call_that_others_kept_from_its_share_is_proven_to_have_been(crowd: House) -> None:
    hogging = await hog(crowd, "1")
    starved = await crowd.bash(f"exec python3 -c '{SPIN}'", "0", timeout_s=1.5)
    meek = await crowd.bash(f"exec nice -n 19 python3 -c '{SPIN}'", "0", timeout_s=1.0)

    assert (starved.reason, meek.reason) == ("timeout", "timeout")
    proof = evidence(starved)["starved"]
    assert proof["given_s"] < 0.8 * proof["owed_s"]
    assert proof["owed_s"] <= 1.5 * proof["share_processors"] * 1.5
    assert "starved" not in evidence(meek), "it asked for less"
    assert (await hogging).reason == "timeout"


@pytest.mark.privileged
async def test_a_call_that_has_its_share_or_loses_it_to_its_own_slot_is_not_starved(crowd: House) -> None:
    alone = await crowd.bash(f"exec python3 -c '{SPIN}'", "0", timeout_s=1.0)
    asleep = await crowd.bash("sleep 60", "0", timeout_s=0.5)
    hogging = await hog(crowd, "0")
    beside_its_own = await crowd.bash(f"exec python3 -c '{SPIN}'", "0", timeout_s=1.5)
    hogs = await hogging

    for answer in (alone, asleep, beside_its_own, hogs):
        assert answer.reason == "timeout"
        assert "starved" not in evidence(answer), answer.meta
