"""The time that records are written in: one that no jump of the wall clock moves, and that goes on over restarts of the service.

Linux counts CLOCK_MONOTONIC from the start of the machine, the same for every process (clock_gettime(2)), and names each start of the machine
(`boot_id`, random(4)). So record time is that count plus an offset, which is on record beside the rest: it is the wall clock of the service's
first start since the machine's. On a machine that has started since, the wall clock is all there is to go by.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from sandbox_server.core.clock import Clock
from sandbox_server.core.types import Lease
from sandbox_server.store.base import ClockRecord, KeyRecord, Record, SandboxRecord, State

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
#: The clocks may drift apart by so much, in seconds, before it counts as a jump.
DRIFT_S = 0.5


def boot_id() -> str:
    """What this start of the machine is called; empty where nothing says it."""
    with suppress(OSError):
        return BOOT_ID.read_text(encoding="ascii").strip()
    return ""


class RecordTime:
    """Turns times of the wall clock into record time and back.

    Args:
        clock: this machine's.
        boot: this start of the machine; empty: unknown, so that nothing of an earlier life is believed to be of the same.
        known: the offset on record.
    """

    def __init__(self, clock: Clock, boot: str, known: ClockRecord | None) -> None:
        self._clock = clock
        goes_on = known is not None and boot != "" and known.boot_id == boot
        self.record = known if known is not None and goes_on else ClockRecord(boot_id=boot, offset_s=clock.wall() - clock.monotonic())

    def jumped_s(self) -> float:
        """By how much the wall clock is ahead of record time."""
        by_s = self._clock.wall() - self._clock.monotonic() - self.record.offset_s
        return by_s if abs(by_s) > DRIFT_S else 0.0

    def to_record(self, record: Record) -> Record:
        """What is to be written for a record whose times are the wall clock's."""
        by_s = self.jumped_s()
        return moved(record, -by_s) if by_s else record

    def from_record(self, state: State) -> State:
        """What was written, with the times that the wall clock would have shown if it had always stood where it stands now."""
        by_s = self.jumped_s()
        if not by_s:
            return state
        return replace(
            state,
            sandboxes=tuple(_moved_sandbox(record, by_s) for record in state.sandboxes),
            leases=tuple(_moved_lease(lease, by_s) for lease in state.leases),
            keys=tuple(_moved_key(record, by_s) for record in state.keys),
        )

    def lease_from_record(self, lease: Lease) -> Lease:
        """The same for one lease."""
        by_s = self.jumped_s()
        return _moved_lease(lease, by_s) if by_s else lease


def moved(record: Record, by_s: float) -> Record:
    """The record with its times so many seconds later."""
    if isinstance(record, Lease):
        return _moved_lease(record, by_s)
    if isinstance(record, SandboxRecord):
        return _moved_sandbox(record, by_s)
    return _moved_key(record, by_s) if isinstance(record, KeyRecord) else record


def _moved_lease(lease: Lease, by_s: float) -> Lease:
    return replace(
        lease,
        acquired_at=lease.acquired_at + by_s,
        expires_at=lease.expires_at + by_s,
        ended_at=_later(lease.ended_at, by_s),
        sandbox_ends_at=_later(lease.sandbox_ends_at, by_s),
    )


def _moved_sandbox(record: SandboxRecord, by_s: float) -> SandboxRecord:
    return replace(record, created_at=record.created_at + by_s, ready_at=_later(record.ready_at, by_s))


def _moved_key(record: KeyRecord, by_s: float) -> KeyRecord:
    return replace(record, granted_at=record.granted_at + by_s)


def _later(when: float | None, by_s: float) -> float | None:
    return None if when is None else when + by_s
