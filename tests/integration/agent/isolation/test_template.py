"""The template that the inits of slots are forked from: its rights, how it is replaced, and that a forked slot sees what an executed one sees."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections import Counter
from pathlib import Path

import psutil
import pytest

from tests.integration.agent.agent_harness import AgentHarness, agent_process, connected
from tests.integration.agent.conftest import MODES, Maker, runner_of

CYCLES = 60
MOST_OWN_KIB = 1000  # It is about 820. It would be more than 1,400 if an init changed as many pages as objects are in its way.
FORKED = [mode for mode in MODES if mode[0] != "none"]
forked_modes = pytest.mark.parametrize(("mode", "user"), FORKED, ids=["-".join(mode) for mode in FORKED])

# What a program sees of its slot, without what differs between any two slots: numbers of processes and mounts, and the folders and users of the slot.
VIEW = r"""
hostname; ls -lan / /dev /dev/ /etc /run /var /.sandbox | awk '{ $2 = $4 = $5 = $6 = $7 = $8 = ""; print }'
while read -r _ _ device root point options rest; do echo "$point $options ${rest#*- }"; done < /proc/self/mountinfo | sort
ulimit -a; umask; env -u _ | sort; id -G | wc -w; ls /proc/self/fd /proc/1/task | tail -n +2 | wc -l
grep -E '^(Cap|NoNewPrivs|Seccomp|Groups|Cpus_allowed_list|Threads)' /proc/1/status /proc/self/status
cat /proc/net/dev | wc -l; cat /proc/sys/kernel/hostname; ipcs -a 2>/dev/null; tty; cat /proc/1/oom_score_adj /proc/self/oom_score_adj
for name in mem environ maps fd/0 root cwd; do cat /proc/1/$name > /dev/null 2>&1 && echo "can read $name of init"; done
ps -e -o pid=,sid=,ni=,cls= | head -1
"""


# The /proc that the slot's own one covers, which shows no process, and the folder of init, which is protected by mounts.
EXTRA = {
    "root": [],
    "user": [
        "/proc rw,nosuid,nodev,noexec,relatime proc proc rw",
        "/proc/1 ro,nosuid,nodev,noexec,relatime proc proc rw",
        "/proc/1/fd ro,nosuid,nodev,noexec,relatime tmpfs tmpfs ro,size=4k,mode=000,",
        "/proc/1/task/1/fd ro,nosuid,nodev,noexec,relatime tmpfs tmpfs ro,size=4k,mode=000,",
    ],
}
# How many pseudo-terminals a slot may have: bubblewrap, which mounts /dev/pts of an executed slot, sets no limit.
PTS_LIMIT = ",ptmxmode=666,max=64"
OWN = re.compile(r"agent-\w+|uid=\d+,gid=\d+|s-[0-9a-f]{8}|\b1\d{6}\b")  # The folder of the agent, its sandbox, and the user of a slot.


@forked_modes
async def test_a_forked_slot_sees_what_an_executed_slot_sees(make_harness: Maker, mode: str, user: str) -> None:
    forked, executed = [await make_harness(mode, user, slots=1, spares=0, slot_start=start) for start in ("auto", "executed")]

    assert [harness.link.hello["capabilities"]["slot_start"] for harness in (forked, executed)] == ["forked", "executed"]
    assert [len(harness.templates()) for harness in (forked, executed)] == [1, 0]
    for has_network in (True, mode == "uid"):
        await asyncio.gather(*(harness.reset(network=has_network) for harness in (forked, executed)))
        views = [OWN.sub("", (await harness.bash(VIEW)).text).splitlines() for harness in (forked, executed)]
        if mode == "uid":  # a slot sees the shared memory, queues and semaphores of the whole machine, which other slots make and remove meanwhile
            views = [[line for line in view if not line.startswith("0x")] for view in views]
        seen, expected = views
        assert len(expected) > 50
        assert mode == "uid" or any(line.endswith(PTS_LIMIT) for line in seen)
        seen = [line.replace(PTS_LIMIT, ",ptmxmode=666") for line in seen]
        assert Counter(seen) - Counter(expected) == Counter(EXTRA[user])
        assert Counter(expected) - Counter(seen) == Counter()


async def test_a_killed_template_is_replaced_and_no_slot_notices(make_harness: Maker) -> None:
    harness = await make_harness(spares=0)
    running = asyncio.create_task(harness.bash("touch up; until [ -e go ]; do sleep 0.02; done; echo alive", "1"))
    await harness.until("[ -e up ]", "1")
    (first,) = harness.templates()

    first.kill()
    assert (await harness.reset())["state"] == "ready"
    (second,) = harness.templates()
    await harness.bash("touch go", "1")

    assert second.pid != first.pid
    assert (await harness.bash("echo new")).text == "new\n"
    assert (await running).text == "alive\n"
    assert (await harness.reset("1"))["state"] == "ready"


async def test_a_template_that_hangs_while_slots_start_loses_none(make_harness: Maker) -> None:
    harness = await make_harness(spares=0)
    (first,) = harness.templates()
    first.send_signal(signal.SIGSTOP)
    resets = [asyncio.create_task(harness.reset(slot)) for slot in ("0", "1")]
    await asyncio.wait(resets, timeout=0.2)
    first.kill()

    assert [(await reset)["state"] for reset in resets] == ["ready", "ready"]
    assert len(harness.inits()) == 2
    assert len(psutil.Process(harness.process.pid).children()) == 3


async def test_nothing_is_left_behind_after_many_slots(make_harness: Maker) -> None:
    harness = await make_harness(spares=0)
    (template,) = harness.templates()
    agent = psutil.Process(harness.process.pid)

    def held() -> dict[str, int]:
        return {
            "mounts of the agent": len(agent_mounts(agent.pid)),
            "mounts of the template": len(agent_mounts(template.pid)),
            "files of the agent": agent.num_fds(),
            "files of the template": template.num_fds(),
            "processes": len(agent.children(recursive=True)),
        }

    await asyncio.gather(harness.reset("0"), harness.reset("1"))
    before = held()
    for _ in range(CYCLES // 2):
        await asyncio.gather(harness.reset("0"), harness.reset("1"))

    assert held() == before
    assert harness.templates() == [template]


def agent_mounts(pid: int) -> list[str]:
    """The mounts that a process sees."""
    return Path(f"/proc/{pid}/mountinfo").read_text(encoding="utf-8").splitlines()


@pytest.mark.privileged
async def test_an_idle_init_shares_most_of_its_memory_with_the_template(bwrap: AgentHarness) -> None:
    await bwrap.reset()
    newest = max(bwrap.inits(), key=lambda init: init.create_time())
    memory = dict(re.findall(r"^(\w+): +(\d+) kB$", Path(f"/proc/{newest.pid}/smaps_rollup").read_text(encoding="utf-8"), re.MULTILINE))

    assert int(memory["Private_Dirty"]) <= MOST_OWN_KIB


@pytest.mark.privileged
async def test_a_template_has_the_rights_and_files_that_it_needs_alone(bwrap: AgentHarness) -> None:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{bwrap.templates()[0].pid}/status").read_text(encoding="utf-8").splitlines())
    agent, template = psutil.Process(bwrap.process.pid), bwrap.templates()[0]
    files = [os.readlink(path) for path in Path(f"/proc/{template.pid}/fd").iterdir()]

    assert {int(status[name], 16) for name in ("CapInh", "CapBnd", "CapAmb")} == {0}
    assert int(status["CapPrm"], 16) == int(status["CapEff"], 16) == 1 << 6 | 1 << 7 | 1 << 12 | 1 << 21  # SETGID, SETUID, NET_ADMIN, SYS_ADMIN
    assert (status["Threads"].strip(), status["NoNewPrivs"].strip()) == ("1", "1")
    assert sorted(file.partition(":")[0] for file in files) == ["/dev/null", "/dev/null", "/dev/null", "socket"]
    assert set(template.environ()) <= {"LD_LIBRARY_PATH", "LD_BIND_NOW"}
    assert [mount for mount in agent_mounts(template.pid) if str(bwrap.folder / "base" / "slots") in mount] == []
    assert (await asyncio.to_thread(template.parent)) == agent


# Executes a program on a kernel without clone3, as far as the program can tell.
WITHOUT_CLONE3 = """
import ctypes, errno, os, struct, sys
instructions = (0x20, 0, 0, 0), (0x15, 0, 1, 435), (0x06, 0, 0, 0x50000 | errno.ENOSYS), (0x06, 0, 0, 0x7FFF0000)
program = b"".join(struct.pack("<HBBI", *words) for words in instructions)
class Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("program", ctypes.c_char_p)]
libc = ctypes.CDLL(None)
none = ctypes.c_ulong(0)
assert libc.prctl(38, ctypes.c_ulong(1), none, none, none) == 0
assert libc.prctl(22, ctypes.c_ulong(2), ctypes.byref(Filter(4, program)), none, none) == 0
os.execv(sys.argv[1], sys.argv[1:])
"""


@forked_modes
async def test_slots_are_executed_where_the_kernel_cannot_fork_them(mode: str, user: str) -> None:
    runner = runner_of(user)
    with agent_process(runner, mode, [runner.python, "-I", "-c", WITHOUT_CLONE3], slots=1, spares=0) as agent:
        async with connected(agent) as harness:
            assert harness.link.hello["capabilities"]["slot_start"] == "executed: the template of slots: clone3: Function not implemented"
            assert harness.templates() == []
            assert (await harness.bash("echo fine")).text == "fine\n"
