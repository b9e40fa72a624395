"""What slots share is out of their reach: the template that their inits are forked from, the code that they run, and what agents have found out.

A slot sees nothing of other slots through it, and cannot plant anything there for them.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from pathlib import Path

import psutil

from tests.hostile.hostile_harness import HostileHarness

# Tries to reach processes in every way that the kernel has, and prints each that succeeds.
REACH = r"""
import ctypes, json, os, socket
libc = ctypes.CDLL(None, use_errno=True)
PROCESS_VM_READV, PIDFD_OPEN, PIDFD_GETFD = 310 if os.uname().machine == "x86_64" else 270, 434, 438
PTRACE_ATTACH, PTRACE_SEIZE = 16, 0x4206
FOLDERS = ["fd", "fdinfo", "map_files", "root", "cwd"]
FILES = ["mem", "environ", "maps", "smaps_rollup", "auxv", "syscall", "stack", "personality", "exe"] + FOLDERS
reached = []

def opens(pid, name):
    try:
        path = "/proc/%d/%s" % (pid, name)
        if name in FOLDERS or name.startswith("task/"):
            os.listdir(path); reached.append(path)
        else:
            with open(path, "rb") as file:
                if file.read(1): reached.append(path)
    except OSError: pass

def signals(pid):
    try: os.kill(pid, 0); reached.append("kill %d" % pid)
    except OSError: pass

def traces(pid):
    for request in (PTRACE_ATTACH, PTRACE_SEIZE):
        if libc.ptrace(ctypes.c_long(request), ctypes.c_long(pid), None, None) == 0: reached.append("ptrace %d" % pid)
    fd = libc.syscall(ctypes.c_long(PIDFD_OPEN), ctypes.c_int(pid), ctypes.c_uint(0))
    if fd >= 0:
        if libc.syscall(ctypes.c_long(PIDFD_GETFD), ctypes.c_int(fd), ctypes.c_int(3), ctypes.c_uint(0)) >= 0: reached.append("pidfd_getfd %d" % pid)
        os.close(fd)
    local, remote = (ctypes.c_uint64 * 2)(ctypes.addressof(ctypes.create_string_buffer(8)), 8), (ctypes.c_uint64 * 2)(id(None), 8)
    one, none = ctypes.c_ulong(1), ctypes.c_ulong(0)
    if libc.syscall(ctypes.c_long(PROCESS_VM_READV), ctypes.c_int(pid), local, one, remote, one, none) >= 0: reached.append("process_vm_readv %d" % pid)

def writes(pid):
    files = {"oom_score_adj": b"1000", "autogroup": b"19", "clear_refs": b"1", "coredump_filter": b"0", "comm": b"x", "timerslack_ns": b"9", "sched": b"0"}
    for name, text in files.items():
        for path in ("/proc/%d/%s" % (pid, name), "/proc/%d/task/%d/%s" % (pid, pid, name)):
            try:
                with open(path, "wb") as file: file.write(text)
                reached.append("wrote " + path)
            except OSError: pass

def changes(pid):
    for change in (lambda: os.sched_setaffinity(pid, {0}), lambda: os.setpriority(os.PRIO_PROCESS, pid, 19)):
        try: change(); reached.append("the scheduling of %d" % pid)
        except OSError: pass

visible = {}
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        with open("/proc/%s/comm" % pid) as file: visible[int(pid)] = file.read().strip()
    except OSError: pass
targets = TARGETS + [pid for pid, name in visible.items() if name in ("slot-template", "slot-init")]
for pid in targets:
    for name in FILES + ["task/%d/fd" % pid]:
        opens(pid, name)
    traces(pid); changes(pid); writes(pid)
    if visible.get(pid) != "slot-init" or pid != 1: signals(pid)
files = []
for fd in os.listdir("/proc/self/fd"):
    try: files.append(os.readlink("/proc/self/fd/" + fd))
    except OSError: pass
mounts = [line.split()[3] for line in open("/proc/self/mountinfo")]
print(json.dumps({"reached": reached, "visible": sorted(set(visible.values())), "files": files, "mounts": mounts}))
"""


# Tries to write, replace and add files where agents keep what they share.
PLANT = r"""
import json, os
planted = []

def attempt(path, *changes):
    for change in changes:
        try: change(); planted.append(path)
        except OSError: pass

folders = ["/.sandbox", "/run/lock/sandbox-pool-probes", "/run/sandbox-pool-probes", "/var/lock/sandbox-pool-probes"] + FOLDERS
for top in folders:
    for folder, _, names in os.walk(top):
        for path in [os.path.join(folder, name) for name in names[:50]]:
            attempt(path, lambda: open(path, "ab"), lambda: os.chmod(path, 0o666), lambda: os.utime(path))
            attempt(path, lambda: os.rename(path, path + "x"), lambda: os.unlink(path))
    attempt(top, lambda: open(top + "/planted", "wb"), lambda: os.mkdir(top + "/planted"))
    attempt(top, lambda: os.rename(top, top + "-old"), lambda: os.chmod(top, 0o777))
print(json.dumps(sorted(set(planted))))
"""
SHARED = ("/run/lock/sandbox-pool-probes", "/run/sandbox-pool-probes")


def _read_shared_files(harness: HostileHarness) -> Mapping[str, tuple[int, bytes]]:
    """Return the owner and the content of each file that agents share."""
    folders = [Path(harness.state_dir, "agent"), *map(Path, SHARED)]
    return {str(path): (path.stat().st_uid, path.read_bytes()) for folder in folders for path in folder.rglob("*") if path.is_file()}


def test_a_slot_cannot_change_what_agents_share(harness: HostileHarness) -> None:
    lease = harness.acquire()
    # Root alone keeps records, and those of other agents of this machine come and go during this test.
    before = {path: found for path, found in _read_shared_files(harness).items() if path.startswith(harness.state_dir)}
    assert any("/slot_lib/" in path for path in before)

    result = harness.python(lease, f"FOLDERS = {[str(Path(harness.state_dir, 'agent'))]}\n{PLANT}")

    assert result["success"], result
    planted = json.loads(result["output"])
    after = _read_shared_files(harness)
    assert {path: found for path, found in after.items() if path in before} == before
    assert not [path for path, (uid, _) in after.items() if path.startswith(SHARED) and uid != 0 and harness.as_root]
    assert [path for path in planted if path.startswith("/.sandbox") or path in before] == []
    harness.still_sound()


def _templates(harness: HostileHarness) -> list[psutil.Process]:
    return [child for pid in harness.agent_pids() for child in psutil.Process(pid).children() if child.name() == "slot-template"]


def test_a_slot_reaches_neither_the_template_nor_its_init_nor_the_mounts_of_others(harness: HostileHarness) -> None:
    attacker, victim = harness.acquire(), harness.acquire()
    templates = _templates(harness)
    assert templates
    assert harness.pool()["capabilities"]["slot_start"] == "forked"

    result = harness.python(attacker, f"TARGETS = {[template.pid for template in templates]}\n{REACH}")

    assert result["success"], result
    seen = json.loads(result["output"])
    assert seen["reached"] == []
    assert ("slot-template" in seen["visible"]) == (harness.mode == "uid")
    assert [file for file in seen["files"] if not file.startswith(("/dev/null", "pipe:", "/proc/", "/memfd:"))] == []
    if harness.mode == "bwrap":  # In the mode uid, a slot sees all mounts of the machine, with the file permissions of its user.
        assert len({part for mount in seen["mounts"] for part in mount.split("/") if part.startswith("bwrap-")}) == 1
    assert harness.bash(victim, "echo fine")["output"] == "fine\n"
    harness.still_sound()


def test_a_killed_template_costs_no_slot_anything(harness: HostileHarness) -> None:
    templates = _templates(harness)
    held, released = harness.acquire(), harness.acquire()
    assert harness.bash(held, "echo mine > file")["success"]

    for template in templates:
        template.send_signal(signal.SIGKILL)
    harness.release(released)
    harness.settled()

    assert harness.bash(held, "cat file")["output"] == "mine\n"
    assert harness.bash(harness.acquire(), "ls -A; echo fresh")["output"] == "fresh\n"
    assert {template.pid for template in _templates(harness)}.isdisjoint(template.pid for template in templates)
    harness.still_sound()
