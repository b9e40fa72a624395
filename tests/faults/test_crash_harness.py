"""Short runs of the crash harness, over every transport; `make faults` runs it for longer."""

from __future__ import annotations

import pytest

from tests.faults.crash_harness import CrashHarness, Size

SECONDS = 60.0
"""The most that the faults take, in seconds. A run ends after a number of faults, so that a loaded machine injects the same ones."""
# Each slot and each call costs processor time, and a run of this length needs few of them: gangs take more than two of the three sandboxes.
SIZE = Size(clients=5, gang=7, gang_wait_s=8.0, slots_per_sandbox=3, max_sandboxes=3)
# The seeds are those whose first faults come quickly: over unix a link cut, clients cut off, an agent stopped, two kills of the service and one of an agent;
# over the other transports a link cut, a kill of an agent, a kill of the service, another link cut and another kill of the service.
RUNS = [("unix", 7965, 6, 20), ("tls", 11646, 5, 5), ("stdio", 11646, 5, 5)]


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("transport", "seed", "max_faults", "min_calls"), RUNS, ids=[transport for transport, *_ in RUNS])
async def test_nothing_is_lost_in_a_short_run(transport: str, seed: int, max_faults: int, min_calls: int) -> None:
    report = await CrashHarness(seed, SECONDS, SIZE, transport, max_faults=max_faults).run()

    command = f"python -m tests.faults --seed {seed} --clients {SIZE.clients} --transport {transport}"
    assert report.violations == [], f"{command}\n{report.log[-4000:]}"
    assert report.figures["times it came back"] == 2
    assert report.figures["kills of agents"] == 1
    assert report.figures["calls checked"] >= min_calls
