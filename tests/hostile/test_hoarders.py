"""A slot that takes the memory of all: it is ended, and its neighbours, its agent and the service do not notice."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator

import psutil
import pytest

from tests.hostile.hostile_harness import POOL, HostileHarness

# Makes itself the last to be killed, and holds memory that no process has mapped.
HOARD = """
import os, time
try:
    open("/proc/self/oom_score_adj", "w").write("0")
except OSError:
    pass
block, files = b"x" * (1 << 20), []
for _ in range(40):
    files.append(os.memfd_create("hoard"))
    for _ in range(16):
        os.write(files[-1], block)
time.sleep(60)
"""
# The same, by children that end one after the other and leave it in a shared file system.
SHARED = """
import os, time
for number in range(40):
    if os.fork() == 0:
        open("/proc/self/oom_score_adj", "w").write("1000")
        try:
            with open("/dev/shm/%d" % number, "wb") as file:
                for _ in range(16):
                    file.write(b"x" * (1 << 20))
        finally:
            os._exit(0)
    os.wait()
files = [os.memfd_create("more") for _ in range(4)]
for file in files:
    try:
        os.posix_fallocate(file, 0, 60 << 20)
    except OSError:
        pass  # refused for a moment, while the group is full
time.sleep(60)
"""


@pytest.fixture(scope="module")
def small_pool(running_harness: HostileHarness) -> Iterator[str]:
    """A pool whose slots have 400 MiB together, so that these tests do not need all of the machine's. The tests of one mode share it."""
    harness = running_harness
    answer = harness.client.put("/v1/pools/small", json={**POOL, "memory_mb": 400})
    assert answer.status_code in (200, 201), answer.text
    yield "small"
    assert harness.client.delete("/v1/pools/small").status_code in (200, 202, 204)
    deadline = time.monotonic() + 30
    while harness.client.get("/v1/pools/small").status_code != 404:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def view_share(harness: HostileHarness, pool: str) -> int:
    """What a slot of a pool is always given, in MiB."""
    share: int = harness.client.get(f"/v1/pools/{pool}").json()["effective"]["share_memory_mb"]
    return share


@pytest.mark.parametrize("script", [HOARD, SHARED], ids=["memory-files", "shared-memory"])
def test_a_slot_that_hoards_memory_is_ended_and_nobody_else(harness: HostileHarness, small_pool: str, script: str) -> None:
    hoarder, neighbour = harness.acquire(pool=small_pool), harness.acquire(pool=small_pool)
    marker = f"62{uuid.uuid4().int % 10**10}"
    assert harness.bash(neighbour, f"x=$(head -c 4M /dev/zero | tr '\\\\0' x); sleep {marker} > /dev/null 2>&1 & echo up")["success"]
    agents, survivors = harness.agent_pids(), harness.processes(marker)
    assert survivors
    service = psutil.Process(harness.pid)
    started = time.monotonic()
    result = harness.python(hoarder, script, timeout_s=60)

    # It fills everything alone, and may meet its own ceiling, which is hardly above that, before it is ended.
    assert (result["reason"], result["fault"]) == ("oom", "policy"), result
    assert time.monotonic() - started < 30
    proof = result["metadata"]["evidence"]
    assert proof.get("oom_kills") or proof["used_mb"] > view_share(harness, small_pool)
    assert [process.pid for process in harness.processes(marker)] == [process.pid for process in survivors]
    assert harness.agent_pids() == agents
    assert service.is_running()
    assert harness.bash(neighbour, "echo fine")["output"] == "fine\n"
    late = harness.bash(hoarder, "true")
    assert (late["reason"], late["fault"]) == ("sandbox_lost", "policy") or (proof.get("oom_kills") and late["success"]), late
    harness.still_sound()


def test_a_pool_says_what_holds_for_memory_and_what_does_not(harness: HostileHarness, small_pool: str) -> None:
    harness.acquire(pool=small_pool)
    view = harness.client.get(f"/v1/pools/{small_pool}").json()
    effective, capabilities = view["effective"], view["capabilities"]

    assert (effective["slot_memory_mb"], effective["slots_memory_mb"]) == (380, 400)
    assert 0 < effective["share_memory_mb"] <= 100
    is_counted = capabilities["limits"]["memory"].startswith("cgroup")
    assert is_counted == (not any(sentence.startswith("the memory of a slot is measured") for sentence in capabilities["not_enforced"]))
    if harness.as_root and os.access("/sys/fs/cgroup/memory", os.W_OK):
        assert is_counted
