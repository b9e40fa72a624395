"""A slot that takes the memory of all: it is ended, and its neighbours, its agent and the service do not notice."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator

import psutil
import pytest

from tests.hostile.conftest import POOL
from tests.hostile.house import House

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


@pytest.fixture
def small_pool(house: House) -> Iterator[str]:
    """A pool whose slots have 400 MiB together, so that this test does not need all of the machine's."""
    answer = house.client.put("/v1/pools/small", json={**POOL, "memory_mb": 400})
    assert answer.status_code in (200, 201), answer.text
    yield "small"
    house.release_all()
    assert house.client.delete("/v1/pools/small").status_code in (200, 202, 204)
    deadline = time.monotonic() + 30
    while house.client.get("/v1/pools/small").status_code != 404:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def view_share(house: House, pool: str) -> int:
    """What a slot of a pool is always given, in MiB."""
    share: int = house.client.get(f"/v1/pools/{pool}").json()["effective"]["share_memory_mb"]
    return share


@pytest.mark.parametrize("script", [HOARD, SHARED], ids=["memory-files", "shared-memory"])
def test_a_slot_that_hoards_memory_is_ended_and_nobody_else(house: House, small_pool: str, script: str) -> None:
    hoarder, neighbour = house.acquire(pool=small_pool), house.acquire(pool=small_pool)
    marker = f"62{uuid.uuid4().int % 10**10}"
    assert house.bash(neighbour, f"x=$(head -c 20M /dev/zero | tr '\\\\0' x); sleep {marker} > /dev/null 2>&1 & echo up")["success"]
    agents, survivors = house.agent_pids(), house.processes(marker)
    assert survivors
    service = psutil.Process(house.pid)
    started = time.monotonic()
    result = house.python(hoarder, script, timeout_s=60)

    # Where memory is only measured, it may be past its own ceiling, too, when it is looked at.
    assert (result["reason"], result["fault"]) in [("oom", "ambiguous"), *([] if house.as_root else [("oom", "policy")])], result
    assert time.monotonic() - started < 30
    assert result["metadata"]["evidence"]["used_mb"] > view_share(house, small_pool)
    assert [process.pid for process in house.processes(marker)] == [process.pid for process in survivors]
    assert house.agent_pids() == agents
    assert service.is_running()
    assert house.bash(neighbour, "echo fine")["output"] == "fine\n"
    assert house.bash(hoarder, "true")["reason"] == "sandbox_lost"
    house.still_sound()


def test_a_pool_says_what_holds_for_memory_and_what_does_not(house: House, small_pool: str) -> None:
    house.acquire(pool=small_pool)
    view = house.client.get(f"/v1/pools/{small_pool}").json()
    effective, capabilities = view["effective"], view["capabilities"]

    assert (effective["slot_memory_mb"], effective["slots_memory_mb"]) == (400, 400)
    assert 0 < effective["share_memory_mb"] <= 100
    is_counted = capabilities["limits"]["memory"].startswith("cgroup")
    assert is_counted == (not any(sentence.startswith("memory of a slot is measured") for sentence in capabilities["not_enforced"]))
    if house.as_root and os.access("/sys/fs/cgroup/memory", os.W_OK):
        assert is_counted
