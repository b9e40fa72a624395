"""On a machine whose memory is full, a slot above its share is ended before other slots are affected, in every mode."""

from __future__ import annotations

import asyncio
import secrets
import signal
import time
from pathlib import Path

import psutil
import pytest

from sandbox_server.agent.kernel.memory_groups import MemoryGroups, was_ended_by_another_agent
from tests.integration.agent.agent_harness import AgentHarness, wait_for_ends
from tests.integration.agent.conftest import ROOT, Maker

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
HOLD = "import sys, time; held = bytearray({mib} << 20); print('up', flush=True); open('up', 'w').close(); time.sleep(60)"
GROW = "held = []\nfor _ in range({mib}): held.append(bytearray(b'x' * (1 << 20)))\nprint(len(held))"


WAIT = "[time.sleep(0.02) for _ in iter(lambda: __import__('os').path.exists('go'), True)]"


def python(script: str) -> dict[str, object]:
    return {"args": {"command": "exec python3 -", "stdin": script}}


def by_cgroup(harness: AgentHarness) -> bool:
    limits: dict[str, str] = harness.link.hello["capabilities"]["limits"]
    return limits["memory"].startswith("cgroup")


def groups_of(harness: AgentHarness) -> list[Path]:
    return list(MEMORY.glob(f"**/sandbox-pool-{harness.process.pid}-*"))


@pytest.mark.privileged
@pytest.mark.parametrize(("mode", "user"), ROOT, ids="-".join)
async def test_a_slot_that_uses_too_much_memory_is_ended_and_one_within_its_share_is_not(make_harness: Maker, mode: str, user: str) -> None:
    harness = await make_harness(mode, user, slots=3, spares=0, memory_mb=400)
    if not by_cgroup(harness):
        pytest.skip("nothing counts memory here")
    share = harness.link.hello["effective"]["share_memory_mb"]
    assert 0 < 3 * share <= 400
    beside = asyncio.create_task(harness.call("bash", "1", timeout_s=60, **python(HOLD.format(mib=share - 25).replace("time.sleep(60)", WAIT))))
    await harness.until("test -e up", "1")  # otherwise the other slot would fill all memory alone
    writer = asyncio.create_task(harness.bash("until [ -e go ]; do sleep 0.02; done; echo fine", "2"))
    started = time.monotonic()
    hoarder = await harness.call("bash", "0", timeout_s=60, **python(HOARD))

    assert hoarder.reason == "oom", hoarder.meta
    assert time.monotonic() - started < 20
    proof = hoarder.metadata["evidence"]
    assert proof.get("ambiguous") is True, proof
    assert proof["used_mb"] > proof["share_mb"]
    assert proof["group"] == "sandbox"
    await harness.bash("touch go", "2")
    assert (await writer).text == "fine\n"
    await harness.bash("touch go", "1")
    assert (await beside).reason == "exit"
    assert (await harness.reset())["state"] == "ready"
    assert (await harness.bash("echo back")).text == "back\n"


@pytest.fixture
async def two(make_harness: Maker) -> tuple[AgentHarness, AgentHarness]:
    """Two agents on one small machine of their own: 600 MiB, of which slots have 450."""
    machine = {"slots_group": f"sp-test-{secrets.token_hex(4)}", "machine_memory_mb": 600, "slots": 2, "spares": 0, "limits": {"memory_mb": 450}}
    harnesss = [await make_harness("bwrap", "root", **machine) for _ in range(2)]
    if not by_cgroup(harnesss[0]):
        pytest.skip("nothing counts memory here")
    return harnesss[0], harnesss[1]


@pytest.mark.privileged
async def test_agents_share_one_machine_and_the_one_whose_slot_takes_most_ends_it(two: tuple[AgentHarness, AgentHarness]) -> None:
    first, second = two
    assert first.link.hello["effective"]["share_memory_mb"] == 2 * second.link.hello["effective"]["share_memory_mb"] + 1
    (group,) = {path.parent for harness in two for path in groups_of(harness)}
    assert int((group / "memory.limit_in_bytes").read_text()) == 450 * MIB

    share = second.link.hello["effective"]["share_memory_mb"]
    script = HOLD.format(mib=share - 25).replace("time.sleep(60)", "[time.sleep(0.02) for _ in iter(lambda: __import__('os').path.exists('go'), True)]")
    beside = [asyncio.create_task(harness.call("bash", "1", timeout_s=60, **python(script))) for harness in two]
    hoarder = await first.call("bash", "0", timeout_s=60, **python(HOARD))

    assert hoarder.reason == "oom", hoarder.meta
    assert hoarder.metadata["evidence"]["group"] == "machine"
    for harness, other in zip(two, beside, strict=True):
        assert (await harness.call("write_file", "1", args={"path": "go", "content": ""})).reason == "exit"
        assert (await other).text == "up\n"


FILL = """
import os, time
block, fd = b"x" * (1 << 16), os.memfd_create("hoard")
time.sleep(0.4)
while True:
    try:
        os.write(fd, block)
    except OSError:
        pass
"""


@pytest.mark.privileged
async def test_no_init_ends_because_the_kernel_refuses_it_memory_before_the_agent_ends_a_slot(make_harness: Maker) -> None:
    machine = {"slots_group": f"sp-test-{secrets.token_hex(4)}", "machine_memory_mb": 600, "slots": 2, "spares": 0, "limits": {"memory_mb": 450}}
    harness = await make_harness("bwrap", "root", **machine)
    if not by_cgroup(harness):
        pytest.skip("nothing counts memory here")
    (group,) = {path.parent for path in groups_of(harness)}
    commands = [(slot, f"echo > begun-{n}; exec sleep {1 + n / 20}") for slot in "01" for n in range(20)]
    running = {slot: [asyncio.create_task(harness.bash(command, slot)) for where, command in commands if where == slot] for slot in "01"}
    for slot in "01":
        await harness.until("test -e begun-19", slot)
    hoarder = asyncio.create_task(harness.call("bash", "0", timeout_s=60, **python(FILL)))
    await harness.until("pgrep -f python3", "0")
    harness.process.send_signal(signal.SIGSTOP)
    try:
        deadline = time.monotonic() + 10
        while int((group / "memory.usage_in_bytes").read_text()) < 449 * MIB:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        await asyncio.sleep(1.0)  # the other commands end now, while nothing has memory
    finally:
        harness.process.send_signal(signal.SIGCONT)

    ended = await hoarder
    assert ended.reason == "oom", ended.meta
    assert {(done.reason, done.code) for done in await asyncio.gather(*running["1"])} == {("exit", 0)}
    own = await asyncio.gather(*running["0"])
    assert {done.reason for done in own} <= {"exit", "oom"}, own
    assert (await harness.bash("echo fine", "1")).text == "fine\n"


@pytest.mark.privileged
async def test_the_slot_of_an_agent_that_hangs_is_ended_by_another(two: tuple[AgentHarness, AgentHarness]) -> None:
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
        while not any(was_ended_by_another_agent(str(slot)) for slot in slots):
            assert time.monotonic() < deadline, "nobody ended the slot"
            await asyncio.sleep(0.05)
    finally:
        first.process.send_signal(signal.SIGCONT)

    assert (grown.reason, grown.text) == ("exit", "60\n")
    answer = await hoarder
    assert answer.reason == "oom", answer.meta
    assert answer.metadata["evidence"]["ended_by"] == "another agent of the machine"


QUEUE = """
import socket, time
held, queued, kind = [], 0, socket.{kind}
while queued < 100 << 20:
    one = socket.socket(socket.AF_INET, kind)
    one.bind(("127.0.0.1", 0))
    if kind == socket.SOCK_STREAM:
        one.listen()
        near = socket.create_connection(one.getsockname())
        held += [one, near, one.accept()[0]]
    else:
        near = one
        near.connect(one.getsockname())
        held.append(one)
    near.setblocking(False)
    before = queued
    try:
        for _ in range(64 if kind == socket.SOCK_STREAM else 4):  # a datagram too many is dropped without a word
            queued += near.send(b"x" * 60000)
    except OSError:
        pass
    if len(held) > (90 if kind == socket.SOCK_STREAM else 900):
        break
open("queued", "w").write(str(queued >> 20))
while not __import__("os").path.exists("go"): time.sleep(0.02)
"""


@pytest.mark.privileged
@pytest.mark.parametrize("kind", ["SOCK_STREAM", "SOCK_DGRAM"])
async def test_buffers_of_sockets_are_counted_and_limited(make_harness: Maker, kind: str) -> None:
    harness = await make_harness("bwrap", "root", slots=1, spares=0, limits={"memory_mb": 320})
    if not by_cgroup(harness) or not (MEMORY / "memory.kmem.tcp.limit_in_bytes").exists():
        pytest.skip("no hierarchy that counts them by a counter of their own")
    (own,) = groups_of(harness)
    queuing = asyncio.create_task(harness.call("bash", timeout_s=60, **python(QUEUE.replace("{kind}", kind))))
    await harness.until("test -e queued")
    groups = MemoryGroups(1, str(MEMORY), None)
    (slot,) = own.glob("limits-*")
    counted = int((slot / "memory.kmem.tcp.usage_in_bytes").read_text())

    assert 10 * MIB < counted < 40 * MIB  # a sixteenth of its memory, and the little that every socket may always have
    assert groups.used_bytes(str(slot)) >= counted
    assert groups.used_bytes(str(own)) >= counted
    await harness.bash("touch go")
    assert (await queuing).reason == "exit"


@pytest.mark.privileged
async def test_the_groups_of_a_killed_agent_do_not_count_and_go(two: tuple[AgentHarness, AgentHarness], make_harness: Maker) -> None:
    first, second = two
    before = groups_of(first)
    assert before
    group = next(path.parent for path in before if path.parent.name.startswith("sp-test"))
    children = psutil.Process(first.process.pid).children(recursive=True)
    first.process.kill()
    await asyncio.to_thread(first.process.wait, 20)
    assert await wait_for_ends(children) == []

    third = await make_harness("bwrap", "root", slots_group=group.name, machine_memory_mb=600, slots=2, spares=0)

    assert third.link.hello["effective"]["share_memory_mb"] == second.link.hello["effective"]["share_memory_mb"]
    assert [path for path in groups_of(first) if path.parent == group] == []


@pytest.mark.parametrize(("mode", "user"), [("bwrap", "user"), ("none", "user")], ids="-".join)
async def test_without_control_groups_memory_that_nobody_has_mapped_is_counted_too(make_harness: Maker, mode: str, user: str) -> None:
    harness = await make_harness(mode, user, slots=2, memory_mb=300)
    if by_cgroup(harness):
        pytest.skip("memory is counted by the kernel here")
    capabilities = harness.link.hello["capabilities"]
    assert capabilities["limits"]["memory"] == "accounting"
    assert any("measured" in sentence for sentence in capabilities["not_enforced"])
    writer = asyncio.create_task(harness.bash("until [ -e go ]; do sleep 0.02; done; echo fine", "1"))
    hoarder = await harness.call("bash", "0", timeout_s=60, **python(HOARD.replace("while True:", "for _ in range(28):") + "import time; time.sleep(60)"))

    assert hoarder.reason == "oom", hoarder.meta
    assert hoarder.metadata["evidence"]["measured_by"] == "accounting"
    await harness.bash("touch go", "1")
    assert (await writer).text == "fine\n"


async def test_the_kernel_kills_processes_of_slots_first_and_they_cannot_change_that_unless_reported(make_harness: Maker) -> None:
    harness = await make_harness(spares=0)
    lowered = await harness.bash("echo 0 > /proc/self/oom_score_adj; cat /proc/self/oom_score_adj")
    started = await harness.bash("cat /proc/self/oom_score_adj")
    told = [sentence for sentence in harness.link.hello["capabilities"]["not_enforced"] if "oom_score_adj" in sentence]

    assert started.text == "600\n"
    assert int(lowered.text) == (0 if told else 300)
    assert [int(Path(f"/proc/{init.pid}/oom_score_adj").read_text()) for init in harness.inits()] == [300] * len(harness.inits())
