"""The memory of leases that have ended, so that a late question hears how and when."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import UTC, datetime

from sandbox_server.core.clock import Clock, monotonic_at
from sandbox_server.core.errors import LeaseLost, SandboxLost
from sandbox_server.core.types import Lease, LeaseState
from sandbox_server.store.base import Deletion, Record

REMEMBERED_S = 3600.0
MAX_REMEMBERED = 200_000
#: So many of the newest are held in memory; the older ones are read from the records when somebody asks.
MAX_IN_MEMORY = 1000


class EndedLeases:
    """Ended leases of the last hour, at most `MAX_REMEMBERED` of them.

    Args:
        record: takes each ended lease, and each that is forgotten.
        read: finds what `record` took; None: nothing does, and all are held in memory.
    """

    def __init__(self, record: Callable[[Record], None], read: Callable[[str], Lease | None] | None = None) -> None:
        self._leases: OrderedDict[str, Lease] = OrderedDict()
        self._order: deque[tuple[float, str]] = deque()
        self._record = record
        self._read = read

    def add(self, lease: Lease, now: float) -> None:
        """Remember a lease that ends now, monotonic; nobody asks for its labels any more."""
        lease = replace(lease, labels={})
        self._record(lease)
        self.restore(lease, now)

    def restore(self, lease: Lease, ended: float) -> None:
        """Remember a lease whose end is on record already."""
        self._leases[lease.lease_id] = lease
        self._order.append((ended, lease.lease_id))
        if self._read is not None and len(self._leases) > MAX_IN_MEMORY:
            self._leases.popitem(last=False)

    def restore_all(self, leases: Iterable[Lease], clock: Clock) -> None:
        """Remember what is on record, as long as from its end on; leases that hold are passed over."""
        ended = [(lease.ended_at, lease) for lease in leases if lease.ended_at is not None]
        for ended_at, lease in sorted(ended, key=lambda pair: pair[0]):
            self.restore(lease, monotonic_at(clock, ended_at))

    def get(self, lease_id: str) -> Lease | None:
        """The lease as it ended; None: it has not, or that is forgotten.

        Raises:
            StorageUnavailable: its record cannot be read.
        """
        lease = self._leases.get(lease_id)
        if lease is None and self._read is not None:
            lease = self._read(lease_id)
        return lease if lease is not None and lease.ended_at is not None else None

    def purge(self, now: float) -> None:
        """Forget what ended more than an hour ago."""
        while self._order and (self._order[0][0] + REMEMBERED_S <= now or len(self._order) > MAX_REMEMBERED):
            lease_id = self._order.popleft()[1]
            self._leases.pop(lease_id, None)
            self._record(Deletion(lease_id=lease_id))


def end_error(lease: Lease) -> LeaseLost:
    """The error that says how and when this lease ended."""
    when = datetime.fromtimestamp(lease.ended_at or 0.0, UTC).isoformat(timespec="milliseconds")
    if lease.state is LeaseState.SANDBOX_LOST:
        detail = f"lease {lease.lease_id} ended at {when} with its sandbox {lease.sandbox_id}: {lease.end_detail}"
        evidence = {**lease.end_evidence, "detail": lease.end_detail}
        return SandboxLost(detail, lease_id=lease.lease_id, evidence=evidence)
    return LeaseLost(f"lease {lease.lease_id} ended at {when}: {lease.end_detail}", lease_id=lease.lease_id)
