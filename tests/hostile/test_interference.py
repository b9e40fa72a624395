"""A slot that stops or hides what acts for us in it gains nothing: its calls still end in time, its release still ends everything, its neighbours go on."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.hostile.hostile_harness import HostileHarness, timeout_fault

# `kill(-1)` reaches whatever it may signal but itself, so in the end there is nothing else of the slot that moves.
STOPPER = """
import os, signal, time
while not os.path.exists("go"): time.sleep(0.01)
while True:
    try: os.kill(-1, signal.SIGSTOP)
    except ProcessLookupError: pass
"""


def _stop_everything(harness: HostileHarness, lease: dict) -> str:
    """Start a process that stops all others of its slot, and return a marker in its command line."""
    marker, witness = f"stopper-{uuid.uuid4().hex}", f"9{uuid.uuid4().int % 10**8}"
    command = f"sleep {witness} >/dev/null 2>&1 & setsid nohup /usr/bin/python3 -c '{STOPPER}' {marker} >/dev/null 2>&1 </dev/null &"
    assert harness.bash(lease, command)["success"]
    # It begins only now that the call is over. Nothing of the slot could say that it has begun, but another process of the slot is then stopped.
    sleeping, stopper = _wait_for_process(harness, "sleep", witness), _wait_for_process(harness, "python3", marker)
    Path(f"/proc/{stopper.pid}/cwd/go").touch()
    deadline = time.monotonic() + 30
    # A call that comes as soon as that can slip through. Once the loop has run for some time, it hardly can.
    while sleeping.status() != psutil.STATUS_STOPPED or sum(stopper.cpu_times()[:2]) < 0.2:
        assert time.monotonic() < deadline, "it stops nothing"
        time.sleep(0.01)
    return marker


def _wait_for_process(harness: HostileHarness, name: str, marker: str) -> psutil.Process:
    """Wait until a program runs with a marker in its command line. Before that, the shell that starts it has the marker as well."""
    deadline = time.monotonic() + 30
    while True:
        for process in harness.processes(marker):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.name() == name:
                    return process
        assert time.monotonic() < deadline, f"{name} does not run"
        time.sleep(0.01)


def test_a_slot_that_stops_every_process_is_released_all_the_same(harness: HostileHarness) -> None:
    leases = [harness.acquire(), harness.acquire()]
    marker = _stop_everything(harness, leases[0])

    started = time.monotonic()
    harness.release(leases[0])
    harness.settled()

    assert time.monotonic() - started < 10
    assert harness.processes(marker) == []
    assert harness.bash(leases[1], "echo fine")["output"] == "fine\n"
    harness.still_sound()


def test_calls_that_are_stopped_end_in_time_and_it_is_their_own_fault(harness: HostileHarness) -> None:
    lease = harness.acquire()
    assert harness.bash(lease, "echo x > to-read")["success"]
    _stop_everything(harness, lease)
    calls = {"write_file": {"path": "f", "content": "x"}, "bash": {"command": "echo hi"}, "read_file": {"path": "to-read"}}
    # In the mode `uid`, our own processes are of another user than the slot, which cannot stop them.
    timeouts_s = {tool: 30 if harness.mode == "uid" and tool != "bash" else 1 for tool in calls}

    def timed_call(tool: str) -> tuple[dict, float]:
        started = time.monotonic()
        return harness.call(lease, tool, calls[tool], timeout_s=timeouts_s[tool]), time.monotonic() - started

    with ThreadPoolExecutor() as threads:  # one request for each call, because those of one request run one after another
        results = dict(zip(calls, threads.map(timed_call, calls), strict=True))

    for tool, (result, took_s) in results.items():
        assert took_s < timeouts_s[tool] + 3 + 1, (tool, result)
        assert result["success"] or result["fault"] == timeout_fault(result), (tool, result)
        if harness.mode == "uid" and tool != "bash":
            assert result["success"], ("our own process was stopped", tool, result)

    harness.release(lease)
    harness.settled()
    harness.still_sound()


def test_a_file_is_put_into_a_slot_that_stops_everything_it_can(harness: HostileHarness) -> None:
    if harness.mode != "uid":
        pytest.skip("the slot and what writes its files are one user here: it stops its own upload, until nothing has moved for a minute")
    lease = harness.acquire()
    _stop_everything(harness, lease)

    answer = harness.client.put(f"/v1/leases/{lease['lease_id']}/files", params={"path": "put"}, content=os.urandom(3_000_000))

    assert answer.status_code in (200, 201, 204), answer.text


DEEP = """
import os
os.mkdir("/tmp/{name}"); os.chmod("/tmp/{name}", 0o777); os.chdir("/tmp/{name}")
for _ in range({depth}):
    os.mkdir("d"); os.chmod("d", 0o777); os.chdir("d")
"""


def test_a_tree_deeper_than_there_are_descriptors_quarantines_nobody(harness: HostileHarness) -> None:
    digger, neighbour = harness.acquire(), harness.acquire()
    name = f"deep-{uuid.uuid4().hex}"
    depth = 21_000 if harness.mode == "uid" else 1_000  # elsewhere it is in the slot's own folder, where the agent looks at nothing
    assert harness.python(digger, DEEP.format(name=name, depth=depth), timeout_s=120)["success"]

    harness.release(neighbour)
    harness.settled()
    harness.still_sound()
    harness.release(digger)
    harness.settled()

    harness.still_sound()
    assert not Path("/tmp", name).exists()


def test_what_a_neighbour_puts_into_an_open_folder_is_only_its_own_trouble(harness: HostileHarness) -> None:
    victim, neighbour = harness.acquire(), harness.acquire()
    name = f"open-{uuid.uuid4().hex}"
    made = harness.bash(victim, f"mkdir -p /tmp/{name}/below && chmod 755 /tmp/{name} && chmod 777 /tmp/{name}/below")
    assert made["success"], made
    harness.bash(neighbour, f"echo mine > /tmp/{name}/below/left; chmod 600 /tmp/{name}/below/left")

    harness.release(neighbour)
    harness.settled()
    harness.still_sound()
    seen = harness.bash(victim, f"ls -A /tmp/{name}/below")
    harness.release(victim)
    harness.settled()

    assert seen["output"] == ""
    harness.still_sound()
    assert not Path("/tmp", name).exists()


QUEUE = """
import ctypes, os
librt = ctypes.CDLL(None, use_errno=True)
if not hasattr(librt, "mq_open"): librt = ctypes.CDLL("librt.so.1", use_errno=True)
os.umask(0)
queue = librt.mq_open(b"/{name}", {flags}, 0o666, None)
print("open" if queue >= 0 else "none")
"""


def test_a_message_queue_ends_with_its_lease(harness: HostileHarness) -> None:
    name = f"q{uuid.uuid4().hex}"
    leases = harness.every_slot()
    harness.python(leases[0], QUEUE.format(name=name, flags="os.O_CREAT | os.O_RDWR"))
    harness.release(*leases)
    harness.settled()

    found = [harness.python(lease, QUEUE.format(name=name, flags="os.O_RDWR"))["output"] for lease in harness.every_slot()]

    assert found == ["none\n"] * 3


def test_what_was_left_when_the_agent_was_killed_is_not_there_for_the_next(harness: HostileHarness) -> None:
    name = f"left-{uuid.uuid4().hex}"
    segment = "import ctypes; print(ctypes.CDLL(None).shmget(0x5ea1, 4096, 0o1600))"
    for lease in harness.every_slot():
        left = harness.bash(lease, f"umask 077; echo secret > /tmp/{name}-$(id -u); echo secret > /dev/shm/{name}-$(id -u); python3 -c '{segment}'")
        assert left["success"], left
    agents = harness.agent_pids()
    for pid in agents:
        os.kill(pid, 9)
    harness.held.clear()
    deadline = time.monotonic() + 60
    while set(harness.agent_pids()) & set(agents) or not harness.agent_pids() or harness.pool()["slots"]["ready"] < 3:
        assert time.monotonic() < deadline, harness.pool()
        time.sleep(0.1)

    for lease in harness.every_slot():
        seen = harness.bash(lease, f"cat /tmp/{name}-* /dev/shm/{name}-*; awk -v u=$(id -u) '$5 == u || $8 == u' /proc/sysvipc/*")
        assert "secret" not in seen["output"], seen
        assert "5ea1" not in seen["output"], seen
    assert list(Path("/tmp").glob(f"{name}-*")) == []
