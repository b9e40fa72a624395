"""Short runs of the crash harness, over every transport; `make faults` runs it for longer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from tests.faults.crash_harness import CrashHarness, Report, Size

SECONDS = 60.0
"""The most that the faults take, in seconds. A run ends after a number of faults, so that a loaded machine injects the same ones."""
# Each slot and each call costs processor time, and a run of this length needs few of them: gangs take more than two of the three sandboxes.
SIZE = Size(clients=5, gang=7, gang_wait_s=8.0, slots_per_sandbox=3, max_sandboxes=3)
# The seeds are those whose first faults come quickly: over unix a link cut, clients cut off, an agent stopped, two kills of the service and one of an agent;
# over the other transports a link cut, a kill of an agent, a kill of the service, another link cut and another kill of the service.
RUNS = [("unix", 7965, 6, 20), ("tls", 11646, 5, 5), ("stdio", 11646, 5, 5)]


@pytest.fixture(scope="module")
def reports() -> Mapping[str, Report | BaseException]:
    """The reports of all runs, by transport, or the errors with which they failed. A run mostly waits for the next fault, so they go on side by side."""

    async def run_all() -> list[Report | BaseException]:
        runs = (CrashHarness(seed, SECONDS, SIZE, transport, max_faults=max_faults).run() for transport, seed, max_faults, _ in RUNS)
        return await asyncio.gather(*runs, return_exceptions=True)

    return dict(zip([transport for transport, *_ in RUNS], asyncio.run(run_all()), strict=True))


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("transport", "seed", "max_faults", "min_calls"), RUNS, ids=[transport for transport, *_ in RUNS])
def test_nothing_is_lost_in_a_short_run(reports: Mapping[str, Report | BaseException], transport: str, seed: int, max_faults: int, min_calls: int) -> None:
    report = reports[transport]
    if isinstance(report, BaseException):
        raise report

    command = f"python -m tests.faults --seed {seed} --clients {SIZE.clients} --transport {transport}"
    assert report.violations == [], f"{command}\n{report.log[-4000:]}"
    assert report.figures["times it came back"] == 2
    assert report.figures["kills of agents"] == 1
    assert report.figures["calls checked"] >= min_calls
