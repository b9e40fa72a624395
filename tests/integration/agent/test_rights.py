"""What a slot is given beyond itself, a shared cache and the network, and how it is taken away for good."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import psutil
import pytest

from sandbox_server.link.errors import AgentRefused
from tests.integration.agent.conftest import Maker
from tests.integration.agent.house import House


async def _refusal(house: House, op: str, slot: str = "0", **fields: object) -> str:
    with pytest.raises(AgentRefused) as refused:
        await house.ask(op, slot, **fields)
    return str(refused.value.code)


async def test_modes_without_a_cache_say_so(house: House) -> None:
    can = house.link.hello["capabilities"]["cache"]

    assert can is (house.mode == "bwrap")
    if not can:
        assert await _refusal(house, "equip", cache="k", network=True) == "not_implemented"


async def _equipped(make_house: Maker, user: str, slots: str = "01") -> House:
    house = await make_house("bwrap", user)
    for slot in slots:
        await house.ask("equip", slot, cache="run-1", network=True)
    return house


@pytest.mark.parametrize("user", ["root", "user"])
@pytest.mark.privileged
async def test_slots_of_a_cache_share_it_whatever_their_umask(make_house: Maker, user: str) -> None:
    house = await _equipped(make_house, user)
    written = await house.bash("umask 077; echo one > $SANDBOX_CACHE/f; mkdir -p /cache/d/e; echo two > /cache/d/e/g")
    changed = await house.bash("cat /cache/f /cache/d/e/g && echo more >> /cache/f && rm -r /cache/d && mkdir /cache/h", "1")
    seen = await house.bash("cat /cache/f; ls /cache; id -u; id -G")
    other = await house.bash("id -u", "1")

    assert written.code == 0, written.text
    assert changed.text == "one\ntwo\n"
    assert changed.code == 0
    lines = seen.text.splitlines()
    assert lines[:4] == ["one", "more", "f", "h"]
    if user == "root":
        assert other.text.strip() != lines[4]
        assert len(lines[5].split()) == 2


@pytest.mark.privileged
async def test_a_repository_in_the_cache_is_trusted_by_every_slot(make_house: Maker) -> None:
    house = await _equipped(make_house, "root")
    made = await house.bash(
        "cd /cache && git init -q r && cd r && git -c user.name=a -c user.email=a@a commit -q --allow-empty -m first && git status --porcelain"
    )
    assert made.code == 0, made.text
    cloned = await house.bash("git clone -q /cache/r here && cd here && git log --format=%s", "1")

    assert cloned.text == "first\n", cloned.text


async def test_nobody_else_sees_a_cache(make_house: Maker) -> None:
    house = await _equipped(make_house, "user", "0")
    await house.bash("echo secret > /cache/f")
    await house.ask("equip", "1", cache="run-2", network=True)
    other = await house.bash("ls -A /cache", "1")
    await house.ask("narrow", "1", cache=None, network=True)
    without = await house.bash("ls /cache; echo ${SANDBOX_CACHE-none}; mount | grep -c cache", "1")

    assert other.text == ""
    assert without.text.splitlines()[1:] == ["none", "0"]


async def test_narrow_takes_what_is_not_named_and_keeps_the_files(make_house: Maker) -> None:
    house = await _equipped(make_house, "user", "0")
    await house.bash("echo mine > file; echo theirs > /cache/f; sleep 7101 &")
    before = await house.bash("grep -c : /proc/net/dev")
    await house.ask("narrow", cache="run-1", network=True)
    assert (await house.bash("cat /cache/f file")).text == "theirs\nmine\n"
    assert (await house.bash("pgrep -c sleep")).text == "1\n", "nothing was to be taken, so nothing ended"

    await house.ask("narrow", cache="run-1", network=False)
    offline = await house.bash("cat /cache/f; grep -c : /proc/net/dev; pgrep -c sleep")
    assert offline.text == "theirs\n1\n0\n"
    assert int(before.text) >= 1

    await house.ask("narrow", cache=None, network=False)
    assert (await house.bash("cat file; ls -d /cache; id -G | wc -w")).text.splitlines()[0] == "mine"
    assert (await house.bash("test -e /cache")).code == 1


async def test_narrow_never_gives(make_house: Maker) -> None:
    house = await _equipped(make_house, "user", "0")

    assert await _refusal(house, "narrow", cache="run-2", network=True) == "invalid"
    await house.ask("narrow", cache=None, network=False)
    assert await _refusal(house, "narrow", cache=None, network=True) == "invalid"
    assert await _refusal(house, "narrow", cache="run-1", network=False) == "invalid"
    assert await _refusal(house, "equip", cache="no/key", network=False) == "invalid"
    await house.ask("narrow", cache=None, network=False)


async def test_a_reset_takes_the_cache_and_an_equip_keeps_the_files(make_house: Maker) -> None:
    house = await make_house("bwrap")
    await house.bash("echo mine > file")
    await house.ask("equip", cache="k", network=True)
    assert (await house.bash("cat file; touch /cache/f")).text == "mine\n"
    await house.reset(keep=True)
    assert (await house.bash("cat file; test -e /cache || echo none")).text == "mine\nnone\n"


async def test_a_held_cache_is_not_dropped_and_a_dropped_one_is_gone(make_house: Maker) -> None:
    house = await _equipped(make_house, "user", "0")
    await house.bash("echo old > /cache/f")
    assert await _refusal(house, "cache_drop", cache="run-1") == "invalid"
    await house.reset()
    assert dict(await house.link.request({"op": "cache_drop", "cache": "run-1"})) == {}
    assert dict(await house.link.request({"op": "cache_drop", "cache": "run-1"})) == {}
    await house.ask("equip", cache="run-1", network=True)

    assert (await house.bash("ls -A /cache")).text == ""


async def test_file_routes_do_not_reach_the_cache_and_file_tools_do(make_house: Maker) -> None:
    house = await _equipped(make_house, "user", "0")
    await house.bash("echo shared > /cache/f; ln -s /cache/f link")
    for path in ("/cache/f", "link"):
        with pytest.raises(AgentRefused) as refused:
            await house.data("file_get", path=path)
        assert refused.value.code == "path_outside"
    assert "shared" in (await house.call("read_file", args={"path": "/cache/f"})).text


async def test_a_cache_over_its_quota_is_emptied_and_that_is_said(make_house: Maker) -> None:
    house = await make_house("bwrap", cache_bytes=1 << 20)
    await house.ask("equip", cache="k", network=True)
    await house.bash("mkdir -p /cache/d; head -c 2M /dev/zero > /cache/d/big; touch /cache/f")
    deadline = time.monotonic() + 30
    while (caches := (await house.link.request({"op": "stats"}))["caches"])[0]["emptied"] == 0:
        assert time.monotonic() < deadline, caches
        await asyncio.sleep(0.2)

    assert caches[0]["cache"] == "k"
    assert (await house.bash("ls -A /cache; echo new > /cache/f && cat /cache/f")).text == "new\n"
    assert "over its quota" in house.log


@pytest.mark.parametrize("change", ["narrow", "equip"])
async def test_a_reset_during_another_change_wins(make_house: Maker, change: str) -> None:
    house = await make_house("bwrap", spares=0)
    bodies = len(psutil.Process(house.process.pid).children())
    for delay_s in (0, 0.002, 0.005, 0.01, 0.02, 0.04, 0.08):
        await house.bash("echo theirs > secret")
        changing = asyncio.create_task(house.ask(change, cache=None if change == "narrow" else "k", network=False))
        await asyncio.sleep(delay_s)
        done = await house.reset()
        await asyncio.gather(changing, return_exceptions=True)
        seen = await house.bash("ls -A; test -e /cache && echo cache; grep -c : /proc/net/dev")

        assert done["state"] == "ready", done
        assert seen.text.split()[:-1] == [], f"after {delay_s} s"
        assert int(seen.text.split()[-1]) == house_interfaces()
    assert len(psutil.Process(house.process.pid).children()) == bodies


def house_interfaces() -> int:
    """How many network interfaces a slot that shares the network sees."""
    return sum(":" in line for line in Path("/proc/net/dev").read_text().splitlines())


async def test_quiet_says_when_nothing_runs(house: House) -> None:
    assert await house.ask("quiet") == {}
    running = asyncio.create_task(house.bash("echo up; until [ -e go ]; do sleep 0.02; done", call_id="c"))
    await house.until("true")
    quiet = asyncio.create_task(house.ask("quiet"))
    await house.bash("touch go")
    await running
    assert await quiet == {}
    with pytest.raises(AgentRefused):
        await house.link.request({"op": "quiet", "slot": "0", "epoch": house.epoch("0") + 1})
