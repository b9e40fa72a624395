"""What the template and the inits that are forked from it hold: no secret, no descriptor and no capability too many, and no mount that another one sees."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.hostile.hostile_harness import HostileHarness

pytestmark = pytest.mark.privileged  # What an undumpable process holds is shown to root alone.

CHUNK_BYTES = 1 << 20
CALM_LOOKS = 5
STANDARD_STREAMS = ["/dev/null"] * 3
# The capabilities that docs/isolation.md says a template has.
DOCUMENTED = {
    ("bwrap", "root"): {6, 7, 12, 21},
    ("uid", "root"): {2, 6, 7, 21},
    ("bwrap", "user"): {18, 21, 31},
}


# Where a slot mounts something.
MOUNT_POINTS = {"/proc", "/dev/pts", "/dev/shm", "/dev/mqueue", "/run/lock", "/etc/passwd", "/etc/group", "/workspace", "/tmp", "/var/tmp", "/cache"}


def children_named(harness: HostileHarness, name: str) -> list[psutil.Process]:
    """The templates or the inits, once none of them is being set up: no slot is about to be forked, and each init has its system call filter."""
    seen: list[set[tuple[int, str, str]]] = []
    deadline = time.monotonic() + 20
    while (
        len(seen) < CALM_LOOKS or any(look != seen[-1] for look in seen[-CALM_LOOKS:]) or any(kind == "slot-init" and mode != "2" for _, kind, mode in seen[-1])
    ):
        assert time.monotonic() < deadline, seen[-1]
        time.sleep(0.05)
        children = [child for pid in harness.agent_pids() for child in psutil.Process(pid).children()]
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            seen.append({(child.pid, child.name(), status_of(child.pid)["Seccomp"]) for child in children})
    return [psutil.Process(pid) for pid, kind, _ in seen[-1] if kind == name]


def secrets_of(harness: HostileHarness) -> set[bytes]:
    """The token of the service and that of each of its agents."""
    found = {harness.token.encode()}
    for handle in Path(harness.state_dir).glob("sandboxes/*/handle.json"):
        found.add(json.loads(handle.read_text(encoding="utf-8"))["token"].encode())
    return found


def memory_of(pid: int) -> Iterator[bytes]:
    """The memory of a process, in chunks of which each begins with the end of the one before."""
    with open(f"/proc/{pid}/maps", encoding="utf-8") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in maps:
            area, rights, *_ = line.split()
            if not rights.startswith("r") or line.endswith(("[vvar]\n", "[vvar_vclock]\n", "[vsyscall]\n")):
                continue
            start, end = (int(word, 16) for word in area.split("-"))
            tail = b""
            memory.seek(start)
            while start < end:
                chunk = memory.read(min(CHUNK_BYTES, end - start))
                if not chunk:
                    break
                yield tail + chunk
                tail = chunk[-200:]
                start += len(chunk)


def status_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def files_of(pid: int) -> list[str]:
    return sorted(os.readlink(path).partition(":[")[0] for path in Path(f"/proc/{pid}/fd").iterdir())


def mounts_of(pid: int) -> list[str]:
    """The mounts that a process sees where slots mount something, without their numbers and those of their parents."""
    lines = [line.split(" ", 2)[2] for line in Path(f"/proc/{pid}/mountinfo").read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line.split()[2] in MOUNT_POINTS or "/slots/" in line]


def test_neither_the_template_nor_an_init_has_a_secret_in_its_memory(harness: HostileHarness) -> None:
    harness.acquire()
    secrets = secrets_of(harness)
    assert all(len(secret) > 8 for secret in secrets)
    assert any(secret in chunk for secret in secrets for chunk in memory_of(harness.pid))  # so this way of looking finds them

    processes = children_named(harness, "slot-template") + children_named(harness, "slot-init")

    assert len(processes) >= 2
    for process in processes:
        assert not any(secret in chunk for chunk in memory_of(process.pid) for secret in secrets), process


def test_the_template_has_one_thread_and_only_the_documented_rights_and_files(harness: HostileHarness) -> None:
    harness.acquire()
    for template in children_named(harness, "slot-template"):
        status = status_of(template.pid)
        held = {number for number in range(64) if int(status["CapPrm"], 16) >> number & 1}
        assert held == DOCUMENTED[harness.mode, harness.user]
        assert (status["CapBnd"], status["CapInh"], status["CapAmb"]) == ("0" * 16,) * 3
        assert (status["Threads"], status["NoNewPrivs"]) == ("1", "1")
        namespaces = [] if harness.as_root else ["mnt", "mnt"]  # An ordinary user's agent may not mount the folders of slots itself.
        assert files_of(template.pid) == sorted([*STANDARD_STREAMS, *namespaces, "socket"])


def test_an_init_has_none_of_the_files_and_rights_of_its_template(harness: HostileHarness) -> None:
    harness.acquire()
    templates = children_named(harness, "slot-template")
    for init in children_named(harness, "slot-init"):
        assert set(files_of(init.pid)) <= {"/dev/null", "socket", "pipe", f"/proc/{init.pid}/oom_score_adj", "/proc/1/oom_score_adj"}
        status = status_of(init.pid)
        assert int(status["CapBnd"], 16) == int(status["CapInh"], 16) == int(status["CapAmb"], 16) == 0
        assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
        assert int(Path(f"/proc/{init.pid}/oom_score_adj").read_text()) >= 300
        if harness.mode == "bwrap":
            for kind in ("mnt", "pid", "ipc", "uts", "cgroup"):
                assert os.readlink(f"/proc/{init.pid}/ns/{kind}") not in {os.readlink(f"/proc/{other.pid}/ns/{kind}") for other in templates}


def test_no_mount_of_a_slot_reaches_its_template_the_agent_or_another_slot(harness: HostileHarness) -> None:
    first = harness.acquire()
    assert harness.bash(first, "echo fine")["success"]
    outside = [os.getpid(), *harness.agent_pids(), *(template.pid for template in children_named(harness, "slot-template"))]
    before = {pid: mounts_of(pid) for pid in outside}
    inits = {init.pid: mounts_of(init.pid) for init in children_named(harness, "slot-init")}

    for _ in range(4):
        lease = harness.acquire()
        assert harness.bash(lease, "echo fine")["success"]
        harness.release(lease)
    harness.settled()

    remaining = {init.pid for init in children_named(harness, "slot-init")}
    assert {pid: mounts_of(pid) for pid in outside} == before
    for pid, mounts in inits.items():
        assert pid not in remaining or mounts_of(pid) == mounts
        if harness.mode == "bwrap":
            assert not [mount for mount in mounts if " shared:" in mount or " master:" in mount or "propagate_from" in mount]
