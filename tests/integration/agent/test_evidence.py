"""What is proven is said, what is not is not: limits, and who hit them."""

from __future__ import annotations

import asyncio

import pytest

from tests.integration.agent.conftest import Maker
from tests.integration.agent.house import House

HOG = "python3 -c 'x = bytearray(200 << 20); print(len(x))'"


async def _limited(make_house: Maker) -> House:
    house = await make_house(limits={"memory_mb": 64})
    if house.link.hello["capabilities"]["limits"]["memory"] == "rlimit":
        pytest.skip("nothing counts memory here")
    return house


@pytest.mark.privileged
async def test_a_limit_hit_in_company_is_nobodys(make_house: Maker) -> None:
    house = await _limited(make_house)
    beside = asyncio.create_task(house.bash("touch up; until [ -e go ]; do sleep 0.02; done; exit 3"))
    await house.until("test -e up")
    hog = await house.bash(HOG)
    await house.bash("touch go")

    for answer in (hog, await beside):
        assert answer.reason == "exit"
        assert answer.metadata["evidence"]["ambiguous"] is True
        assert answer.metadata["evidence"]["limits_near"] == ["memory"]
        assert answer.metadata["evidence"]["oom_kills"] >= 1


@pytest.mark.privileged
@pytest.mark.parametrize("company", ["job", "background"])
async def test_what_was_left_running_is_company_too(make_house: Maker, company: str) -> None:
    house = await _limited(make_house)
    if company == "job":
        await house.call("process", args={"action": "start", "command": "sleep 7301"})
    else:
        await house.bash("sleep 7302 &")
    hog = await house.bash(HOG)

    assert hog.reason == "exit"
    assert hog.metadata["evidence"]["ambiguous"] is True


@pytest.mark.privileged
async def test_alone_again_it_is_proven(make_house: Maker) -> None:
    house = await _limited(make_house)
    for _ in range(3):
        await house.bash("seq 100 | sort | tail -1")
        answer = await house.bash(HOG)
        assert answer.reason == "oom", answer.meta


@pytest.mark.privileged
async def test_an_init_killed_for_memory_is_the_slots_own_work(make_house: Maker) -> None:
    house = await _limited(make_house)
    answer = await house.bash("echo 0 > /proc/self/oom_score_adj; exec dd if=/dev/zero of=/dev/shm/x bs=64k 2> /dev/null", timeout_s=20)
    if answer.reason == "sandbox_lost":
        pytest.fail(f"the slot's own work is not named: {answer.meta}")

    assert answer.reason == "oom"
    assert answer.metadata["evidence"]["oom_kills"] >= 1
    assert (await house.reset())["state"] == "ready"
    assert (await house.bash("echo back")).text == "back\n"
