"""A short run of the crash harness; `make faults` is the long one."""

from __future__ import annotations

import pytest

from tests.faults.harness import FaultRun

SEED = 4
SECONDS = 15.0
CLIENTS = 10


@pytest.mark.timeout(150)
async def test_nothing_is_lost_in_a_short_run() -> None:
    report = await FaultRun(SEED, SECONDS, CLIENTS).run()

    assert report.violations == [], f"seed {SEED}; python -m tests.faults --seed {SEED} --seconds {SECONDS:g} --clients {CLIENTS}\n{report.log[-4000:]}"
    assert report.figures["times it came back"] >= 1
    assert report.figures["calls checked"] >= 20
