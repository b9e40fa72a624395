"""What a slot does to the control channel of its sessions, and to the shells of others."""

from __future__ import annotations

import uuid
from typing import Any

from tests.hostile.hostile_harness import HostileHarness, in_one_mode

#: Writes to every descriptor of every process of the user that it can open, and to those that it has inherited.
FORGE = r"""
import os
lines = b"".join(b"%d 0\n" % number for number in range(50))
for fd in range(3, 256):
    try:
        os.set_blocking(fd, False)
        os.write(fd, lines)
    except OSError:
        pass
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        continue
    for name in names:
        try:
            target = os.readlink(f"/proc/{pid}/fd/{name}")
            if target.startswith("socket:"):
                os.write(os.open(f"/proc/{pid}/fd/{name}", os.O_RDWR | os.O_NONBLOCK), lines)
                print("opened", target)
        except OSError:
            pass
"""


def _run(harness: HostileHarness, lease: dict[str, Any], command: str, session: str = "s", **options: Any) -> dict[str, Any]:
    return harness.call(lease, "bash_stateful", {"command": command, "session": session}, **{"timeout_s": 60, **options})


def test_no_program_can_forge_how_a_command_ends(harness: HostileHarness) -> None:
    lease = harness.acquire()
    assert _run(harness, lease, "x=5")["success"]
    harness.call(lease, "write_file", {"path": "forge.py", "content": FORGE})

    forged = _run(harness, lease, "/usr/bin/python3 -I forge.py; (printf '4 0\\n' >&0) 2>&1; echo real; (exit 9)")

    assert (forged["reason"], forged["exit_code"], forged["metadata"]["session"]) == ("exit", 9, "kept")
    assert "opened" not in forged["output"]
    # What the program has written to the pipe of standard error comes before or after it: the agent reads two pipes in any order.
    assert "real" in forged["output"].splitlines(), forged["output"]
    assert _run(harness, lease, "echo $x")["output"] == "5\n"
    harness.still_sound()


@in_one_mode
def test_a_shell_that_forges_reports_of_its_own_only_ends_its_own_call(harness: HostileHarness) -> None:
    lease = harness.acquire()
    fd = _run(harness, lease, "for fd in /proc/$$/fd/*; do case $(readlink $fd) in socket:*) echo ${fd##*/};; esac; done")["output"].split()
    forge = "for fd in {}; do for n in {{1..40}}; do printf '%d 0\\n' $n >&$fd; done; done; (exit 9)".format(" ".join(fd))

    early = _run(harness, lease, forge)
    after = [_run(harness, lease, f"echo {number}") for number in range(3)]
    flood = _run(harness, lease, "while :; do printf 'nonsense\\n' >&{}; done".format((fd or ["10"])[0]), timeout_s=5)

    assert early["reason"] == "exit"
    assert [result["output"] for result in after][-1] == "2\n"
    assert flood["reason"] in ("exit", "timeout")
    assert flood["metadata"]["session"] in ("kept", "restarted")
    assert _run(harness, lease, "echo works", session="t")["output"] == "works\n"
    harness.still_sound()


def test_a_thousand_jobs_and_killed_shells_leave_nothing(harness: HostileHarness) -> None:
    mine, other = harness.acquire(), harness.acquire()
    assert _run(harness, other, "x=theirs; sleep 600 &")["success"]
    marker = f"41{uuid.uuid4().int % 10**9}"

    assert _run(harness, mine, f"for n in {{1..80}}; do setsid sleep {marker} & done; trap '' TERM HUP INT", session="a")["success"]
    over = _run(harness, mine, f"for n in {{1..1000}}; do setsid sleep {marker} & done", session="b", timeout_s=2)  # bash waits for room to fork
    assert over["reason"] in ("timeout", "resource_limit"), over
    assert over["duration_s"] < 10, over
    killed = _run(harness, mine, "kill -9 -1; kill -9 $$", session="c")
    assert killed["metadata"]["session"] == "restarted"
    assert killed["exit_code"] == 137

    theirs = _run(harness, other, "echo $x; jobs -r | wc -l")
    assert (theirs["output"], theirs["metadata"]["session"]) == ("theirs\n1\n", "kept")
    harness.release(mine)
    harness.settled()
    assert harness.processes(marker) == []
    assert _run(harness, harness.acquire(), "echo x=$x", session="a")["output"] == "x=\n"
    harness.still_sound()
