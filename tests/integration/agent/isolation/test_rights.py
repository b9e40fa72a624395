"""The rights of a slot (a shared cache, the network), and how they are taken away for good."""

from __future__ import annotations

import asyncio
import secrets
import time
from pathlib import Path

import psutil
import pytest

from sandbox_server.link.errors import AgentRefused
from tests.integration.agent.agent_harness import AgentHarness
from tests.integration.agent.conftest import Maker


async def _refusal(harness: AgentHarness, op: str, slot: str = "0", **fields: object) -> str:
    with pytest.raises(AgentRefused) as refused:
        await harness.ask(op, slot, **fields)
    return str(refused.value.code)


async def test_modes_without_a_cache_refuse_one(harness: AgentHarness) -> None:
    can = harness.link.hello["capabilities"]["cache"]

    assert can is (harness.mode == "bwrap")
    if not can:
        assert await _refusal(harness, "equip", cache="k", network=True) == "not_implemented"


@pytest.fixture
def cache() -> str:
    """The key of a cache that no other test of the same agent has."""
    return "run-" + secrets.token_hex(4)


@pytest.mark.parametrize("user", ["root", "user"])
@pytest.mark.privileged
async def test_slots_of_a_cache_share_it_whatever_their_umask(bwrap: AgentHarness, bwrap_user: AgentHarness, user: str, cache: str) -> None:
    harness = bwrap if user == "root" else bwrap_user
    for slot in "01":
        await harness.ask("equip", slot, cache=cache, network=True)
    written = await harness.bash("umask 077; echo one > $SANDBOX_CACHE/f; mkdir -p /cache/d/e; echo two > /cache/d/e/g")
    changed = await harness.bash("cat /cache/f /cache/d/e/g && echo more >> /cache/f && rm -r /cache/d && mkdir /cache/h", "1")
    seen = await harness.bash("cat /cache/f; ls /cache; id -u; id -G")
    other = await harness.bash("id -u", "1")

    assert written.code == 0, written.text
    assert changed.text == "one\ntwo\n"
    assert changed.code == 0
    lines = seen.text.splitlines()
    assert lines[:4] == ["one", "more", "f", "h"]
    if user == "root":
        assert other.text.strip() != lines[4]
        assert len(lines[5].split()) == 2


@pytest.mark.privileged
async def test_a_repository_in_the_cache_is_trusted_by_every_slot(bwrap: AgentHarness, cache: str) -> None:
    harness = bwrap
    for slot in "01":
        await harness.ask("equip", slot, cache=cache, network=True)
    made = await harness.bash(
        "cd /cache && git init -q r && cd r && git -c user.name=a -c user.email=a@a commit -q --allow-empty -m first && git status --porcelain"
    )
    assert made.code == 0, made.text
    cloned = await harness.bash("git clone -q /cache/r here && cd here && git log --format=%s", "1")

    assert cloned.text == "first\n", cloned.text


async def test_no_other_slot_sees_a_cache(bwrap_user: AgentHarness, cache: str) -> None:
    harness = bwrap_user
    await harness.ask("equip", cache=cache, network=True)
    await harness.bash("echo secret > /cache/f")
    await harness.ask("equip", "1", cache=f"{cache}-other", network=True)
    other = await harness.bash("ls -A /cache", "1")
    await harness.ask("narrow", "1", cache=None, network=True)
    without = await harness.bash("ls /cache; echo ${SANDBOX_CACHE-none}; mount | grep -c cache", "1")

    assert other.text == ""
    assert without.text.splitlines()[1:] == ["none", "0"]


async def test_narrow_takes_away_the_rights_that_are_not_named_and_keeps_the_files(bwrap_user: AgentHarness, cache: str) -> None:
    harness = bwrap_user
    await harness.ask("equip", cache=cache, network=True)
    await harness.bash("echo mine > file; echo theirs > /cache/f; sleep 7101 &")
    before = await harness.bash("grep -c : /proc/net/dev")
    await harness.ask("narrow", cache=cache, network=True)
    assert (await harness.bash("cat /cache/f file")).text == "theirs\nmine\n"
    assert (await harness.bash("pgrep -c sleep")).text == "1\n", "nothing was to be taken, so nothing ended"

    await harness.ask("narrow", cache=cache, network=False)
    offline = await harness.bash("cat /cache/f; grep -c : /proc/net/dev; pgrep -c sleep")
    assert offline.text == "theirs\n1\n0\n"
    assert int(before.text) >= 1

    await harness.ask("narrow", cache=None, network=False)
    assert (await harness.bash("cat file; ls -d /cache; id -G | wc -w")).text.splitlines()[0] == "mine"
    assert (await harness.bash("test -e /cache")).code == 1


async def test_narrow_never_gives_rights(bwrap_user: AgentHarness, cache: str) -> None:
    harness = bwrap_user
    await harness.ask("equip", cache=cache, network=True)

    assert await _refusal(harness, "narrow", cache=f"{cache}-other", network=True) == "invalid"
    await harness.ask("narrow", cache=None, network=False)
    assert await _refusal(harness, "narrow", cache=None, network=True) == "invalid"
    assert await _refusal(harness, "narrow", cache=cache, network=False) == "invalid"
    assert await _refusal(harness, "equip", cache="no/key", network=False) == "invalid"
    await harness.ask("narrow", cache=None, network=False)


async def test_a_reset_takes_the_cache_and_an_equip_keeps_the_files(bwrap: AgentHarness, cache: str) -> None:
    harness = bwrap
    await harness.bash("echo mine > file")
    await harness.ask("equip", cache=cache, network=True)
    assert (await harness.bash("cat file; touch /cache/f")).text == "mine\n"
    await harness.reset(keep=True)
    assert (await harness.bash("cat file; test -e /cache || echo none")).text == "mine\nnone\n"


async def test_a_held_cache_is_not_dropped_and_a_dropped_one_is_gone(bwrap_user: AgentHarness, cache: str) -> None:
    harness = bwrap_user
    await harness.ask("equip", cache=cache, network=True)
    await harness.bash("echo old > /cache/f")
    assert await _refusal(harness, "cache_drop", cache=cache) == "invalid"
    await harness.reset()
    assert dict(await harness.link.request({"op": "cache_drop", "cache": cache})) == {}
    assert dict(await harness.link.request({"op": "cache_drop", "cache": cache})) == {}
    await harness.ask("equip", cache=cache, network=True)

    assert (await harness.bash("ls -A /cache")).text == ""


async def test_file_routes_do_not_reach_the_cache_and_file_tools_do(bwrap_user: AgentHarness, cache: str) -> None:
    harness = bwrap_user
    await harness.ask("equip", cache=cache, network=True)
    await harness.bash("echo shared > /cache/f; ln -s /cache/f link")
    for path in ("/cache/f", "link"):
        with pytest.raises(AgentRefused) as refused:
            await harness.data("file_get", path=path)
        assert refused.value.code == "path_outside"
    assert "shared" in (await harness.call("read_file", args={"path": "/cache/f"})).text


async def test_a_cache_over_its_quota_is_emptied_and_that_is_reported(make_harness: Maker) -> None:
    harness = await make_harness("bwrap", slots=1, cache_bytes=1 << 20, cache_measure_every_s=0.1)
    await harness.ask("equip", cache="k", network=True)
    await harness.bash("mkdir -p /cache/d; touch /cache/f; head -c 2M /dev/zero > /cache/d/big")
    deadline = time.monotonic() + 50
    while (caches := (await harness.link.request({"op": "stats"}))["caches"])[0]["emptied"] == 0:
        assert time.monotonic() < deadline, caches
        await asyncio.sleep(0.05)

    assert caches[0]["cache"] == "k"
    assert (await harness.bash("ls -A /cache; echo new > /cache/f && cat /cache/f")).text == "new\n"
    assert "over its quota" in harness.log


@pytest.mark.parametrize("change", ["narrow", "equip"])
async def test_a_reset_during_another_transition_takes_precedence(make_harness: Maker, change: str) -> None:
    harness = await make_harness("bwrap", spares=0)
    bodies = _count_bodies(harness)
    for delay_s in (0, 0.002, 0.005, 0.01, 0.02, 0.04, 0.08):
        await harness.bash("echo theirs > secret")
        changing = asyncio.create_task(harness.ask(change, cache=None if change == "narrow" else "k", network=False))
        await asyncio.sleep(delay_s)
        done = await harness.reset()
        await asyncio.gather(changing, return_exceptions=True)
        seen = await harness.bash("ls -A; test -e /cache && echo cache; grep -c : /proc/net/dev")

        assert done["state"] == "ready", done
        assert seen.text.split()[:-1] == [], f"after {delay_s} s"
        assert int(seen.text.split()[-1]) == harness_interfaces()
    assert _count_bodies(harness) == bodies


def _count_bodies(harness: AgentHarness) -> int:
    """The first processes of slots; slots with a cache have a template of their own, which stays."""
    return len(psutil.Process(harness.process.pid).children()) - len(harness.templates())


def harness_interfaces() -> int:
    """How many network interfaces a slot that shares the network sees."""
    return sum(":" in line for line in Path("/proc/net/dev").read_text().splitlines())


async def test_quiet_ends_when_no_call_runs(bwrap: AgentHarness) -> None:
    assert await bwrap.ask("quiet") == {}
    running = asyncio.create_task(bwrap.bash("echo up; until [ -e go ]; do sleep 0.02; done", call_id="c"))
    await bwrap.until("true")
    quiet = asyncio.create_task(bwrap.ask("quiet"))
    await bwrap.bash("touch go")
    await running
    assert await quiet == {}
    with pytest.raises(AgentRefused):
        await bwrap.link.request({"op": "quiet", "slot": "0", "epoch": bwrap.epoch("0") + 1})
