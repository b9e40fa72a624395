"""A slot that takes more memory than its share ends before its neighbours notice, on a machine that is full, in every mode."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from tests.integration.agent.conftest import ROOT, Maker, _runner
from tests.integration.agent.house import House, agent_process, connected

MIB = 1 << 20
MEMORY = Path("/sys/fs/cgroup/memory")

# Fills memory that no process has mapped, and asks the kernel to take anybody else first.
HOARD = """
import os
try:
    open("/proc/self/oom_score_adj", "w").write("0")
except OSError:
    pass
block, files = b"x" * (1 << 20), []
while True:
    files.append(os.memfd_create("hoard"))
    for _ in range(16):
        os.write(files[-1], block)
"""
HOLD = "import sys, time; held = bytearray({mib} << 20); print('up', flush=True); time.sleep(60)"
GROW = "held = []\nfor _ in range({mib}): held.append(bytearray(b'x' * (1 << 20)))\nprint(len(held))"


def python(script: str) -> dict[str, object]:
    return {"args": {"command": "exec python3 -", "stdin": script}}


def by_cgroup(house: House) -> bool:
    limits: dict[str, str] = house.link.hello["capabilities"]["limits"]
    return limits["memory"].startswith("cgroup")


def groups_of(house: House) -> list[Path]:
    return list(MEMORY.glob(f"**/sandbox-pool-{house.process.pid}-*"))


@pytest.mark.privileged
@pytest.mark.parametrize(("mode", "user"), ROOT, ids="-".join)
async def test_a_hoarder_ends_and_its_neighbour_within_its_share_does_not(make_house: Maker, mode: str, user: str) -> None:
    house = await make_house(mode, user, slots=3, memory_mb=400)
    if not by_cgroup(house):
        pytest.skip("nothing counts memory here")
    share = house.link.hello["effective"]["share_memory_mb"]
    assert 0 < 4 * share <= 400
    beside = asyncio.create_task(house.call("bash", "1", timeout_s=60, **python(HOLD.format(mib=share - 25).replace("time.sleep(60)", "sys.stdin.read()"))))
    writer = asyncio.create_task(house.bash("until [ -e go ]; do sleep 0.02; done; echo fine", "2"))
    started = time.monotonic()
    hoarder = await house.call("bash", "0", timeout_s=60, **python(HOARD))

    assert hoarder.reason == "oom", hoarder.meta
    assert time.monotonic() - started < 20
    proof = hoarder.metadata["evidence"]
    assert proof["ambiguous"] is True
    assert proof["used_mb"] > proof["share_mb"]
    assert proof["group"] == "sandbox"
    await house.bash("touch go", "2")
    assert (await writer).text == "fine\n"
    assert (await beside).reason == "exit"
    assert (await house.reset())["state"] == "ready"
    assert (await house.bash("echo back")).text == "back\n"
