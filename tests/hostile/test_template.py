"""The template that the inits of slots are forked from is out of the reach of every slot, and a slot sees nothing of other slots through it."""

from __future__ import annotations

import json
import signal

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
