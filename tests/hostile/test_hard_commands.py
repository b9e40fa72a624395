"""Commands that break other people's services: each gets a clear result, in time, and nothing else suffers."""

from __future__ import annotations

import base64
import json
import socket
import statistics
import time
import uuid

import httpx
import psutil
import pytest

from tests.hostile.hostile_harness import HostileHarness, in_one_mode, timeout_fault


def bystander_works(harness: HostileHarness, lease: dict) -> None:
    """A second slot answers as if nothing were going on."""
    started = time.monotonic()
    assert harness.bash(lease, "echo fine")["output"] == "fine\n"
    assert time.monotonic() - started < 5


@in_one_mode
def test_a_nul_in_a_command_is_named(harness: HostileHarness) -> None:
    result = harness.bash(harness.acquire(), "echo a\0b")

    assert (result["reason"], result["fault"]) == ("invalid_args", "policy")
    assert "command" in result["error"]
    assert "NUL" in result["error"]


@in_one_mode
def test_a_900_kb_command_runs_and_a_2_mb_one_is_refused(harness: HostileHarness) -> None:
    lease = harness.acquire()
    filler = "# " + "x" * 70 + "\n"

    result = harness.bash(lease, "exec 3>&1\n" + filler * (900_000 // len(filler)) + "echo the end; (exit 3)")
    refused = harness.bash(lease, filler * (2_000_000 // len(filler)))

    assert (result["reason"], result["exit_code"], result["output"]) == ("exit", 3, "the end\n"), {**result, "output": result["output"][:200]}
    assert (refused["reason"], refused["fault"]) == ("invalid_args", "policy")
    assert "command" in refused["error"]
    assert harness.bash(lease, "echo $(( 6 * 7 ))")["output"] == "42\n"


@in_one_mode
def test_an_absurd_timeout_is_named(harness: HostileHarness) -> None:
    lease = harness.acquire()

    for timeout_s in (0, -1, 1e18, "soon", True, 3601):
        result = harness.call(lease, "bash", {"command": "echo x"}, timeout_s=timeout_s)
        assert (result["reason"], result["fault"], result["output"]) == ("invalid_args", "infra", ""), timeout_s
        assert "timeout_s" in result["error"], timeout_s


# Six times the growth that the agent is allowed, and far above the output limit and every pipe on the way.
FLOOD_BYTES = 200_000_000


@in_one_mode
def test_a_flood_of_output_costs_no_memory(harness: HostileHarness) -> None:
    lease, other = harness.acquire(), harness.acquire()
    agents = [psutil.Process(pid) for pid in harness.agent_pids()]
    before = max(agent.memory_info().rss for agent in agents)

    result = harness.bash(lease, f"head -c {FLOOD_BYTES} /dev/zero | tr '\\0' 'y'; echo; echo end", timeout_s=120)

    after = max(agent.memory_info().rss for agent in agents)
    assert result["reason"] == "exit", {**result, "output": result["output"][:100]}
    assert result["output_bytes"] == FLOOD_BYTES + len("\nend\n")
    assert result["truncated"]
    assert len(result["output"]) < 51_000
    assert result["output"].startswith("yyy")
    assert result["output"].endswith("y\nend\n")
    assert after - before < 32 << 20, f"the agent grew by {(after - before) >> 20} MiB"
    bystander_works(harness, other)


@in_one_mode
def test_silence_ends_at_its_own_deadline(harness: HostileHarness) -> None:
    started = time.monotonic()

    result = harness.bash(harness.acquire(), "echo loud; sleep 120", timeout_s=60, no_output_timeout_s=0.5)

    assert (result["reason"], result["fault"], result["exit_code"], result["output"]) == ("no_output_timeout", timeout_fault(result), None, "loud\n")
    assert time.monotonic() - started < 5


@in_one_mode
def test_a_command_that_closes_its_stdout_is_waited_for(harness: HostileHarness) -> None:
    result = harness.bash(harness.acquire(), "echo first; exec >&- 2>&-; sleep 0.5; exit 9")

    assert (result["reason"], result["exit_code"], result["output"]) == ("exit", 9, "first\n")
    assert result["duration_s"] >= 0.5


@in_one_mode
def test_bytes_come_back_exactly_or_replaced(harness: HostileHarness) -> None:
    lease = harness.acquire()
    every = bytes(range(256)) * 4

    exact = harness.bash(lease, "python3 -c 'import sys; sys.stdout.buffer.write(bytes(range(256)) * 4)'", encoding="base64")
    replaced = harness.bash(lease, "printf 'a\\xff\\x00b'")

    assert base64.b64decode(exact["output"]) == every
    assert replaced["output"] == "a�\0b"
    assert replaced["output_bytes"] == 4


def test_signals_of_its_own_making(harness: HostileHarness) -> None:
    lease = harness.acquire()

    assert harness.bash(lease, "kill -SEGV $$")["exit_code"] == 139
    assert harness.bash(lease, "kill -KILL $$")["exit_code"] == 137
    assert harness.bash(lease, "head -c 100000 /dev/zero | head -c 1 | wc -c; exit ${PIPESTATUS[0]}")["exit_code"] in (0, 141)


@in_one_mode
def test_a_line_without_an_end_and_no_output_at_all(harness: HostileHarness) -> None:
    lease = harness.acquire()

    long = harness.bash(lease, "head -c 10000000 /dev/zero | tr '\\0' x")
    none = harness.bash(lease, "true")

    assert (long["reason"], long["output_bytes"], long["truncated"]) == ("exit", 10_000_000, True)
    assert (none["output"], none["success"]) == ("", True)


def test_a_fork_bomb_hurts_nobody_else_and_is_gone_with_the_lease(harness: HostileHarness) -> None:
    bomber, other = harness.acquire(), harness.acquire()

    result = harness.bash(bomber, ":(){ :|:& };: ; sleep 0.5; echo over", timeout_s=2)

    assert result["reason"] in ("exit", "resource_limit", "timeout"), result
    bystander_works(harness, other)
    harness.release(bomber, other)
    harness.settled()
    assert [harness.bash(lease, "echo clean")["output"] for lease in harness.every_slot()] == ["clean\n"] * 3
    harness.still_sound()


def test_a_file_beyond_the_limit_is_a_resource_limit_where_that_is_proven(harness: HostileHarness) -> None:
    lease = harness.acquire()

    proven = harness.bash(lease, "exec head -c 100M /dev/zero > big")
    unproven = harness.bash(lease, "head -c 100M /dev/zero > big; exit 7")

    assert (proven["reason"], proven["fault"]) == ("resource_limit", "policy"), proven
    assert proven["metadata"]["evidence"] == {"signal": "SIGXFSZ"}
    assert (unproven["reason"], unproven["exit_code"]) == ("exit", 7)


@in_one_mode
def test_a_flood_in_the_background_does_not_stop_the_rest(harness: HostileHarness) -> None:
    flooder, other = harness.acquire(), harness.acquire()

    assert harness.bash(flooder, "yes & yes & yes & echo started")["reason"] == "exit"

    laps = []
    for _ in range(9):
        started = time.monotonic()
        assert harness.bash(other, "true")["success"]
        laps.append(time.monotonic() - started)
    assert statistics.median(laps) < 1.0
    agent = psutil.Process(harness.agent_pids()[0])
    agent.cpu_percent()
    time.sleep(1.0)  # a share of the processor is measured over time
    assert agent.cpu_percent() < 50, "draining a flood eats the agent"


def raw_request(harness: HostileHarness, path: str, body: dict, cut: int | None = None) -> socket.socket:
    """Send a request, or the first bytes of one, on a socket of its own."""
    payload = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {harness.token}\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    )
    connection = socket.create_connection(("127.0.0.1", harness.port))
    connection.sendall((head.encode() + payload)[:cut])
    return connection


@in_one_mode
def test_clients_that_hang_up_leave_nothing_behind(harness: HostileHarness) -> None:
    leases = harness.every_slot()
    queued = [raw_request(harness, "/v1/acquire", {"wait_s": 30}) for _ in range(5)]
    deadline = time.monotonic() + 5
    while harness.pool()["queue"] < 5:
        assert time.monotonic() < deadline, harness.pool()
    sending = [raw_request(harness, "/v1/exec-batch", {"calls": []}, cut=150) for _ in range(5)]
    marker = f"f-{uuid.uuid4().hex}"
    call = {"lease_id": leases[0]["lease_id"], "tool": "bash", "args": {"command": f"sleep 0.5; echo ran > {marker}; yes | head -c 5000000"}}
    reading = raw_request(harness, "/v1/exec-batch", {"calls": [call, {**call, "args": {"command": f"echo second >> {marker}"}}]})

    for connection in (*queued, *sending, reading):
        connection.close()

    deadline = time.monotonic() + 10
    while harness.pool()["queue"]:
        assert time.monotonic() < deadline, "a waiter that hung up is still queued"
    while harness.bash(leases[0], f"cat {marker}")["output"] != "ran\nsecond\n":
        assert time.monotonic() < deadline, "the calls of a caller that hung up were not run"
    harness.release(*leases)
    view = harness.settled()
    assert view["slots"]["ready"] == len(leases), "a slot went to somebody who is not there"
    harness.still_sound()


@in_one_mode
def test_an_unread_stdin_and_a_closed_one(harness: HostileHarness) -> None:
    lease = harness.acquire()

    assert harness.call(lease, "bash", {"command": "exec <&-; sleep 0.1; echo ok", "stdin": "x" * 500_000})["output"] == "ok\n"
    assert harness.call(lease, "bash", {"command": "cat | wc -c", "stdin": "x" * 500_000})["output"] == "500000\n"
    assert harness.bash(lease, "cat | wc -c")["output"] == "0\n"


def test_a_workspace_taken_away_under_a_command_is_not_our_fault(harness: HostileHarness) -> None:
    lease = harness.acquire()

    harness.bash(lease, "rm -rf /workspace /workspace/.* 2>/dev/null; cd /; rmdir /workspace 2>/dev/null; chmod 000 $HOME")
    result = harness.bash(lease, "echo still")

    assert result["reason"] in ("exit", "tool_error"), result
    harness.release(lease)
    harness.settled()
    harness.still_sound()
    assert harness.bash(harness.acquire(), "touch x && echo fine")["output"] == "fine\n"


def wait_for_crowd(service: psutil.Process) -> None:
    """Wait until a service has many connections, and hardly more of them half a second later: when it is full, it replaces the oldest by new ones."""
    deadline, before, count = time.monotonic() + 60, 0, 0
    while count < 1000 or count > 1.05 * before:
        assert time.monotonic() < deadline, f"{count} connections and still no crowd"
        time.sleep(0.5)
        before, count = count, service.num_fds()


@in_one_mode
@pytest.mark.timeout(150)
def test_a_slot_cannot_crowd_everybody_else_out_of_the_service(harness: HostileHarness) -> None:
    crowder, other = harness.acquire(), harness.acquire()
    crowd = f"""
import os, socket, time
for _ in range(3): os.fork()
held = []
while len(held) < 4000:
    try:
        held.append(socket.create_connection(("127.0.0.1", {harness.port}), 5)); held[-1].send(b"G")
    except OSError: break
time.sleep(60)
"""
    crowding = {"command": "cat > crowd.py; setsid python3 crowd.py > /dev/null 2>&1 &", "stdin": crowd}
    assert harness.call(crowder, "bash", crowding)["reason"] == "exit"
    wait_for_crowd(psutil.Process(harness.pid))

    for _ in range(5):
        with httpx.Client(base_url=harness.url, headers=harness.client.headers, timeout=10) as newcomer:
            assert newcomer.get("/v1/pools/default").status_code == 200
        assert harness.bash(other, "echo fine")["output"] == "fine\n"
