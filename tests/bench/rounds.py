"""What a benchmark run measures, in rounds: each round measures the floor, the service and the peer in turns.

A busy machine slows whatever is measured at that moment. What is compared is therefore measured within a second of each other, the ratio is
taken within a round, and the figure is the median over the rounds: a disturbance that lasts for a few rounds does not move it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from tests.bench.churn_laps import ChurnRound, ProcessorTime, measure_churn_round
from tests.bench.file_laps import FileLaps, FileRound
from tests.bench.floor import Floor
from tests.bench.interactive.interactive_laps import INTERNET_POOL, InteractiveRound, measure_interactive_round
from tests.bench.peer import Peer
from tests.bench.run_batch_laps import RunBatchRound, measure_run_batch
from tests.bench.service_laps import (
    BATCH_LEASES,
    ServiceConnection,
    acquire_s,
    batch_rate,
    idle_bytes,
    one_call_s,
    one_client_call_s,
    release_to_acquire_s,
)
from tests.support.service import running_service

ISOLATION = "bwrap"
ROUNDS = 11
CHURN_ROUNDS = 5
FILE_ROUNDS = 5
INTERACTIVE_ROUNDS = 5
COLD_STARTS = 3
COLD_SLOTS = 100
SLOTS_PER_SANDBOX = 10
POOL = {"backend": "local", "require_sandbox": True, "on_shutdown": "destroy", "max_lifetime_s": 86400, "slots_per_sandbox": SLOTS_PER_SANDBOX}
WARM_SANDBOXES = 7
WARM_POOLS = {
    "default": {**POOL, "min_sandboxes": WARM_SANDBOXES, "max_sandboxes": WARM_SANDBOXES},
    "ten": {**POOL, "min_sandboxes": 1, "max_sandboxes": 1},
}
CHURN_POOLS = {"default": WARM_POOLS["default"]}
FILE_POOLS = {"default": WARM_POOLS["ten"]}
INTERACTIVE_POOLS = {"default": WARM_POOLS["ten"], INTERNET_POOL: {**WARM_POOLS["ten"], "network": "internet"}}
COLD_POOLS = {"default": {**POOL, "min_sandboxes": COLD_SLOTS // SLOTS_PER_SANDBOX, "max_sandboxes": COLD_SLOTS // SLOTS_PER_SANDBOX}}


@dataclass(frozen=True, kw_only=True)
class Round:
    """What one round measured. Times are in seconds, rates in calls per second; None where there is no peer."""

    floor_call_s: float
    service_call_s: float
    client_call_s: float
    peer_call_s: float | None
    floor_rate: float
    service_rate: float
    peer_rate: float | None
    acquire_s: float
    release_to_acquire_s: float


@dataclass(frozen=True, kw_only=True)
class ColdStart:
    """What one start of a service with a hundred slots took, and what the idle slots and agents hold. None: this user may not read it."""

    floor_call_s: float
    took_s: float
    slot_bytes: float | None
    agent_bytes: float | None


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """A whole run.

    Args:
        rounds: one after the other; like all that follow, empty if this part was not measured.
        cold_starts: one after the other.
        churn_rounds: one after the other.
        run_batch_rounds: one after the other.
        file_rounds: one after the other.
        interactive_rounds: one after the other.
    """

    rounds: Sequence[Round] = ()
    cold_starts: Sequence[ColdStart] = ()
    churn_rounds: Sequence[ChurnRound] = ()
    run_batch_rounds: Sequence[RunBatchRound] = ()
    file_rounds: Sequence[FileRound] = ()
    interactive_rounds: Sequence[InteractiveRound] = ()

    def median(self, value: Callable[[Round], float | None]) -> float | None:
        """Return the median of a value, or of a ratio of two values, over the rounds. None: at least one round has no such value."""
        values = [value(measured) for measured in self.rounds]
        return None if None in values else statistics.median(known for known in values if known is not None)

    def churn_median(self, value: Callable[[ChurnRound], float]) -> float:
        """Return the median of a value, or of a ratio of two values, over the rounds with many clients."""
        return statistics.median(value(measured) for measured in self.churn_rounds)

    def run_batch_median(self, value: Callable[[RunBatchRound], float]) -> float:
        """Return the median of a value, or of a ratio of two values, over the rounds with run-batches."""
        return statistics.median(value(measured) for measured in self.run_batch_rounds)

    def interactive_median(self, value: Callable[[InteractiveRound], float]) -> float:
        """Return the median of a value, or of a ratio of two values, over the rounds with stateful shells."""
        return statistics.median(value(measured) for measured in self.interactive_rounds)

    def as_document(self) -> dict[str, Any]:
        """Return everything that was measured, as JSON has it."""
        return asdict(self)


def measure_rounds(floor: Floor, peer: Peer | None, report: Callable[[str], None]) -> list[Round]:
    """Run the service and measure all rounds.

    Args:
        floor: the bare machine.
        peer: SWE-ReX, if it runs.
        report: called with a line of progress.

    Returns:
        The rounds.
    """
    rounds = []
    with running_service({"pools": WARM_POOLS}) as service:
        connection = ServiceConnection(service)
        _check_isolation(connection)
        for number in range(ROUNDS):
            report(f"round {number + 1} of {ROUNDS}")
            lease_ids = connection.acquire(BATCH_LEASES)
            measured = Round(
                floor_call_s=floor.measure_one_call_s(),
                service_call_s=one_call_s(connection, lease_ids),
                client_call_s=one_client_call_s(service),
                peer_call_s=peer.measure_one_call_s() if peer else None,
                floor_rate=floor.measure_rate(),
                service_rate=batch_rate(connection, lease_ids),
                peer_rate=peer.measure_rate() if peer else None,
                acquire_s=_after_release(connection, lease_ids),
                release_to_acquire_s=release_to_acquire_s(connection, "ten", SLOTS_PER_SANDBOX),
            )
            rounds.append(measured)
    return rounds


def measure_churn_rounds(floor: Floor, report: Callable[[str], None]) -> list[ChurnRound]:
    """Run a service for many clients that use fresh slots, and measure all rounds. The arguments are those of `measure_rounds`."""
    slots = WARM_SANDBOXES * SLOTS_PER_SANDBOX
    rounds = []
    with ProcessorTime() as processor_time, running_service({"pools": CHURN_POOLS}) as service:
        connection = ServiceConnection(service)
        connection.wait_until_ready(slots)
        _check_isolation(connection)
        for number in range(CHURN_ROUNDS):
            report(f"fresh slots, round {number + 1} of {CHURN_ROUNDS}")
            rounds.append(measure_churn_round(floor, service, connection, processor_time, slots))
    return rounds


def measure_run_batch_rounds(report: Callable[[str], None]) -> list[RunBatchRound]:
    """Run a service for run-batches, and measure all rounds. `report` is called with a line of progress."""
    with running_service({"pools": CHURN_POOLS}) as service:
        connection = ServiceConnection(service)
        connection.wait_until_ready(WARM_SANDBOXES * SLOTS_PER_SANDBOX)
        _check_isolation(connection)
        return measure_run_batch(service, report)


def measure_file_rounds(report: Callable[[str], None]) -> list[FileRound]:
    """Run a service for file tools and file routes, and measure all rounds. `report` is called with a line of progress."""
    rounds = []
    with running_service({"pools": FILE_POOLS}) as service:
        connection = ServiceConnection(service)
        connection.wait_until_ready(SLOTS_PER_SANDBOX)
        _check_isolation(connection)
        laps = FileLaps(service, connection.acquire()[0])
        for number in range(FILE_ROUNDS):
            report(f"files, round {number + 1} of {FILE_ROUNDS}")
            rounds.append(laps.measure_round())
    return rounds


def measure_interactive_rounds(floor: Floor, report: Callable[[str], None]) -> list[InteractiveRound]:
    """Run a service for stateful shells and networks of slots, and measure all rounds. The arguments are those of `measure_rounds`."""
    rounds = []
    with ProcessorTime() as processor_time, running_service({"pools": INTERACTIVE_POOLS}) as service:
        connection = ServiceConnection(service)
        connection.wait_until_ready(SLOTS_PER_SANDBOX)
        _check_isolation(connection)
        pools = {"default": SLOTS_PER_SANDBOX}
        missing = connection.get("/v1/pools/default")["capabilities"]["internet"]
        if missing == "ok":
            connection.wait_until_ready(SLOTS_PER_SANDBOX, INTERNET_POOL)
            pools[INTERNET_POOL] = SLOTS_PER_SANDBOX
        else:
            report(f"slots cannot have networks of their own: {missing}")
        for number in range(INTERACTIVE_ROUNDS):
            report(f"stateful shells and networks, round {number + 1} of {INTERACTIVE_ROUNDS}")
            rounds.append(measure_interactive_round(floor, connection, processor_time, pools))
    return rounds


def _check_isolation(connection: ServiceConnection) -> None:
    """Check that slots have the isolation that all figures are about.

    Raises:
        RuntimeError: they have another one.
    """
    isolation = connection.get("/v1/pools/default")["isolation"]
    if isolation != ISOLATION:
        raise RuntimeError(f"the benchmark needs slots in the isolation mode {ISOLATION}, and these have {isolation}: install bubblewrap")


def _after_release(connection: ServiceConnection, lease_ids: list[str]) -> float:
    """Release the leases of a round, and measure acquires of ready slots. Before and after that, every slot is ready: resets would disturb what is measured."""
    connection.release(lease_ids)
    connection.wait_until_ready(WARM_SANDBOXES * SLOTS_PER_SANDBOX)
    took_s = acquire_s(connection)
    connection.wait_until_ready(WARM_SANDBOXES * SLOTS_PER_SANDBOX)
    return took_s


def measure_cold_start(floor: Floor, report: Callable[[str], None]) -> ColdStart:
    """Start a service with no sandboxes, and measure how long it takes until a hundred slots are ready and what they hold while idle."""
    floor_s = floor.measure_one_call_s()
    begin = time.perf_counter()
    with running_service({"pools": COLD_POOLS}) as service:
        ServiceConnection(service).wait_until_ready(COLD_SLOTS)
        took_s = time.perf_counter() - begin
        try:
            slot_bytes, agent_bytes = idle_bytes(service, COLD_SLOTS)
        except psutil.AccessDenied:
            report("only root can measure the memory of a slot")
            return ColdStart(floor_call_s=floor_s, took_s=took_s, slot_bytes=None, agent_bytes=None)
    return ColdStart(floor_call_s=floor_s, took_s=took_s, slot_bytes=slot_bytes, agent_bytes=agent_bytes)
