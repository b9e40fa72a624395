"""How calls, slots and agents end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import secrets
import signal
import time

import psutil
import pytest

from sandbox_server.link import AgentEndpoint, connect
from sandbox_server.link.errors import AgentRefused, LinkLost
from tests.integration.agent.agent_harness import TOKEN, AgentHarness, lives, wait_for_ends
from tests.integration.agent.conftest import Maker

HARD_TO_KILL = """
trap '' TERM
echo begun
setsid sleep 7001 &
( setsid setsid bash -c 'trap "" TERM; exec -a hidden sleep 7002' & ) &
env -i setsid nohup sleep 7003 > /dev/null 2>&1 &
python3 -c 'import os
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 100)
        os.execvp("sleep", ["sleep", "7004"])' &
echo started
while :; do sleep 7005; done
"""


# Only processes in the folder of the slot: without a pid namespace, a slot sees the processes of all users.
SLEEPERS = r"""
import os, re
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        if os.readlink(f"/proc/{pid}/cwd") == os.environ["HOME"]:
            with open(f"/proc/{pid}/cmdline") as file:
                command = file.read().split("\0")
            if command[0] in ("sleep", "hidden") and re.fullmatch("[67]0[0-9][0-9]", command[1]):
                print(command[1])
    except OSError:
        continue
"""


async def _sleepers(harness: AgentHarness, slot: str = "0") -> list[str]:
    """The arguments of every `sleep` that a slot still runs."""
    answer = await harness.bash("exec python3 -", slot, stdin=SLEEPERS)
    assert (answer.reason, answer.code) == ("exit", 0), answer.text
    return sorted(answer.text.split())


async def test_a_timeout_kills_the_whole_tree_of_that_call_alone(harnesses: list[AgentHarness]) -> None:
    await asyncio.gather(*map(_time_out_among_others, harnesses))


async def _time_out_among_others(harness: AgentHarness) -> None:
    await harness.bash("sleep 6001 & setsid sleep 6002 &")
    began = time.monotonic()
    answer = await harness.bash(HARD_TO_KILL, timeout_s=0.7)
    took = time.monotonic() - began

    assert answer.reason == "timeout"
    assert answer.code is None
    assert answer.text == "begun\nstarted\n"
    assert took < 0.7 + 3
    assert await _sleepers(harness) == ["6001", "6002"]


async def test_another_running_call_survives_a_timeout(harnesses: list[AgentHarness]) -> None:
    await asyncio.gather(*map(_survive_the_timeout_of_another, harnesses))


async def _survive_the_timeout_of_another(harness: AgentHarness) -> None:
    other = asyncio.create_task(harness.bash("setsid sleep 6003 & sleep 6004 & touch up; until [ -e go ]; do sleep 0.02; done; echo here"))
    await harness.until("test -e up")
    answer = await harness.bash("sleep 7006 & sleep 7007", timeout_s=0.3)
    await harness.bash("touch go")

    assert answer.reason == "timeout"
    assert (await other).text == "here\n"
    assert await _sleepers(harness) == ["6003", "6004"]


async def test_a_process_that_ends_on_sigterm_is_not_waited_for_longer(harness: AgentHarness) -> None:
    began = time.monotonic()
    answer = await harness.bash("trap 'echo tidied; exit' TERM; while :; do sleep 0.01; done", timeout_s=0.3)

    assert answer.reason == "timeout"
    assert answer.text.endswith("tidied\n")
    assert time.monotonic() - began < 2


async def test_a_call_without_output_is_ended_and_one_with_output_is_not(harnesses: list[AgentHarness]) -> None:
    await asyncio.gather(*map(_be_silent_and_not, harnesses))


async def _be_silent_and_not(harness: AgentHarness) -> None:
    talking, silent = await asyncio.gather(
        harness.bash("for i in 1 2 3 4 5 6; do echo $i; sleep 0.2; done", no_output_timeout_s=0.6),
        harness.bash("echo first; sleep 100", "1", no_output_timeout_s=0.4),
    )

    assert talking.reason == "exit"
    assert (silent.reason, silent.text) == ("no_output_timeout", "first\n")


async def test_a_cancelled_call_returns_what_it_wrote(harness: AgentHarness) -> None:
    running = asyncio.create_task(harness.bash("echo part; sleep 7008", call_id="c"))
    while (await harness.ask("call_status", call_id="c"))["output_bytes"] == 0 if "c" in await _known(harness) else True:
        await asyncio.sleep(0.02)

    assert (await harness.ask("cancel", call_id="c")) == {"found": True, "state": "running"}
    answer = await running
    assert (answer.reason, answer.text) == ("cancelled", "part\n")
    assert await _sleepers(harness) == []


async def test_calls_that_are_cancelled_while_they_start_leave_no_process(harness: AgentHarness) -> None:
    """Calls side by side have control groups of their own, which are empty until init has started their processes."""
    for turn in range(4):
        call_ids = [f"{turn}.{number}" for number in range(6)]
        running = [asyncio.create_task(harness.bash(f"sleep 6{turn}{number}0", call_id=call_id)) for number, call_id in enumerate(call_ids)]
        answers = await asyncio.gather(*map(functools.partial(_cancel_soon, harness), call_ids), *running)

        assert {answer.reason for answer in answers[len(call_ids) :]} == {"cancelled"}
        assert await _sleepers(harness) == []


async def _cancel_soon(harness: AgentHarness, call_id: str) -> None:
    """Cancel a call as soon as the agent knows it."""
    while True:
        with contextlib.suppress(AgentRefused):
            await harness.ask("cancel", call_id=call_id)
            return
        await asyncio.sleep(0)


async def test_a_call_whose_tree_is_being_ended_at_its_deadline_has_timed_out_though_its_slot_is_reset_meanwhile(bwrap: AgentHarness) -> None:
    running = asyncio.create_task(bwrap.bash("trap 'touch asked' TERM; while :; do sleep 0.02; done", timeout_s=0.5))
    await bwrap.until("[ -e asked ]")
    await bwrap.reset()
    answer = await running

    assert (answer.reason, answer.metadata["evidence"]["slot"]) == ("timeout", "given back, or its rights changed")


async def _known(harness: AgentHarness) -> set[str]:
    try:
        await harness.ask("call_status", call_id="c")
    except AgentRefused:
        return set()
    return {"c"}


async def test_a_reset_ends_all_processes_and_deletes_all_files(harness: AgentHarness) -> None:
    shared = [f"{place}/left-{secrets.token_hex(4)}" for place in ("/dev/shm", "/tmp")]
    await harness.bash(f"echo secret > file; mkdir -p deep/er; touch $TMPDIR/t {' '.join(shared)}; (trap '' TERM; setsid sleep 7009 &) & sleep 7010 &")
    await harness.call("process", args={"action": "start", "command": "sleep 7011"})
    before = await harness.bash("id -u")
    running = asyncio.create_task(harness.bash("echo part; sleep 7012", call_id="c"))
    while "c" not in await _known(harness):
        await asyncio.sleep(0.02)
    done = await harness.reset()
    answer = await running

    assert done["state"] == "ready", done
    assert done["proof"]["clean"]
    assert answer.reason == "cancelled"
    assert await _sleepers(harness) == []
    left = await harness.bash("find . ${TMPDIR:-/tmp} -mindepth 1; ls " + " ".join(shared) + " 2>/dev/null")
    assert sorted(left.text.splitlines()) == (shared if harness.mode == "none" else [])
    if harness.mode == "uid":
        assert (await harness.bash("id -u")).text != before.text
    if harness.mode == "none":
        for path in shared:
            os.unlink(path)


async def test_a_reset_can_keep_the_files(harness: AgentHarness) -> None:
    await harness.bash("echo mine > file; sleep 7013 &")
    done = await harness.reset(keep=True)

    assert done["state"] == "ready", done
    assert (await harness.bash("cat file")).text == "mine\n"
    assert await _sleepers(harness) == []


async def test_an_old_epoch_is_refused_and_a_reset_asked_twice_is_one(bwrap: AgentHarness) -> None:
    await bwrap.reset()
    again = await bwrap.ask("reset")
    assert again["state"] == "ready"
    for epoch in (bwrap.epoch("0") - 1, bwrap.epoch("0") + 1, "2", None):
        with pytest.raises(AgentRefused) as refused:
            await bwrap.link.request({"op": "file_get", "slot": "0", "epoch": epoch, "path": "x"})
        assert refused.value.code == "stale_epoch"
    with pytest.raises(AgentRefused) as refused:
        await bwrap.link.request({"op": "reset", "slot": "0", "epoch": bwrap.epoch("0") - 1})
    assert refused.value.code == "stale_epoch"
    with pytest.raises(AgentRefused) as refused:
        await bwrap.link.request({"op": "file_get", "slot": "77", "epoch": 1, "path": "x"})
    assert refused.value.code == "unknown_slot"


async def test_narrow_takes_the_network_and_keeps_the_files(harness: AgentHarness) -> None:
    await harness.bash("echo mine > file; sleep 7014 &")
    if harness.mode != "bwrap":
        with pytest.raises(AgentRefused) as refused:
            await harness.ask("narrow", network=False)
        assert refused.value.code == "not_implemented"
        return
    before = await harness.bash("cat /proc/net/dev | wc -l")
    await harness.ask("narrow", network=False)
    after = await harness.bash("cat /proc/net/dev | wc -l; cat file")

    assert after.text == "3\nmine\n"
    assert int(before.text) >= 3
    assert await _sleepers(harness) == []
    assert (await harness.reset(network=False))["state"] == "ready"
    assert (await harness.bash("grep -c : /proc/net/dev")).text == "1\n"


async def test_the_end_of_init_breaks_its_slot_until_a_reset_if_that_can_prove_the_slot_clean(breakable: AgentHarness) -> None:
    harness, marker = breakable, f"7015.{secrets.randbelow(10**9)}"
    running = asyncio.create_task(harness.bash(f"exec sleep {marker}", call_id="c"))
    sleeper = await _process(["sleep", marker])
    init = sleeper.parent()
    assert init is not None
    init.kill()
    answer = await running

    assert answer.reason == "sandbox_lost"
    with pytest.raises(AgentRefused) as refused:
        await harness.bash("true")
    assert refused.value.code == "slot_unavailable"
    if harness.link.hello["isolation"] == "none" and lives(sleeper):
        # Nothing shows what an init without a pid namespace had started, so the slot does not count as clean.
        answered = await harness.reset()
        assert (answered["state"], "cannot be found" in str(answered["detail"])) == ("quarantined", True)
        sleeper.kill()
        return
    assert (await harness.reset())["state"] == "ready"
    assert (await harness.bash("echo back")).text == "back\n"
    assert not lives(sleeper)


async def _process(command: list[str]) -> psutil.Process:
    """The process that runs this command, as soon as there is one."""
    while True:
        for process in psutil.process_iter(["cmdline"]):
            if process.info["cmdline"] == command:
                return process
        await asyncio.sleep(0.02)


async def test_a_fork_bomb_affects_no_other_slot(make_harness: Maker) -> None:
    harness = await make_harness(limits={"processes": 60})
    bomb = asyncio.create_task(harness.bash("bomb() { bomb | bomb & }; bomb; sleep 100", timeout_s=1))
    other = await harness.bash("echo fine", "1")
    answer = await bomb

    assert other.text == "fine\n"
    assert answer.reason == "timeout"
    assert (await harness.reset())["state"] == "ready"
    assert (await harness.bash("echo again")).text == "again\n"


@pytest.mark.privileged
async def test_running_out_of_memory_is_proven(make_harness: Maker) -> None:
    harness = await make_harness(limits={"memory_mb": 64})
    if harness.link.hello["capabilities"]["limits"]["memory"] == "rlimit":
        answer = await harness.bash("exec head -c 200M /dev/zero | tail -c 150M | wc -c")
        assert answer.reason == "exit"
        return

    answer = await harness.bash("python3 -c 'x = bytearray(200 << 20); print(len(x))'")

    assert answer.reason == "oom"
    assert answer.metadata["evidence"]["oom_kills"] >= 1
    assert (await harness.bash("echo alive")).text == "alive\n"


async def test_a_wrong_token_gets_no_answer(bwrap: AgentHarness) -> None:
    with pytest.raises(LinkLost):
        await connect(AgentEndpoint(address=f"unix:{bwrap.folder}/agent.sock", token=TOKEN + "x"), 5)


async def test_shutdown_ends_every_process(own_harness: AgentHarness) -> None:
    await own_harness.bash("setsid sleep 7016 & sleep 7017 &")
    children = psutil.Process(own_harness.process.pid).children(recursive=True)
    await own_harness.link.request({"op": "shutdown"})
    await asyncio.to_thread(own_harness.process.wait, 20)

    assert own_harness.process.returncode == 0
    assert [child for child in children if lives(child)] == []


async def test_the_slots_of_a_killed_agent_end_with_it(own_harness: AgentHarness) -> None:
    await own_harness.bash("setsid sleep 7018 & sleep 7019 &")
    children = psutil.Process(own_harness.process.pid).children(recursive=True)
    assert children
    own_harness.process.send_signal(signal.SIGKILL)
    await asyncio.to_thread(own_harness.process.wait, 20)

    assert await wait_for_ends(children) == []


async def test_an_agent_without_connections_ends(make_harness: Maker) -> None:
    harness = await make_harness(alone_exit_s=0.5)
    await harness.link.close()

    assert await asyncio.to_thread(harness.process.wait, 20) == 0
