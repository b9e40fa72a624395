"""Remembers ended leases for an hour, so that a client that asks about one still learns how and when it ended."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import UTC, datetime

from sandbox_server.core.clock import Clock, monotonic_at
from sandbox_server.core.errors import LeaseLost, SandboxLost
from sandbox_server.core.types import Lease, LeaseState
from sandbox_server.store.base import Deletion, Record

ENDED_LEASE_REMEMBERED_S = 3600.0
MAX_REMEMBERED = 200_000
#: This many of the newest ended leases are kept in memory. The older ones are read from the store when they are needed.
MAX_IN_MEMORY = 1000


class EndedLeases:
    """Ended leases of the last hour, at most `MAX_REMEMBERED` of them.

    Args:
        record: is called with the record of each ended lease, and with the deletion of each one that is forgotten.
        read: returns the newest record of a lease from the store. None: the store cannot be read, and all of them are kept in memory.
    """

    def __init__(self, record: Callable[[Record], None], read: Callable[[str], Lease | None] | None = None) -> None:
        self._in_memory: OrderedDict[str, Lease] = OrderedDict()
        self._ids_by_end: deque[tuple[float, str]] = deque()
        self._record = record
        self._read = read

    def add_lease(self, lease: Lease, now: float) -> None:
        """Remember and record a lease that has just ended. Its labels are dropped: an ended lease is not listed. `now`: monotonic."""
        lease = replace(lease, labels={})
        self._record(lease)
        self.remember_lease(lease, now)

    def remember_lease(self, lease: Lease, ended: float) -> None:
        """Remember a lease whose end is recorded already. `ended`: when it ended, monotonic."""
        self._in_memory[lease.lease_id] = lease
        self._ids_by_end.append((ended, lease.lease_id))
        if self._read is not None and len(self._in_memory) > MAX_IN_MEMORY:
            self._in_memory.popitem(last=False)

    def remember_leases(self, leases: Iterable[Lease], clock: Clock) -> None:
        """Remember the ended leases among the recorded ones; each is forgotten an hour after its end. Held leases are ignored."""
        ended = [(lease.ended_at, lease) for lease in leases if lease.ended_at is not None]
        for ended_at, lease in sorted(ended, key=lambda pair: pair[0]):
            self.remember_lease(lease, monotonic_at(clock, ended_at))

    def get(self, lease_id: str) -> Lease | None:
        """Return an ended lease; None if there is no such lease, if it has not ended, or if it was forgotten.

        Raises:
            StorageUnavailable: its record cannot be read.
        """
        lease = self._in_memory.get(lease_id)
        if lease is None and self._read is not None:
            lease = self._read(lease_id)
        return lease if lease is not None and lease.ended_at is not None else None

    def purge(self, now: float) -> None:
        """Forget the leases that ended more than an hour ago, and the oldest beyond `MAX_REMEMBERED`. `now`: monotonic."""
        while self._ids_by_end and (self._ids_by_end[0][0] + ENDED_LEASE_REMEMBERED_S <= now or len(self._ids_by_end) > MAX_REMEMBERED):
            lease_id = self._ids_by_end.popleft()[1]
            self._in_memory.pop(lease_id, None)
            self._record(Deletion(lease_id=lease_id))


def end_error(lease: Lease) -> LeaseLost:
    """Return the error that says how and when a lease ended."""
    when = datetime.fromtimestamp(lease.ended_at or 0.0, UTC).isoformat(timespec="milliseconds")
    if lease.state is LeaseState.SANDBOX_LOST:
        detail = f"lease {lease.lease_id} ended at {when} with its sandbox {lease.sandbox_id}: {lease.end_detail}"
        evidence = {**lease.end_evidence, "detail": lease.end_detail}
        return SandboxLost(detail, lease_id=lease.lease_id, evidence=evidence)
    return LeaseLost(f"lease {lease.lease_id} ended at {when}: {lease.end_detail}", lease_id=lease.lease_id)
