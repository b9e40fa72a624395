"""A slot that takes more memory than its share ends before its neighbours notice, on a machine that is full, in every mode."""

from __future__ import annotations

import asyncio
import secrets
import signal
import time
from pathlib import Path

import psutil
import pytest

from sandbox_server.agent.memory_groups import was_ended
from tests.integration.agent.conftest import ROOT, Maker
from tests.integration.agent.house import House

MIB = 1 << 20
MEMORY = Path("/sys/fs/cgroup/memory")

# Fills memory that no process has mapped, and asks the kernel to take anybody else first.
HOARD = """
import os
try:
    open("/proc/self/oom_score_adj", "w").write("0")
except OSError:
    pass
block, files = b"x" * (1 << 20), []
while True:
    files.append(os.memfd_create("hoard"))
    for _ in range(16):
        os.write(files[-1], block)
"""
HOLD = "import sys, time; held = bytearray({mib} << 20); print('up', flush=True); time.sleep(60)"
GROW = "held = []\nfor _ in range({mib}): held.append(bytearray(b'x' * (1 << 20)))\nprint(len(held))"


def python(script: str) -> dict[str, object]:
    return {"args": {"command": "exec python3 -", "stdin": script}}


def by_cgroup(house: House) -> bool:
    limits: dict[str, str] = house.link.hello["capabilities"]["limits"]
    return limits["memory"].startswith("cgroup")


def groups_of(house: House) -> list[Path]:
    return list(MEMORY.glob(f"**/sandbox-pool-{house.process.pid}-*"))


@pytest.mark.privileged
@pytest.mark.parametrize(("mode", "user"), ROOT, ids="-".join)
async def test_a_hoarder_ends_and_its_neighbour_within_its_share_does_not(make_house: Maker, mode: str, user: str) -> None:
    house = await make_house(mode, user, slots=3, memory_mb=400)
    if not by_cgroup(house):
        pytest.skip("nothing counts memory here")
    share = house.link.hello["effective"]["share_memory_mb"]
    assert 0 < 4 * share <= 400
    beside = asyncio.create_task(house.call("bash", "1", timeout_s=60, **python(HOLD.format(mib=share - 25).replace("time.sleep(60)", "sys.stdin.read()"))))
    writer = asyncio.create_task(house.bash("until [ -e go ]; do sleep 0.02; done; echo fine", "2"))
    started = time.monotonic()
    hoarder = await house.call("bash", "0", timeout_s=60, **python(HOARD))

    assert hoarder.reason == "oom", hoarder.meta
    assert time.monotonic() - started < 20
    proof = hoarder.metadata["evidence"]
    assert proof["ambiguous"] is True
    assert proof["used_mb"] > proof["share_mb"]
    assert proof["group"] == "sandbox"
    await house.bash("touch go", "2")
    assert (await writer).text == "fine\n"
    assert (await beside).reason == "exit"
    assert (await house.reset())["state"] == "ready"
    assert (await house.bash("echo back")).text == "back\n"


@pytest.fixture
async def two(make_house: Maker) -> tuple[House, House]:
    """Two agents on one small machine of their own: 600 MiB, of which slots have 450."""
    machine = {"slots_group": f"sp-test-{secrets.token_hex(4)}", "machine_memory_mb": 600, "slots": 2, "spares": 0}
    houses = [await make_house("bwrap", "root", **machine) for _ in range(2)]
    if not by_cgroup(houses[0]):
        pytest.skip("nothing counts memory here")
    return houses[0], houses[1]


@pytest.mark.privileged
async def test_agents_share_one_machine_and_the_one_whose_slot_takes_most_ends_it(two: tuple[House, House]) -> None:
    first, second = two
    assert first.link.hello["effective"]["share_memory_mb"] == 2 * second.link.hello["effective"]["share_memory_mb"] + 1
    (group,) = {path.parent for house in two for path in groups_of(house)}
    assert int((group / "memory.limit_in_bytes").read_text()) == 450 * MIB

    share = second.link.hello["effective"]["share_memory_mb"]
    script = HOLD.format(mib=share - 25).replace("time.sleep(60)", "[time.sleep(0.02) for _ in iter(lambda: __import__('os').path.exists('go'), True)]")
    beside = [asyncio.create_task(house.call("bash", "1", timeout_s=60, **python(script))) for house in two]
    hoarder = await first.call("bash", "0", timeout_s=60, **python(HOARD))

    assert hoarder.reason == "oom", hoarder.meta
    assert hoarder.metadata["evidence"]["group"] == "machine"
    for house, other in zip(two, beside, strict=True):
        assert (await house.call("write_file", "1", args={"path": "go", "content": ""})).reason == "exit"
        assert (await other).text == "up\n"


@pytest.mark.privileged
async def test_the_slot_of_an_agent_that_hangs_is_ended_by_another(two: tuple[House, House]) -> None:
    first, second = two
    script = "import time\nopen('began', 'w').close()\nwhile not __import__('os').path.exists('go'): time.sleep(0.02)\n" + HOARD
    hoarder = asyncio.create_task(first.call("bash", "0", timeout_s=60, **python(script)))
    await first.until("test -e began")
    (own,) = [path for path in groups_of(first) if path.parent.name.startswith("sp-test")]
    slots = sorted(own.glob("limits-*"))
    first.process.send_signal(signal.SIGSTOP)
    try:
        for pid in (pid for slot in slots for pid in (slot / "cgroup.procs").read_text().split()):
            Path(f"/proc/{pid}/root/workspace/go").touch()
        grown = await second.call("bash", "0", timeout_s=60, args={"command": "exec python3 -", "stdin": GROW.format(mib=60)})
        deadline = time.monotonic() + 30
        while not any(was_ended(str(slot)) for slot in slots):
            assert time.monotonic() < deadline, "nobody ended the slot"
            await asyncio.sleep(0.05)
    finally:
        first.process.send_signal(signal.SIGCONT)

    assert (grown.reason, grown.text) == ("exit", "60\n")
    answer = await hoarder
    assert answer.reason == "oom", answer.meta
    assert answer.metadata["evidence"]["ended_by"] == "another agent of the machine"


@pytest.mark.privileged
async def test_the_groups_of_a_killed_agent_do_not_count_and_go(two: tuple[House, House], make_house: Maker) -> None:
    first, second = two
    before = groups_of(first)
    assert before
    group = next(path.parent for path in before if path.parent.name.startswith("sp-test"))
    children = psutil.Process(first.process.pid).children(recursive=True)
    first.process.kill()
    await asyncio.to_thread(first.process.wait, 20)
    await asyncio.to_thread(psutil.wait_procs, children, 10)

    third = await make_house("bwrap", "root", slots_group=group.name, machine_memory_mb=600, slots=2, spares=0)

    assert third.link.hello["effective"]["share_memory_mb"] == second.link.hello["effective"]["share_memory_mb"]
    assert [path for path in groups_of(first) if path.parent == group] == []


@pytest.mark.parametrize(("mode", "user"), [("bwrap", "user"), ("none", "user")], ids="-".join)
async def test_without_control_groups_memory_that_nobody_has_mapped_is_counted_too(make_house: Maker, mode: str, user: str) -> None:
    house = await make_house(mode, user, slots=2, memory_mb=300)
    if by_cgroup(house):
        pytest.skip("memory is counted by the kernel here")
    capabilities = house.link.hello["capabilities"]
    assert capabilities["limits"]["memory"] == "accounting"
    assert any("measured" in sentence for sentence in capabilities["not_enforced"])
    writer = asyncio.create_task(house.bash("until [ -e go ]; do sleep 0.02; done; echo fine", "1"))
    hoarder = await house.call("bash", "0", timeout_s=60, **python(HOARD.replace("while True:", "for _ in range(28):") + "import time; time.sleep(60)"))

    assert hoarder.reason == "oom", hoarder.meta
    assert hoarder.metadata["evidence"]["measured_by"] == "accounting"
    await house.bash("touch go", "1")
    assert (await writer).text == "fine\n"


async def test_what_runs_in_slots_is_killed_first_and_cannot_change_that_where_it_is_said_so(make_house: Maker) -> None:
    house = await make_house(spares=0)
    lowered = await house.bash("echo 0 > /proc/self/oom_score_adj; cat /proc/self/oom_score_adj")
    started = await house.bash("cat /proc/self/oom_score_adj")
    told = [sentence for sentence in house.link.hello["capabilities"]["not_enforced"] if "oom_score_adj" in sentence]

    assert started.text == "600\n"
    assert int(lowered.text) == (0 if told else 300)
    assert [int(Path(f"/proc/{init.pid}/oom_score_adj").read_text()) for init in house.inits()] == [300] * len(house.inits())
