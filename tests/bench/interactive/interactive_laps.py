"""Stateful shells, and what a slot costs that has a network of its own."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass
from typing import Any

from tests.bench.churn_laps import ProcessorTime, cycle_cpu_s
from tests.bench.floor import Floor
from tests.bench.service_laps import ServiceConnection, lap_s, p50_s

SESSION_LAPS = 40
SESSION_STARTS = 12
INTERNET_POOL = "internet"


@dataclass(frozen=True, kw_only=True)
class InteractiveRound:
    """What one round measured, in seconds.

    Args:
        floor_call_s: the median time of one bare command.
        session_call_s: the median time of `true` in a stateful shell that has been used before.
        session_start_s: the median time of the first `true` of a stateful shell.
        cycle_cpu_s: the processor time of the whole machine for acquire, release and reset of a slot that shares the network of its sandbox.
        internet_cycle_cpu_s: the same of a slot with a network of its own; None where there can be none.
    """

    floor_call_s: float
    session_call_s: float
    session_start_s: float
    cycle_cpu_s: float
    internet_cycle_cpu_s: float | None


def measure_interactive_round(floor: Floor, connection: ServiceConnection, processor_time: ProcessorTime, pools: dict[str, int]) -> InteractiveRound:
    """Measure one round.

    Args:
        floor: the bare machine.
        connection: to the service.
        processor_time: measures the processor time of the service.
        pools: the slots of each pool: `default`, and `INTERNET_POOL` where slots can have networks of their own.
    """
    (lease_id,) = connection.acquire()
    session_call_s = p50_s(lambda: _run_in_session(connection, lease_id, "warm"), SESSION_LAPS)
    numbers = itertools.count()
    session_start_s = statistics.median(lap_s(lambda: _run_in_session(connection, lease_id, f"new-{next(numbers)}")) for _ in range(SESSION_STARTS))
    connection.release([lease_id])
    connection.wait_until_ready(pools["default"])
    return InteractiveRound(
        floor_call_s=floor.measure_one_call_s(),
        session_call_s=session_call_s,
        session_start_s=session_start_s,
        cycle_cpu_s=cycle_cpu_s(connection, processor_time, pools["default"]),
        internet_cycle_cpu_s=cycle_cpu_s(connection, processor_time, pools[INTERNET_POOL], INTERNET_POOL) if INTERNET_POOL in pools else None,
    )


def _run_in_session(connection: ServiceConnection, lease_id: str, session: str) -> None:
    """Run `true` in a stateful shell.

    Raises:
        RuntimeError: the call did not succeed.
    """
    call: dict[str, Any] = {"lease_id": lease_id, "tool": "bash_stateful", "args": {"command": "true", "session": session}}
    (result,) = connection.post("/v1/exec-batch", {"calls": [call]})["results"]
    if not result["success"]:
        raise RuntimeError(f"the call did not succeed: {result}")
