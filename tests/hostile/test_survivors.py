"""Nothing outlives what it must not outlive: a call its deadline, anything its lease."""

from __future__ import annotations

import os
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import psutil

from tests.hostile.hostile_harness import HostileHarness, in_one_mode, timeout_fault

DAEMON = 'import os; os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0); os.execv("/bin/sleep", ["sleep", "{seconds}"])'
# One escape for each slot of the sandbox. The groups run at the same time, each slot with one escape of each group, because the tests mostly wait for them.
ESCAPES = (
    {
        "plain": "{sleep}",
        "ignores SIGTERM": "trap '' TERM; {sleep} & wait; {sleep}",
        "stopped": "{sleep} & kill -STOP $!; wait",
    },
    {
        "setsid": "setsid {sleep} & wait",
        "double fork": "( ( {sleep} & ) & ); sleep 60",
        "setsid and double fork": "( setsid bash -c '{sleep} & disown' & ); sleep 60",
    },
    {
        "nohup, scrubbed environment": "( env -i setsid nohup /usr/bin/python3 -c '" + DAEMON + "' >/dev/null 2>&1 & ); /bin/sleep 60",
        "closes its stdout": "exec >&- 2>&-; {sleep}",
        "a chain that forks for ever": "f() {{ sleep 0.05; ( f & ); }}; f; exec {sleep}",
    },
)


@dataclass(frozen=True)
class Escape:
    """One command that tries to outlive its call or its lease.

    Args:
        name: what it does.
        lease: the lease of its slot.
        command: the command.
        seconds: a number that only its processes have in their arguments.
    """

    name: str
    lease: dict[str, Any]
    command: str
    seconds: str

    def sleeping(self, harness: HostileHarness) -> list[psutil.Process]:
        """Return those of its processes that sleep."""
        return [process for process in harness.processes(self.seconds) if process.name() == "sleep"]


def escapes_of(leases: list[dict[str, Any]], group: dict[str, str]) -> list[Escape]:
    """Make the escapes of a group, each in a slot of its own."""
    numbers = [f"8{uuid.uuid4().int % 10**8}" for _ in group]
    texts = [text.format(sleep=f"sleep {number}", seconds=number) for text, number in zip(group.values(), numbers, strict=True)]
    return [Escape(*parts) for parts in zip(group, leases, texts, numbers, strict=True)]


def run_groups(harness: HostileHarness, groups: list[list[Escape]], template: str, **options: Any) -> list[list[dict[str, Any]]]:
    """Run all escapes at the same time, and return their results. The calls of one request for one slot would run one after another.

    Args:
        harness: where.
        groups: the escapes, each slot's at most once in each group.
        template: a command, with `{}` where the command of the escape belongs.
        options: of every call.
    """

    def run(escapes: list[Escape]) -> list[dict[str, Any]]:
        return harness.batch(
            *({"lease_id": it.lease["lease_id"], "tool": "bash", "args": {"command": template.format(it.command)}, **options} for it in escapes)
        )

    with ThreadPoolExecutor(len(groups)) as threads:
        return list(threads.map(run, groups))


def test_nothing_of_a_call_survives_its_timeout(harness: HostileHarness) -> None:
    leases = harness.every_slot()
    groups = [escapes_of(leases, group) for group in ESCAPES]
    bystanders = [f"7{uuid.uuid4().int % 10**8}" for _ in leases]
    for lease, bystander in zip(leases, bystanders, strict=True):
        assert harness.bash(lease, f"sleep {bystander} >/dev/null 2>&1 &")["success"]

    started = time.monotonic()
    results = run_groups(harness, groups, "echo before; {}", timeout_s=1)
    took_s = time.monotonic() - started

    assert took_s < 1 + 3 + 1, f"back {took_s:.1f} s after the start, deadline 1 s"
    for escape, result in zip(chain.from_iterable(groups), chain.from_iterable(results), strict=True):
        assert result["reason"] == "timeout", (escape.name, result)
        assert result["fault"] == timeout_fault(result), (escape.name, result)
        assert result["output"].startswith("before\n"), escape.name
        assert escape.sleeping(harness) == [], escape.name
    assert all(harness.processes(bystander) for bystander in bystanders), "a background process of another call was killed"
    harness.still_sound()


def test_nothing_survives_a_release(harness: HostileHarness) -> None:
    leases = harness.every_slot()
    groups = [escapes_of(leases, group) for group in ESCAPES]
    run_groups(harness, groups, "({}) >/dev/null 2>&1 & sleep 0.3")

    harness.release(*leases)
    harness.settled()

    assert [escape.name for escape in chain.from_iterable(groups) if escape.sleeping(harness)] == []
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


def test_the_next_holder_finds_nothing(harness: HostileHarness) -> None:
    leases = harness.every_slot()
    for lease in leases:
        for leftover, command in LEFTOVERS.items():
            result = harness.bash(lease, command)
            assert result["success"], (leftover, result)
    harness.release(*leases)
    harness.settled()

    for lease in harness.every_slot():
        look = "ls -A; find /tmp /var/tmp /dev/shm -mindepth 1 -user $(id -u) 2>/dev/null; awk -v u=$(id -u) '$5 == u || $8 == u' /proc/sysvipc/*"
        found = harness.bash(lease, look)
        assert found["output"] == "", found
        assert found["success"], found
    harness.still_sound()


# Deleting this many files takes several times as long as a reset, which the test checks: they are not yet deleted when the slot is ready again.
FILES = 100_000


@in_one_mode
def test_a_flood_of_files_is_gone_for_the_next_holder_at_once(harness: HostileHarness) -> None:
    leases = harness.every_slot()
    # Hard links: as many names to delete, for a third of the time to make them.
    fill = " os.mkdir(str(d)); os.chdir(str(d)); os.mknod('f')\n for n in range(9999): os.link('f', str(n))\n os.chdir('..')\n"
    script = f"import os\nfor d in range({FILES // 10_000}):\n{fill}"
    assert harness.python(leases[0], script, timeout_s=60)["success"]
    (trash,) = Path(harness.state_dir).glob("sandboxes/*/base/trash")

    started = time.monotonic()
    harness.release(*leases)
    harness.settled()
    took_s = time.monotonic() - started
    thrown = os.listdir(trash)

    assert thrown, "the files were deleted before the slot was ready: deleting is to happen behind"
    assert took_s < 10, f"the slot was away for {took_s:.1f} s: deleting is to happen behind"
    assert all(harness.bash(lease, "ls -A")["output"] == "" for lease in harness.every_slot())
    harness.still_sound()
    while set(thrown) & set(os.listdir(trash)):
        assert time.monotonic() < started + 60, "what was thrown away is not deleted"
        time.sleep(0.05)


def test_a_background_process_lives_until_release_and_the_call_returns_at_once(harness: HostileHarness) -> None:
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


#: What a slot can do to an empty folder so that its next holder could tell it from a new one. Each slot of the sandbox does one of them.
MARKS = (
    "os.chmod(folder, 0o1755); os.utime(folder, (1, 1))",
    "os.setxattr(folder, 'user.left', b'behind'); os.utime(folder, (2, 2))",
    # The flag "no dump", and the project of quotas with its flag.
    "set_flags(folder, 0x40)",
)
MARK = """
import fcntl, os, struct
def set_flags(folder, flags):
    fd = os.open(folder, os.O_RDONLY)
    fcntl.ioctl(fd, 0x40086602, struct.pack("l", struct.unpack("l", fcntl.ioctl(fd, 0x80086601, bytes(8)))[0] | flags))
    value = bytearray(fcntl.ioctl(fd, 0x801c581f, bytes(28)))
    value[12:16] = struct.pack("I", 4711)
    try: fcntl.ioctl(fd, 0x401c5820, bytes(value))
    except OSError: pass  # Only the user of the machine, and not that of a namespace, can change it.
for folder in (os.getcwd(), "/tmp"):
    if os.stat(folder).st_uid == os.getuid(): {mark}
print("marked")
"""
LOOK = """
import fcntl, os, struct
for folder in (os.getcwd(), "/tmp"):
    info = os.stat(folder)
    fd = os.open(folder, os.O_RDONLY)
    project = struct.unpack("I", fcntl.ioctl(fd, 0x801c581f, bytes(28))[12:16])[0]
    flags = struct.unpack("l", fcntl.ioctl(fd, 0x80086601, bytes(8)))[0] & 0x40
    own = info.st_uid == os.getuid()
    if own: print(oct(info.st_mode), info.st_mtime > 1000, info.st_atime > 1000, os.listxattr(folder), flags, project, os.listdir(folder))
"""


def test_the_next_holder_cannot_tell_that_a_slot_has_marked_its_empty_folders(harness: HostileHarness) -> None:
    leases = harness.every_slot()
    before = harness.python(leases[0], LOOK)
    assert "[] 0 0 []" in before["output"], before
    for lease, mark in zip(leases, MARKS, strict=True):
        marked = harness.python(lease, MARK.format(mark=mark))
        assert marked["output"] == "marked\n", marked
        assert harness.python(lease, LOOK)["output"] != before["output"]
    harness.release(*leases)
    harness.settled()

    for lease in harness.every_slot():
        assert harness.python(lease, LOOK)["output"] == before["output"]
    harness.still_sound()
