"""A slot that fills the machine's table of open files, which is made small here: it is ended, and nobody else."""

from __future__ import annotations

import asyncio

import pytest

from sandbox_server.agent.limits.open_files_guard import read_file_table
from tests.integration.agent.conftest import MODES, Maker

# Processes that each open as many files as they may.
HOARD = """
import os, time
for _ in range(11):
    if os.fork() == 0:
        break
files = []
try:
    while True:
        files.append(os.eventfd(0) if hasattr(os, "eventfd") else os.open("/dev/null", os.O_RDONLY))
except OSError:
    time.sleep(60)
"""


@pytest.mark.parametrize(("mode", "user"), MODES)
async def test_a_slot_that_fills_the_table_of_open_files_is_ended_and_its_neighbour_is_not(make_harness: Maker, mode: str, user: str) -> None:
    most = read_file_table().open_count + 8000
    harness = await make_harness(mode, user, slots=2, spares=0, machine_files=most)
    beside = asyncio.create_task(harness.bash("until [ -e go ]; do sleep 0.05; done; echo fine", "1", timeout_s=60.0))
    ended = await harness.bash("exec python3 -", stdin=HOARD, timeout_s=60.0)
    await harness.bash("touch go", "1")
    proof = ended.metadata["evidence"]

    assert (ended.reason, proof["slot_ended"], proof["machine_most_open_files"]) == ("resource_limit", True, most), ended.meta
    assert proof["open_files"] > 3000
    assert (await beside).text == "fine\n"
