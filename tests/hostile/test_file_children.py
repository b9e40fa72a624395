"""The child of init that does a file operation: the processes of its slot cannot reach it, and can only harm their own operation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx

from tests.hostile.hostile_harness import HostileHarness

# Waits for a second child of init, tries to read, to trace and to change it, and then to kill it. Prints what it has achieved.
REACH_CHILD = r"""
import ctypes, json, os, signal, time
libc = ctypes.CDLL(None, use_errno=True)
PROCESS_VM_READV, PIDFD_OPEN, PIDFD_GETFD = 310 if os.uname().machine == "x86_64" else 270, 434, 438

def parent(pid):
    with open("/proc/%s/stat" % pid) as file: return int(file.read().rpartition(")")[2].split()[1])

def children_of(init):
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if parent(pid) == init: yield int(pid)
        except OSError: pass

mine = os.getsid(0)
init = parent(mine)
deadline = time.monotonic() + 20
targets = []
while not targets and time.monotonic() < deadline:
    targets = [pid for pid in children_of(init) if pid != mine]
reached, killed = [], []
for pid in targets:
    for name in ("mem", "environ", "maps", "auxv", "syscall", "stack"):
        try:
            with open("/proc/%d/%s" % (pid, name), "rb") as file:
                if file.read(1): reached.append(name)
        except OSError: pass
    for name in ("map_files", "cwd", "root"):
        try: os.listdir("/proc/%d/%s" % (pid, name)); reached.append(name)
        except OSError: pass
    for number in range(16):  # the numbers of its descriptors are visible where the slot's user owns the folder, but not what they are
        try: os.readlink("/proc/%d/fd/%d" % (pid, number)); reached.append("fd %d" % number)
        except OSError: pass
        try: os.close(os.open("/proc/%d/fd/%d" % (pid, number), os.O_RDWR | os.O_NONBLOCK)); reached.append("open fd %d" % number)
        except OSError: pass
    for request in (16, 0x4206):  # PTRACE_ATTACH, PTRACE_SEIZE
        if libc.ptrace(ctypes.c_long(request), ctypes.c_long(pid), None, None) == 0: reached.append("ptrace")
    fd = libc.syscall(ctypes.c_long(PIDFD_OPEN), ctypes.c_int(pid), ctypes.c_uint(0))
    for number in range(16):
        if fd >= 0 and libc.syscall(ctypes.c_long(PIDFD_GETFD), ctypes.c_int(fd), ctypes.c_int(number), ctypes.c_uint(0)) >= 0: reached.append("pidfd_getfd")
    local, remote = (ctypes.c_uint64 * 2)(ctypes.addressof(ctypes.create_string_buffer(8)), 8), (ctypes.c_uint64 * 2)(id(None), 8)
    one, none = ctypes.c_ulong(1), ctypes.c_ulong(0)
    if libc.syscall(ctypes.c_long(PROCESS_VM_READV), ctypes.c_int(pid), local, one, remote, one, none) >= 0: reached.append("process_vm_readv")
    try: os.kill(pid, signal.SIGKILL); killed.append(pid)
    except OSError: pass
print(json.dumps({"targets": len(targets), "reached": reached, "killed": len(killed)}))
"""

# Starts processes until the kernel refuses one more, and stays.
FILL = r"""
import os, time
pids = []
while True:
    try: pid = os.fork()
    except OSError: break
    if pid == 0:
        time.sleep(120)
        os._exit(0)
print("full", flush=True)
time.sleep(120)
"""


def test_the_child_can_be_ended_at_most_and_leaves_nothing_then(harness: HostileHarness) -> None:
    lease = harness.acquire()
    content = b"x" * 300_000

    with ThreadPoolExecutor(1) as pool:
        attack = pool.submit(harness.python, lease, REACH_CHILD)

        def parts() -> Iterator[bytes]:
            yield content
            attack.result()
            yield content

        answer = harness.client.put(f"/v1/leases/{lease['lease_id']}/files", params={"path": "target"}, content=parts())
    result = attack.result()

    assert result["success"], result
    seen = json.loads(result["output"])
    assert (seen["targets"], seen["reached"]) == (1, [])
    found = harness.bash(lease, "stat -c '%n %s' * .put-* 2>/dev/null")["output"]
    if seen["killed"]:
        assert harness.mode == "bwrap"  # In the mode uid, the child has a uid that nothing of the slot may signal.
        assert (answer.status_code, answer.json()["code"], found) == (409, "file_error", "")
    else:
        assert (answer.status_code, found) == (204, f"target {2 * len(content)}\n")
    harness.still_sound()


def test_a_slot_that_is_full_of_processes_is_told_so(harness: HostileHarness) -> None:
    lease = harness.acquire()
    started = harness.call(lease, "process", {"action": "start", "command": f"exec python3 -c '{FILL}'"})
    process_id = started["metadata"]["process_id"]
    while "full" not in harness.call(lease, "process", {"action": "log", "process_id": process_id})["output"]:
        pass

    result = harness.call(lease, "write_file", {"path": "f", "content": "x"})
    answer = harness.client.get(f"/v1/leases/{lease['lease_id']}/files", params={"path": "f"})

    assert (result["reason"], result["fault"]) == ("resource_limit", "policy"), result
    assert (answer.status_code, answer.json()["code"], answer.json()["errno"]) == (409, "file_error", "EAGAIN"), answer.text
    harness.still_sound()


def test_a_file_that_changes_its_size_while_it_is_sent_is_whole_or_cut_off(harness: HostileHarness) -> None:
    lease = harness.acquire()
    change = "truncate -s 8M big; (while :; do truncate -s 1M big; truncate -s 12M big; truncate -s 8M big; done) >/dev/null 2>&1 &"
    assert harness.bash(lease, change)["success"]

    outcomes = set()
    for _ in range(12):
        try:
            answer = harness.client.get(f"/v1/leases/{lease['lease_id']}/files", params={"path": "big"})
            assert answer.status_code == 200, answer.text[:200]
            assert len(answer.content) == int(answer.headers["content-length"])
            assert not answer.content.strip(b"\0")
            outcomes.add("whole")
        except httpx.RemoteProtocolError:
            outcomes.add("cut off")

    assert outcomes <= {"whole", "cut off"}
    harness.still_sound()
