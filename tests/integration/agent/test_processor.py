"""Processor time: how much a killed process tree used, and whether a call that timed out had its slot's share."""

from __future__ import annotations

import asyncio
import os
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from sandbox_server.link.errors import AgentRefused
from tests.integration.agent.agent_harness import AgentHarness, Answer
from tests.integration.agent.conftest import MODES, Maker

SPIN = "while True: pass"
# Three processes that spin, of which the first waits for none. Each says again and again what it has used, once that is more than 0.1 s.
SPIN_AND_SAY = """
import os, sys, time
for number in range(2):
    if os.fork() == 0:
        os.setsid()
        break
else:
    number = 2
while True:
    begun = time.process_time()
    while time.process_time() < begun + 0.1:
        pass
    with open(f"used-{number}.new", "w") as file:
        file.write(str(time.process_time()))
    os.rename(f"used-{number}.new", f"used-{number}")
"""
# Sessions that take the processor from everybody on the machine, until whoever started them closes their input.
OUTSIDERS = """
import os, sys
for _ in range(%d):
    parent = os.getpid()
    if os.fork() == 0:
        os.setsid()
        while os.getppid() == parent:
            pass
        os._exit(0)
print("up", flush=True)
sys.stdin.read()
"""
# So many sessions that a kernel which shares between sessions leaves none of its neighbours a fair part.
HOGS = f"""
import os, sys, time
for _ in range(int(sys.argv[1])):
    if os.fork() == 0:
        os.setsid()
        {SPIN}
print("up", flush=True)
time.sleep(60)
"""
SLOTS = 16


async def test_the_processor_time_of_a_killed_tree_is_reported(harness: AgentHarness) -> None:
    spinning = asyncio.create_task(harness.bash("exec python3 -", stdin=SPIN_AND_SAY, call_id="c"))
    await harness.until("[ -e used-0 -a -e used-1 -a -e used-2 ]")
    await harness.ask("cancel", call_id="c")
    answer = await spinning
    said = await harness.bash("cat used-0; echo; cat used-1; echo; cat used-2")
    used_s = sum(float(line) for line in said.text.split())

    assert answer.reason == "cancelled"
    assert used_s > 0.1
    assert 0.8 * used_s <= answer.meta["cpu_s"] <= used_s + 4 * 2  # what they used until the kill, at most on every processor


Crowd = Callable[[int], Awaitable[AgentHarness]]


@pytest.fixture
def make_crowd(make_harness: Maker) -> Crowd:
    async def make(slots: int) -> AgentHarness:
        harness = await make_harness(slots=slots)
        if harness.link.hello["capabilities"]["kill"] != "cgroup2":
            pytest.skip("nothing counts here what a tree uses and waits for")
        return harness

    return make


@pytest.fixture
async def crowd(make_crowd: Crowd) -> AgentHarness:
    return await make_crowd(SLOTS)


async def hog(harness: AgentHarness, slot: str, sessions: int, timeout_s: float) -> asyncio.Task[Answer]:
    """A slot whose processes use all processors until the call ends."""
    task = asyncio.create_task(harness.bash(f"exec python3 - {sessions}", slot, call_id=f"hog-{slot}", stdin=HOGS, timeout_s=timeout_s))
    while not await _has_output(harness, slot, f"hog-{slot}"):  # asked of the agent, because a command in this slot would wait for a processor
        assert not task.done()
        await asyncio.sleep(0.02)
    return task


async def _has_output(harness: AgentHarness, slot: str, call_id: str) -> bool:
    try:
        return bool((await harness.ask("call_status", slot, call_id=call_id))["output_bytes"])
    except AgentRefused:
        return False  # the call has not begun


def evidence(answer: Answer) -> dict[str, Any]:
    proof: dict[str, Any] = answer.metadata["evidence"]
    return proof


@contextmanager
def outsiders(count: int) -> Iterator[None]:
    """Busy sessions that belong to no slot."""
    process = subprocess.Popen([sys.executable, "-c", OUTSIDERS % count], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        yield
    finally:
        process.communicate()


@pytest.mark.privileged
async def test_evidence_shows_that_others_kept_a_call_from_its_share(make_crowd: Crowd) -> None:
    harness = await make_crowd(4)  # The share of one of them is far above what a call gets while it starts.
    await harness.bash("printf '%040d' 0 > zeros", "1")
    with outsiders(60):
        starved, tool, meek = await asyncio.gather(
            harness.bash(f"exec python3 -c '{SPIN}'", "0", timeout_s=1.5),
            harness.call("search_files", "1", args={"pattern": "(0+0+)+1"}, timeout_s=1.5),
            harness.bash(f"exec nice -n 19 python3 -c '{SPIN}'", "2", timeout_s=1.5),
        )

    assert (starved.reason, tool.reason, meek.reason) == ("timeout", "timeout", "timeout")
    assert "starved" in evidence(tool)
    proof = evidence(starved)["starved"]
    assert proof["given_s"] < 0.8 * proof["owed_s"]
    assert proof["owed_s"] <= 1.05 * starved.meta["duration_s"] * proof["share_processors"]
    assert "starved" not in evidence(meek), "it asked for less"


@pytest.mark.privileged
async def test_a_call_that_has_its_share_or_loses_it_to_its_own_slot_is_not_starved(crowd: AgentHarness) -> None:
    alone, asleep = await asyncio.gather(
        crowd.bash(f"exec python3 -c '{SPIN}'", "0", timeout_s=0.6),  # a share of an eighth of a processor is 0.075 s, more than the agent ignores
        crowd.bash("sleep 60", "1", timeout_s=0.6),
    )
    hogging = await hog(crowd, "0", sessions=40, timeout_s=2.5)
    beside_its_own = await crowd.bash(f"exec python3 -c '{SPIN}'", "0", timeout_s=1.0)
    hogs = await hogging

    for answer in (alone, asleep, beside_its_own, hogs):
        assert answer.reason == "timeout"
        assert "starved" not in evidence(answer), answer.meta


# Much is hidden by many: the one that spins asks for less, and is the last to have been started.
HIDDEN = """
import os, signal, time
for _ in range(%d):
    if os.fork() == 0:
        os.setsid()
        signal.pause()
if os.fork():
    signal.pause()
os.nice(19)
print(time.monotonic(), flush=True)
while True:
    pass
"""


@pytest.mark.privileged
async def test_a_process_that_has_lowered_its_priority_is_found_among_many(make_crowd: Crowd) -> None:
    harness = await make_crowd(4)  # The share of one of them is far above what it gets beside so many.
    for timeout_s in (2.0, 8.0, 32.0):
        begun = time.monotonic()
        task = asyncio.create_task(harness.bash("exec python3 -", call_id=f"hidden-{timeout_s}", stdin=HIDDEN % 300, timeout_s=timeout_s))
        while not task.done() and not await _has_output(harness, "0", f"hidden-{timeout_s}"):
            await asyncio.sleep(0.02)
        with outsiders(60):  # Until it had lowered its priority, they would really keep it from its share.
            hidden = await task
        # On a machine that is busy anyway, it may lower its priority after its deadline, until it is killed.
        was_in_time = hidden.text != "" and float(hidden.text) < begun + timeout_s
        if was_in_time:
            break

    assert (hidden.reason, was_in_time) == ("timeout", True)
    assert "starved" not in evidence(hidden)


@pytest.mark.privileged
async def test_slots_have_equal_parts_however_many_sessions_they_have(make_harness: Maker) -> None:
    harness = await make_harness(slots=4)
    if not harness.link.hello["capabilities"]["limits"]["cpu"].startswith("cgroup"):
        pytest.skip("no control group can be made here that shares out the processor")
    others = ("1", "2", "3")
    hogs = await asyncio.gather(*(hog(harness, slot, sessions=40, timeout_s=55.0) for slot in others))
    before_s = _used_s(harness)
    modest = "import time\nwhile time.process_time() < 0.15: pass\nprint(time.process_time())"
    beside = await harness.bash(f"exec python3 -c '{modest}'", timeout_s=30.0)
    used_s = _used_s(harness) - before_s
    begun = time.monotonic()
    await asyncio.gather(*(harness.ask("cancel", slot, call_id=f"hog-{slot}") for slot in others))
    ends = await asyncio.gather(*hogs)
    took_s = time.monotonic() - begun

    assert beside.reason == "exit"
    # With equal parts, the three other slots have used three times as much meanwhile. With a part for each session, it would be 120 times as much.
    assert used_s < 20 * float(beside.text)
    assert [end.reason for end in ends] == ["cancelled"] * 3
    assert took_s < 3.0


@pytest.mark.privileged
async def test_busy_slots_of_several_sandboxes_do_not_delay_their_agents(make_harness: Maker) -> None:
    group = f"sp-test-{secrets.token_hex(4)}"
    agents = await asyncio.gather(*(make_harness(slots=slots, spares=0, slots_group=group) for slots in (2, 3)))
    if any(agent.link.hello["capabilities"]["limits"]["cpu"] != "cgroup1" for agent in agents):
        pytest.skip("no control group of the first version can be made here that shares out the processor")
    hogs = [await hog(agent, "0", sessions=20, timeout_s=50.0) for agent in agents]
    took_s = []
    for _ in range(20):
        begun = time.monotonic()
        await agents[0].ask("call_status", call_id="hog-0")
        took_s.append(time.monotonic() - begun)
    folder = _processor_group_of(agents[0])
    together, own = (int((path / "cpu.shares").read_text()) for path in (folder.parent.parent, folder.parent))
    await asyncio.gather(*(agent.ask("cancel", call_id="hog-0") for agent in agents))
    await asyncio.gather(*hogs)

    assert statistics.median(took_s) < 0.1
    assert (folder.parent.parent.name, _processor_group_of(agents[1]).parent.parent) == (group, folder.parent.parent)
    assert (together, own) == (3 * 1024, 2 * 1024), "all slots weigh as much as those of the largest sandbox"
    for agent in agents:
        agent.process.terminate()
    await asyncio.gather(*(asyncio.to_thread(agent.process.wait, 20) for agent in agents))
    assert not folder.parent.parent.exists()


def _processor_group_of(harness: AgentHarness) -> Path:
    """The control group that gives the first slot its part of the processor."""
    lines = Path(f"/proc/{harness.inits()[0].pid}/cgroup").read_text().splitlines()
    path = next(path for _, controllers, path in (line.split(":", 2) for line in lines) if "cpu" in controllers.split(","))
    mount = next(
        line.split()[1] for line in Path("/proc/mounts").read_text().splitlines() if line.split()[2] == "cgroup" and "cpu" in line.split()[3].split(",")
    )
    return Path(mount + path)


def _used_s(harness: AgentHarness) -> float:
    """The processor time of all living processes of slots."""
    used_s = 0.0
    for process in psutil.Process(harness.process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            used_s += times.user + times.system
    return used_s


async def test_the_processor_time_of_background_processes_counts_while_the_call_runs(harness: AgentHarness) -> None:
    if harness.link.hello["capabilities"]["kill"] != "cgroup2":
        pytest.skip("nothing counts here what a tree uses")
    busy = 'import time\nwhile time.process_time() < 0.5: pass\nopen("done", "w").close()'
    answer = await harness.bash(f"(setsid python3 -c '{busy}' &); until [ -e done ]; do sleep 0.05; done")

    assert answer.reason == "exit"
    assert answer.meta["cpu_s"] >= 0.4


async def test_the_agent_reports_if_slots_cannot_have_equal_parts(harness: AgentHarness) -> None:
    capabilities = harness.link.hello["capabilities"]
    told = any(sentence.startswith("the processor is divided between sessions") for sentence in capabilities["not_enforced"])

    assert told == (capabilities["limits"]["cpu"] == "none")


# What programs go by when they choose a number of threads, and then as many processors as the kernel lets it run on.
COUNT = """
import os, subprocess
print(subprocess.run(["nproc"], capture_output=True, text=True).stdout.strip(), os.environ["OMP_NUM_THREADS"], os.environ["PYTHON_CPU_COUNT"])
print(sorted(os.sched_getaffinity(0)))
os.sched_setaffinity(0, range(os.cpu_count()))
print(len(os.sched_getaffinity(0)))
"""


@pytest.mark.parametrize(("mode", "user"), MODES)
async def test_a_slot_with_a_limit_keeps_its_processor_through_resets_and_is_told_of_no_other(make_harness: Maker, mode: str, user: str) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("every slot has all processors here")
    harness = await make_harness(mode, user, slots=2, spares=1, limits={"cpu": 0.5}, first_processor=1)
    pinned = []
    for _ in range(3):
        lines = [(await harness.bash("exec python3 -", slot, stdin=COUNT)).text.splitlines() for slot in ("0", "1")]
        assert [line[0] for line in lines] == ["1 1 1", "1 1 1"]
        pinned.append([line[1] for line in lines])
        await harness.reset("0")

    allowed = sorted(os.sched_getaffinity(0))
    assert pinned == [[f"[{allowed[1]}]", f"[{allowed[2 % len(allowed)]}]"]] * 3


@pytest.mark.privileged
async def test_a_slot_that_leaves_its_processor_gets_no_more_than_its_limit(make_harness: Maker) -> None:
    harness = await make_harness(slots=2, limits={"cpu": 1})
    if harness.link.hello["capabilities"]["limits"]["cpu"] != "cgroup1" or len(os.sched_getaffinity(0)) < 2:
        pytest.skip("no control group of the first version can be made here that limits the time of one of several processors")
    folder = _processor_group_of(harness)
    escape = f"import os\nos.sched_setaffinity(0, range(os.cpu_count()))\nfor _ in range(3): os.fork()\nprint(1, flush=True)\n{SPIN}"
    hogging = asyncio.create_task(harness.bash("exec python3 -", call_id="escape", stdin=escape, timeout_s=120.0))
    while int((folder / "cpu.stat").read_text().split("nr_throttled ")[1].split()[0]) < 3 and not hogging.done():
        await asyncio.sleep(0.05)
    await harness.ask("cancel", call_id="escape")
    ended = await hogging

    assert ended.reason == "cancelled", "eight processes on two processors were never stopped"
    assert (folder / "cpu.cfs_quota_us").read_text() == "100000\n"


@pytest.mark.privileged
async def test_a_slot_is_told_of_the_quota_of_its_container(make_harness: Maker) -> None:
    group = Path("/sys/fs/cgroup/cpu") / f"sp-test-{secrets.token_hex(4)}"
    if len(os.sched_getaffinity(0)) < 2 or not os.access(group.parent / "cpu.shares", os.W_OK):
        pytest.skip("no control group of the first version can be made here that has less than all processors")
    group.mkdir()
    try:
        (group / "cpu.cfs_quota_us").write_text("100000")
        harness = await make_harness(prefix=["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"])
        told = (await harness.bash("exec python3 -", stdin=COUNT)).text.splitlines()
        own = await harness.bash("echo $OMP_NUM_THREADS", env={"OMP_NUM_THREADS": "7"})
        harness.process.terminate()
        await asyncio.to_thread(harness.process.wait, 20)
    finally:
        group.rmdir()

    assert told[:2] == ["1 1 1", str(sorted(os.sched_getaffinity(0)))]
    assert own.text == "7\n"
