"""The held leases of a pool: an index by id, by tenant, by run and by expiry; and the order to reset a slot after its lease has ended."""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, replace

from sandbox_server.core.clock import Clock, wall_at
from sandbox_server.core.types import Lease, SlotRef
from sandbox_server.pool.leasing.heaps import without_stale_entries
from sandbox_server.pool.leasing.slot_table import RunKey

#: How long a lease is held after its last running call has ended, in seconds.
EXTENSION_AFTER_CALL_S = 60.0


@dataclass(slots=True, eq=False)
class HeldLease:
    """A held lease and what decides when it expires. Times are monotonic.

    Attributes:
        lease: the lease.
        deadline: when the lease expires if it is neither renewed nor used.
        running_call_count: how many calls run in it.
        calls_unknown: the lease was adopted after a restart, and it is not known yet whether a call still runs in it.
        last_call_ended_at: when its last call ended; None if there was none.
        is_out_of_heap: the heap of expiries has no entry for it, because a call was running at its expiry.
    """

    lease: Lease
    deadline: float
    running_call_count: int = 0
    calls_unknown: bool = False
    last_call_ended_at: float | None = None
    is_out_of_heap: bool = False

    @property
    def is_busy(self) -> bool:
        """Whether a call runs in it, or may be running."""
        return bool(self.running_call_count) or self.calls_unknown

    @property
    def ends_at(self) -> float:
        """When it expires: at its deadline, or 60 s after its last call ended if that is later. Infinite while a call runs."""
        if self.is_busy:
            return float("inf")
        if self.last_call_ended_at is None:
            return self.deadline
        return max(self.deadline, self.last_call_ended_at + EXTENSION_AFTER_CALL_S)


def lease_with_current_expiry(held_lease: HeldLease, clock: Clock) -> Lease:
    """Return the lease with the expiry that it has now: a running call, and the 60 s after it, can extend it beyond its deadline."""
    lease, now = held_lease.lease, clock.monotonic()
    ends_at = held_lease.ends_at
    if held_lease.running_call_count:
        ends_at = now + EXTENSION_AFTER_CALL_S
    elif held_lease.calls_unknown:
        ends_at = now
    return lease if ends_at <= held_lease.deadline else replace(lease, expires_at=wall_at(clock, ends_at))


class LeaseIndex:
    """The held leases of a pool."""

    def __init__(self) -> None:
        self.by_id: dict[str, HeldLease] = {}
        self.count_by_tenant: Counter[str] = Counter()
        self._ids_by_run: dict[RunKey, dict[str, None]] = {}
        self._expiries: list[tuple[float, str]] = []

    def add_lease(self, held_lease: HeldLease) -> None:
        """Add a lease that is held from now on."""
        lease = held_lease.lease
        self.by_id[lease.lease_id] = held_lease
        self.count_by_tenant[lease.tenant] += 1
        self._ids_by_run.setdefault((lease.tenant, lease.run_id), {})[lease.lease_id] = None
        heapq.heappush(self._expiries, (held_lease.deadline, lease.lease_id))
        live = ((held.deadline, lease_id) for lease_id, held in self.by_id.items() if not held.is_out_of_heap)
        self._expiries = without_stale_entries(self._expiries, len(self.by_id), live)

    def remove_lease(self, lease: Lease) -> None:
        """Remove a lease that has ended."""
        del self.by_id[lease.lease_id]
        self.count_by_tenant[lease.tenant] -= 1
        if not self.count_by_tenant[lease.tenant]:
            del self.count_by_tenant[lease.tenant]
        ids = self._ids_by_run[lease.tenant, lease.run_id]
        del ids[lease.lease_id]
        if not ids:
            del self._ids_by_run[lease.tenant, lease.run_id]

    def of_run(self, tenant: str, run_id: str | None) -> list[str]:
        """Return the ids of the leases that a run holds; for `run_id` None, of those that the tenant holds without a run."""
        return list(self._ids_by_run.get((tenant, run_id), ()))

    def runs_call(self, lease_id: str) -> bool:
        """Return whether a call runs in a lease; False if the lease has ended."""
        held_lease = self.by_id.get(lease_id)
        return held_lease is not None and held_lease.running_call_count > 0

    def record_call_start(self, lease_id: str) -> None:
        """Note that a call runs in a lease, which then does not expire. Does nothing if the lease has ended."""
        held_lease = self.by_id.get(lease_id)
        if held_lease is not None:
            held_lease.running_call_count += 1

    def record_call_end(self, lease_id: str, now: float) -> None:
        """Note that a call has ended for which `record_call_start` was called. `now`: monotonic."""
        held_lease = self.by_id.get(lease_id)
        if held_lease is not None and held_lease.running_call_count:
            held_lease.running_call_count -= 1
            held_lease.last_call_ended_at = now
            self._put_back_into_heap(held_lease)

    def confirm_calls_ended(self, lease_id: str, ended_at: float | None) -> None:
        """Note that no call runs in an adopted lease any more.

        Args:
            lease_id: the lease.
            ended_at: when the last call ended, monotonic; None if no call was running when the lease was adopted.
        """
        held_lease = self.by_id.get(lease_id)
        if held_lease is not None and held_lease.calls_unknown:
            held_lease.calls_unknown = False
            ends = [at for at in (held_lease.last_call_ended_at, ended_at) if at is not None]
            held_lease.last_call_ended_at = max(ends, default=None)
            self._put_back_into_heap(held_lease)

    def _put_back_into_heap(self, held_lease: HeldLease) -> None:
        if held_lease.is_out_of_heap and not held_lease.is_busy:
            held_lease.is_out_of_heap = False
            heapq.heappush(self._expiries, (held_lease.ends_at, held_lease.lease.lease_id))

    def take_expired(self, now: float) -> list[HeldLease]:
        """Return the leases that have expired. The caller must remove each of them. `now`: monotonic."""
        expired: list[HeldLease] = []
        while self._expiries and self._expiries[0][0] <= now:
            lease_id = heapq.heappop(self._expiries)[1]
            held_lease = self.by_id.get(lease_id)
            if held_lease is None:
                continue
            if held_lease.is_busy:
                held_lease.is_out_of_heap = True
            elif held_lease.ends_at > now:
                heapq.heappush(self._expiries, (held_lease.ends_at, lease_id))
            else:
                expired.append(held_lease)
        return expired

    def next_expiry(self) -> float:
        """Return the earliest time at which `take_expired` may return a lease, monotonic."""
        return self._expiries[0][0] if self._expiries else float("inf")


@dataclass(frozen=True, kw_only=True, slots=True)
class ResetOrder:
    """The order to have a slot reset by its agent.

    Attributes:
        ref: the slot.
        epoch: the epoch that the slot is in after the reset.
        keep: whether the files in the workspace stay.
    """

    ref: SlotRef
    epoch: int
    keep: bool
