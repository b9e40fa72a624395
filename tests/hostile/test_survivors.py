"""Nothing outlives what it must not outlive: a call its deadline, anything its lease."""

from __future__ import annotations

import time
import uuid

import pytest

from tests.hostile.harness import Harness

DAEMON = 'import os; os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0); os.execv("/bin/sleep", ["sleep", "{seconds}"])'
ESCAPES = {
    "plain": "{sleep}",
    "ignores SIGTERM": "trap '' TERM; {sleep} & wait; {sleep}",
    "setsid": "setsid {sleep} & wait",
    "double fork": "( ( {sleep} & ) & ); sleep 60",
    "setsid and double fork": "( setsid bash -c '{sleep} & disown' & ); sleep 60",
    "nohup, scrubbed environment": "( env -i setsid nohup /usr/bin/python3 -c '" + DAEMON + "' >/dev/null 2>&1 & ); /bin/sleep 60",
    "closes its stdout": "exec >&- 2>&-; {sleep}",
    "stopped": "{sleep} & kill -STOP $!; wait",
    "a chain that forks for ever": "f() {{ sleep 0.05; ( f & ); }}; f; exec {sleep}",
}


@pytest.mark.parametrize("escape", ESCAPES)
def test_nothing_of_a_call_survives_its_timeout(harness: Harness, escape: str) -> None:
    lease = harness.acquire()
    seconds = f"8{uuid.uuid4().int % 10**8}"
    bystander = f"7{uuid.uuid4().int % 10**8}"
    assert harness.bash(lease, f"sleep {bystander} >/dev/null 2>&1 &")["success"]

    started = time.monotonic()
    result = harness.bash(lease, "echo before; " + ESCAPES[escape].format(sleep=f"sleep {seconds}", seconds=seconds), timeout_s=1)
    took_s = time.monotonic() - started

    assert result["reason"] == "timeout", result
    assert result["fault"] == "policy"
    assert result["output"].startswith("before\n")
    assert took_s < 1 + 3 + 1, f"back {took_s:.1f} s after the start, deadline 1 s"
    assert [p for p in harness.processes(seconds) if p.name() == "sleep"] == []
    assert harness.processes(bystander), "a background process of another call was killed"
    harness.still_sound()


@pytest.mark.parametrize("escape", ESCAPES)
def test_nothing_survives_a_release(harness: Harness, escape: str) -> None:
    lease = harness.acquire()
    seconds = f"8{uuid.uuid4().int % 10**8}"
    harness.bash(lease, f"({ESCAPES[escape].format(sleep=f'sleep {seconds}', seconds=seconds)}) >/dev/null 2>&1 & sleep 0.3")

    harness.release(lease)
    harness.settled()

    assert [p for p in harness.processes(seconds) if p.name() == "sleep"] == []
    harness.still_sound()


LEFTOVERS = {
    "files": "echo x > left; mkdir -p .hidden/deep; echo x > $(mktemp); echo x > .bashrc; echo x > .profile",
    "shared memory": "echo x > $(mktemp -p /dev/shm); truncate -s 4096 $(mktemp -p /dev/shm)",
    "System V IPC": 'python3 -c "import ctypes; c=ctypes.CDLL(None); print(c.shmget(0, 4242, 0o1666), c.semget(0, 42, 0o1666), c.msgget(0, 0o1666))"',
    "a 3,000-deep tree": "python3 -c \"import os\nfor n in range(3000): os.mkdir('d'); os.chdir('d')\"",
    "folders without permissions": "mkdir -p a/b/c; echo x > a/b/c/f; chmod 000 a/b/c a/b a; chmod 000 $(mktemp -d)",
    "names that are not text": "touch $'bad\\xff\\xfename' $'new\\nline' -- '-rf' ' '",
    "a symlink to a neighbour": "ln -s / root; ln -s /usr usr; ln -s . loop; mkfifo pipe",
    "sparse and immutable": "truncate -s 60M sparse; chmod 000 sparse; chattr +i sparse 2>/dev/null; true",
}


@pytest.mark.parametrize("leftover", LEFTOVERS)
def test_the_next_holder_finds_nothing(harness: Harness, leftover: str) -> None:
    harness.settled()
    leases = harness.every_slot()
    for lease in leases:
        result = harness.bash(lease, LEFTOVERS[leftover])
        assert result["success"], result
    harness.release(*leases)
    harness.settled()

    for lease in harness.every_slot():
        look = "ls -A; find /tmp /var/tmp /dev/shm -mindepth 1 -user $(id -u) 2>/dev/null; awk -v u=$(id -u) '$5 == u || $8 == u' /proc/sysvipc/*"
        found = harness.bash(lease, look)
        assert found["output"] == "", found
        assert found["success"], found
    harness.still_sound()


@pytest.mark.timeout(300)
def test_a_million_files_are_gone_for_the_next_holder_at_once(harness: Harness, file_count: int) -> None:
    leases = harness.every_slot()
    # Hard links: as many names to delete, for a third of the time to make them.
    fill = " os.mkdir(str(d)); os.chdir(str(d)); os.mknod('f')\n for n in range(9999): os.link('f', str(n))\n os.chdir('..')\n"
    script = f"import os\nfor d in range({file_count // 10_000}):\n{fill}"
    assert harness.python(leases[0], script, timeout_s=300)["success"]

    started = time.monotonic()
    harness.release(*leases)
    harness.settled()
    took_s = time.monotonic() - started

    assert took_s < 10, f"the slot was away for {took_s:.1f} s: deleting is to happen behind"
    assert all(harness.bash(lease, "ls -A")["output"] == "" for lease in harness.every_slot())
    harness.still_sound()


def test_a_background_process_lives_until_release_and_the_call_returns_at_once(harness: Harness) -> None:
    lease = harness.acquire()
    marker = f"6{uuid.uuid4().int % 10**8}"

    started = time.monotonic()
    result = harness.bash(lease, f"(while :; do echo still here; sleep 0.01; done) & sleep {marker} & echo done")

    assert result["success"], result
    assert "done" in result["output"]
    assert time.monotonic() - started < 5
    assert harness.bash(lease, "sleep 0.5; jobs; ps ax 2>/dev/null | grep -c '[s]till' >/dev/null; echo ok")["output"].endswith("ok\n")
    assert harness.processes(marker)
    harness.release(lease)
    harness.settled()
    assert harness.processes(marker) == []
