"""What commands come to, and what limits do to them: the command's own doing is never ours, and what is not proven is not said."""

from __future__ import annotations

import time

import pytest

from tests.integration.attribution.pool_harness import HOG, TAKE_ALL_PROCESSES, PoolHarness, blame, fault_of_late, proof

OOM = "the slot's memory limit was reached"


@pytest.mark.parametrize(
    ("command", "code", "rests_on"),
    [
        ("exit 7", 7, {"exited": 7}),
        ("kill -TERM $$", 143, {"signal": "SIGTERM"}),
        ("kill -SEGV $$", 139, {"signal": "SIGSEGV"}),
        ("kill -KILL $$", 137, {"signal": "SIGKILL"}),
        ("bash -c 'kill -SEGV $$'; exit $?", 139, {"exited": 139}),
        ("echo Killed; exit 137", 137, {"exited": 137}),
    ],
)
def test_a_command_that_ends_by_itself_is_an_exit_however_it_looks(harness: PoolHarness, command: str, code: int, rests_on: dict[str, object]) -> None:
    (lease,) = harness.acquire()

    result = harness.bash(lease, command)

    assert blame(result) == ("exit", "none", code)
    assert proof(result) == rests_on
    assert blame(harness.bash(lease, "true")) == ("exit", "none", 0)


def test_what_is_deaf_and_forked_twice_is_killed_in_time_and_that_is_the_policys(harness: PoolHarness) -> None:
    (lease,) = harness.acquire()
    stubborn = "trap '' TERM; echo part; (setsid bash -c 'trap \"\" TERM; sleep 8801 & sleep 8801' &) & while :; do sleep 0.1; done"
    before = time.monotonic()
    late, silent = harness.begin_bash(lease, stubborn, timeout_s=1), harness.begin_bash(lease, stubborn, no_output_timeout_s=1)
    (late_result,), (silent_result,) = late.result(), silent.result()

    assert time.monotonic() - before < 1 + 3 + 2
    assert blame(late_result) == ("timeout", fault_of_late(late_result), None)
    assert blame(silent_result) == ("no_output_timeout", fault_of_late(silent_result), None)
    assert "its timeout of 1 s" in late_result["error"]
    assert "wrote nothing for 1 s" in silent_result["error"]
    for result in (late_result, silent_result):
        assert result["output"] == "part\n"
        assert proof(result)["signal"] == "SIGKILL"
        assert proof(result)["after_s"] >= 1
    assert harness.bash(lease, "pgrep -f 'sleep 880[1]'")["output"] == ""


@pytest.mark.privileged
@pytest.mark.parametrize(
    ("command", "code", "how"),
    [
        (f"exec {HOG}", 137, {"signal": "SIGKILL"}),
        ('x=$(head -c 300M /dev/zero | tr "\\0" x); echo ${#x}', 137, {"signal": "SIGKILL"}),
        (f"{HOG}; exit 3", 3, {"exited": 3}),
    ],
    ids=["itself", "shell", "child"],
)
def test_a_call_that_takes_more_memory_than_its_slot_may_is_oom(harness: PoolHarness, command: str, code: int, how: dict[str, object]) -> None:
    lease, neighbour = harness.acquire(2)
    beside = harness.begin_bash(neighbour, "until [ -e go ]; do sleep 0.02; done; echo fine")

    result = harness.bash(lease, command)

    assert blame(result) == ("oom", "policy", code)
    assert OOM in result["error"]
    assert proof(result) == {**how, "oom_kills": 1}
    assert harness.bash(lease, "echo next")["output"] == "next\n"
    harness.bash(neighbour, "touch go")
    (other,) = beside.result()
    assert (blame(other), other["output"], other["metadata"]) == (("exit", "none", 0), "fine\n", {})


@pytest.mark.privileged
def test_a_command_that_survives_a_kill_in_its_midst_has_ended_by_itself(harness: PoolHarness) -> None:
    (lease,) = harness.acquire()

    result = harness.bash(lease, f"({HOG}) 2> /dev/null; echo went on")

    assert blame(result) == ("exit", "none", 0)
    assert result["success"]
    assert proof(result) == {"oom_kills": 1}


@pytest.mark.privileged
def test_what_an_earlier_call_left_running_is_not_pinned_on_the_one_that_runs(harness: PoolHarness) -> None:
    (lease,) = harness.acquire()
    hog = f"nohup bash -c 'until [ -e go ]; do sleep 0.02; done; exec {HOG.replace(chr(39), chr(34))}; true' > /dev/null 2>&1; touch gone"
    for code in (0, 3):
        assert harness.bash(lease, f"rm -f go gone; {{ {hog}; }} &")["success"]
        result = harness.bash(lease, f"touch go; until [ -e gone ]; do sleep 0.02; done; exit {code}")

        assert blame(result) == ("exit", "none", code), result
        assert proof(result)["oom_kills"] == 1
        assert proof(result).get("ambiguous", False) is (code != 0)


FORKER = """
import os, signal
try:
    while True:
        if os.fork() == 0:
            signal.pause()
except BlockingIOError:
    os._exit(9)
"""


@pytest.mark.privileged
def test_a_call_that_starts_more_processes_than_its_slot_may_is_a_resource_limit(harness: PoolHarness) -> None:
    (lease,) = harness.acquire()

    result = harness.python(lease, FORKER)

    assert blame(result) == ("resource_limit", "policy", 9)
    assert "limit of 60 processes" in result["error"]
    assert proof(result)["exited"] == 9
    assert proof(result)["processes_refused"] >= 1


def test_a_slot_full_of_processes_starts_nothing_and_that_is_its_own_doing(harness: PoolHarness) -> None:
    lease, neighbour = harness.acquire(2)
    assert harness.python(lease, TAKE_ALL_PROCESSES)["success"]
    harness.until(lambda: harness.bash(lease, "true")["reason"] == "resource_limit")

    for tool, args in (("bash", {"command": "true"}), ("write_file", {"path": "f", "content": "x"}), ("list_files", {})):
        result = harness.call(lease, tool, args)
        assert blame(result) == ("resource_limit", "policy", None)
        assert "limit of 60 processes" in result["error"]
        assert proof(result)["errno"] == "EAGAIN"
        assert proof(result)["processes"] >= 45
        assert harness.call(neighbour, tool, args)["success"]
    refused = harness.ask("PUT", f"/v1/leases/{lease['lease_id']}/files", params={"path": "f"}, content=b"x")
    assert (refused["code"], refused["errno"]) == ("file_error", "EAGAIN")

    harness.release_all()
    assert harness.bash(harness.acquire()[0], "echo clean")["output"] == "clean\n"


def test_a_file_past_its_limit_is_a_resource_limit_where_the_signal_proves_it(harness: PoolHarness) -> None:
    (lease,) = harness.acquire()

    proven = harness.bash(lease, "exec head -c 20M /dev/zero > big")
    unproven = harness.bash(lease, "head -c 20M /dev/zero > big")

    assert blame(proven) == ("resource_limit", "policy", 153)
    assert "limit of 8 MiB" in proven["error"]
    assert proof(proven) == {"signal": "SIGXFSZ"}
    assert blame(unproven) == ("exit", "none", 153)
    assert proof(unproven) == {"exited": 153, "limits_near": ["file_size"]}
