"""Short runs of the crash harness, over every transport; `make faults` runs it for longer."""

from __future__ import annotations

import pytest

from tests.faults.harness import CrashHarness

# The seed of the shorter runs injects three kills of the service, two cut links and one kill of an agent within twelve seconds, also on a loaded machine.
RUNS = [("unix", 4, 15.0, 20), ("tls", 312, 12.0, 5), ("stdio", 312, 12.0, 5)]
CLIENTS = 10


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("transport", "seed", "seconds", "min_calls"), RUNS, ids=[transport for transport, *_ in RUNS])
async def test_nothing_is_lost_in_a_short_run(transport: str, seed: int, seconds: float, min_calls: int) -> None:
    report = await CrashHarness(seed, seconds, CLIENTS, transport).run()

    command = f"python -m tests.faults --seed {seed} --seconds {seconds:g} --clients {CLIENTS} --transport {transport}"
    assert report.violations == [], f"{command}\n{report.log[-4000:]}"
    assert report.figures["times it came back"] >= 1
    assert report.figures["calls checked"] >= min_calls
