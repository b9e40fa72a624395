"""The held leases of a pool, by id, by tenant, by run, and by when they end; and the order to reset a slot once its lease has ended."""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, replace

from sandbox_server.core.clock import Clock, wall_at
from sandbox_server.core.types import Lease, SlotRef
from sandbox_server.pool.leasing.heaps import tidied
from sandbox_server.pool.leasing.slot_table import Holder

#: How long a lease outlasts its last running call, in seconds.
STRETCH_S = 60.0


@dataclass(slots=True, eq=False)
class HeldLease:
    """The moving side of a held lease. `parked`: its expiry is not in the heap, because a call is running past it.

    `calls_unknown`: it was held by an earlier life of this service, and whether one of its calls still runs is being found out.
    """

    lease: Lease
    deadline: float
    running: int = 0
    calls_unknown: bool = False
    quiet_since: float | None = None
    parked: bool = False

    @property
    def is_busy(self) -> bool:
        """Whether a call runs, as far as is known."""
        return bool(self.running) or self.calls_unknown

    @property
    def ends_at(self) -> float:
        """When it ends by itself, monotonic: the later of its deadline and the end of its last running call + 60 s."""
        if self.is_busy:
            return float("inf")
        return self.deadline if self.quiet_since is None else max(self.deadline, self.quiet_since + STRETCH_S)


def lease_with_current_expiry(held_lease: HeldLease, clock: Clock) -> Lease:
    """The lease with the end that it has as things stand: a running call, and 60 s after it, hold it beyond its own."""
    lease, now = held_lease.lease, clock.monotonic()
    ends_at = now + STRETCH_S if held_lease.running else now if held_lease.calls_unknown else held_lease.ends_at
    return lease if ends_at <= held_lease.deadline else replace(lease, expires_at=wall_at(clock, ends_at))


class LeaseIndex:
    """The leases that hold."""

    def __init__(self) -> None:
        self.by_id: dict[str, HeldLease] = {}
        self.by_tenant: Counter[str] = Counter()
        self._runs: dict[Holder, dict[str, None]] = {}
        self._ends: list[tuple[float, str]] = []

    def add(self, held_lease: HeldLease) -> None:
        """A lease begins to hold."""
        lease = held_lease.lease
        self.by_id[lease.lease_id] = held_lease
        self.by_tenant[lease.tenant] += 1
        self._runs.setdefault((lease.tenant, lease.run_id), {})[lease.lease_id] = None
        heapq.heappush(self._ends, (held_lease.deadline, lease.lease_id))
        self._ends = tidied(self._ends, len(self.by_id), ((held.deadline, lease_id) for lease_id, held in self.by_id.items() if not held.parked))

    def remove(self, lease: Lease) -> None:
        """It holds no more."""
        del self.by_id[lease.lease_id]
        self.by_tenant[lease.tenant] -= 1
        if not self.by_tenant[lease.tenant]:
            del self.by_tenant[lease.tenant]
        of_run = self._runs[lease.tenant, lease.run_id]
        del of_run[lease.lease_id]
        if not of_run:
            del self._runs[lease.tenant, lease.run_id]

    def of_run(self, tenant: str, run_id: str | None) -> list[str]:
        """The leases this run holds; for None, those that the tenant holds without a run."""
        return list(self._runs.get((tenant, run_id), ()))

    def call_started(self, lease_id: str) -> None:
        """A call runs in this lease; it does not expire under it. Nothing happens if it has ended."""
        held_lease = self.by_id.get(lease_id)
        if held_lease is not None:
            held_lease.running += 1

    def call_ended(self, lease_id: str, now: float) -> None:
        """The other end of `call_started`."""
        held_lease = self.by_id.get(lease_id)
        if held_lease is not None and held_lease.running:
            held_lease.running -= 1
            held_lease.quiet_since = now
            self._unpark(held_lease)

    def confirm_calls_ended(self, lease_id: str, ended: float | None) -> None:
        """No call of an earlier life runs any more. `ended`: when the last one did, monotonic; None where there was none."""
        held_lease = self.by_id.get(lease_id)
        if held_lease is not None and held_lease.calls_unknown:
            held_lease.calls_unknown = False
            held_lease.quiet_since = max((at for at in (held_lease.quiet_since, ended) if at is not None), default=None)
            self._unpark(held_lease)

    def _unpark(self, held_lease: HeldLease) -> None:
        if held_lease.parked and not held_lease.is_busy:
            held_lease.parked = False
            heapq.heappush(self._ends, (held_lease.ends_at, held_lease.lease.lease_id))

    def take_due(self, now: float) -> list[HeldLease]:
        """Those whose time is over, monotonic; each must be removed."""
        due: list[HeldLease] = []
        while self._ends and self._ends[0][0] <= now:
            lease_id = heapq.heappop(self._ends)[1]
            held_lease = self.by_id.get(lease_id)
            if held_lease is None:
                continue
            if held_lease.is_busy:
                held_lease.parked = True
            elif held_lease.ends_at > now:
                heapq.heappush(self._ends, (held_lease.ends_at, lease_id))
            else:
                due.append(held_lease)
        return due

    def next_due(self) -> float:
        """When `take_due` may have something, monotonic."""
        return self._ends[0][0] if self._ends else float("inf")


@dataclass(frozen=True, kw_only=True, slots=True)
class ResetOrder:
    """A slot that its agent must reset to this epoch before it is anyone's."""

    ref: SlotRef
    epoch: int
    keep: bool
