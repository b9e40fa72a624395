"""Record time: the time in which records are stored. Jumps of the wall clock do not affect it, and it continues across restarts of the service.

On Linux, CLOCK_MONOTONIC counts from the start of the machine and is the same for every process (clock_gettime(2)). The kernel gives each start
of the machine an id (`boot_id`, random(4)). Record time is CLOCK_MONOTONIC plus an offset. The offset is chosen when the service runs for the
first time after a start of the machine, such that record time equals the wall clock at that moment, and it is stored together with the `boot_id`.
After the machine has started again, CLOCK_MONOTONIC has begun anew and only the wall clock remains: a new offset is chosen.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from sandbox_server.core.clock import Clock
from sandbox_server.core.types import Lease
from sandbox_server.store.base import ClockRecord, KeyRecord, Record, RunBatchRecord, SandboxRecord, State

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
#: A difference between the wall clock and record time up to this many seconds counts as drift, not as a jump.
MAX_DRIFT_S = 0.5


def boot_id() -> str:
    """Return the kernel's id of this start of the machine; an empty string if it cannot be read."""
    with suppress(OSError):
        return BOOT_ID.read_text(encoding="ascii").strip()
    return ""


class RecordTime:
    """Converts the times in records between the wall clock and record time.

    Args:
        clock: the clock of this machine.
        boot: the id of this start of the machine; empty if it is unknown, in which case a stored offset is not used.
        stored: the offset that is stored; None if there is none.
    """

    def __init__(self, clock: Clock, boot: str, stored: ClockRecord | None) -> None:
        self._clock = clock
        if stored is not None and boot and stored.boot_id == boot:
            self.record = stored
        else:
            self.record = ClockRecord(boot_id=boot, offset_s=clock.wall() - clock.monotonic())

    def jumped_s(self) -> float:
        """Return by how many seconds the wall clock is ahead of record time; 0 for a difference of at most `MAX_DRIFT_S`."""
        by_s = self._clock.wall() - self._clock.monotonic() - self.record.offset_s
        return by_s if abs(by_s) > MAX_DRIFT_S else 0.0

    def to_record(self, record: Record) -> Record:
        """Convert a record from wall-clock time to record time, for writing."""
        by_s = self.jumped_s()
        return shift_times(record, -by_s) if by_s else record

    def from_record(self, state: State) -> State:
        """Convert a stored state from record time to the time of the wall clock as it is set now."""
        by_s = self.jumped_s()
        if not by_s:
            return state
        return replace(
            state,
            sandboxes=tuple(_shift_sandbox(record, by_s) for record in state.sandboxes),
            leases=tuple(_shift_lease(lease, by_s) for lease in state.leases),
            keys=tuple(_shift_key(record, by_s) for record in state.keys),
            run_batches=tuple(_shift_run_batch(record, by_s) for record in state.run_batches),
        )

    def lease_from_record(self, lease: Lease) -> Lease:
        """Convert a stored lease from record time to the time of the wall clock as it is set now."""
        by_s = self.jumped_s()
        return _shift_lease(lease, by_s) if by_s else lease


def shift_times(record: Record, by_s: float) -> Record:
    """Return the record with all its times moved by a number of seconds; a record without times is returned as it is."""
    if isinstance(record, Lease):
        return _shift_lease(record, by_s)
    if isinstance(record, SandboxRecord):
        return _shift_sandbox(record, by_s)
    if isinstance(record, RunBatchRecord):
        return _shift_run_batch(record, by_s)
    return _shift_key(record, by_s) if isinstance(record, KeyRecord) else record


def _shift_lease(lease: Lease, by_s: float) -> Lease:
    return replace(
        lease,
        acquired_at=lease.acquired_at + by_s,
        expires_at=lease.expires_at + by_s,
        ended_at=_shift_time(lease.ended_at, by_s),
        sandbox_ends_at=_shift_time(lease.sandbox_ends_at, by_s),
    )


def _shift_sandbox(record: SandboxRecord, by_s: float) -> SandboxRecord:
    return replace(record, created_at=record.created_at + by_s, ready_at=_shift_time(record.ready_at, by_s))


def _shift_key(record: KeyRecord, by_s: float) -> KeyRecord:
    return replace(record, granted_at=record.granted_at + by_s)


def _shift_run_batch(record: RunBatchRecord, by_s: float) -> RunBatchRecord:
    return replace(record, kept_since=record.kept_since + by_s)


def _shift_time(when: float | None, by_s: float) -> float | None:
    return None if when is None else when + by_s
