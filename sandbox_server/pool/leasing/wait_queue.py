"""The queue of acquires that wait for slots of one pool: within a tenant by priority, then by arrival. A plain data structure."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from sandbox_server.core.types import AcquireRequest, Lease, PoolSpec
from sandbox_server.pool.leasing.heaps import without_stale_entries


@dataclass(slots=True, kw_only=True, eq=False)
class Waiter:
    """One acquire in the queue. Times are monotonic.

    Attributes:
        request: the acquire.
        seq: the number of the acquire in the order of arrival.
        arrived: when it arrived.
        deadline: until when it waits.
        weight: the weight of its tenant.
        leases: the leases that it was granted; empty before that.
        waiting: whether it is in the queue.
        head_since: when it became the first of its tenant; infinite before that.
    """

    request: AcquireRequest
    seq: int
    arrived: float
    deadline: float
    weight: float
    leases: tuple[Lease, ...] = ()
    waiting: bool = True
    head_since: float = float("inf")

    @property
    def rank(self) -> tuple[int, int]:
        """The position within its tenant: the waiter with the smallest rank is served first."""
        return (-self.request.priority, self.seq)


def longest_wait_s(request: AcquireRequest, spec: PoolSpec) -> float:
    """Return how long an acquire may wait for slots of a pool, in seconds."""
    return spec.acquire_timeout_s if request.wait_s is None else min(request.wait_s, spec.acquire_timeout_s)


class WaitQueue:
    """The waiting acquires by tenant. The first waiter of a tenant is its head."""

    def __init__(self) -> None:
        self._ranks_by_tenant: dict[str, list[tuple[int, int]]] = {}
        self._waiters: dict[tuple[int, int], Waiter] = {}
        self._heads: dict[str, Waiter] = {}
        self._deadlines: list[tuple[float, tuple[int, int]]] = []
        #: how many slots the waiting acquires ask for, together and by tenant
        self.slots_wanted = 0
        self.slots_wanted_by_tenant: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._waiters)

    def add_waiter(self, waiter: Waiter, now: float) -> None:
        """Put a waiter into the queue, at the position of its rank. `now`: monotonic."""
        insort(self._ranks_by_tenant.setdefault(waiter.request.tenant, []), waiter.rank)
        self._waiters[waiter.rank] = waiter
        self._add_wanted_slots(waiter, waiter.request.count)
        self._update_head(waiter.request.tenant, now)
        waiter.waiting = True
        heapq.heappush(self._deadlines, (waiter.deadline, waiter.rank))
        live_entries = ((one.deadline, one.rank) for one in self._waiters.values())
        self._deadlines = without_stale_entries(self._deadlines, len(self._waiters), live_entries)

    def remove_waiter(self, waiter: Waiter, now: float) -> None:
        """Take a waiter out of the queue. `now`: monotonic."""
        tenant, rank = waiter.request.tenant, waiter.rank
        ranks = self._ranks_by_tenant[tenant]
        del ranks[bisect_left(ranks, rank)]
        if not ranks:
            del self._ranks_by_tenant[tenant]
        del self._waiters[rank]
        self._add_wanted_slots(waiter, -waiter.request.count)
        self._update_head(tenant, now)
        waiter.waiting = False

    def _update_head(self, tenant: str, now: float) -> None:
        ranks = self._ranks_by_tenant.get(tenant)
        head = None if ranks is None else self._waiters[ranks[0]]
        if self._heads.get(tenant) is head:
            return
        self._heads.pop(tenant, None)
        if head is not None:
            # A new head is added at the end of the dict. So the dict is in the order in which the waiters became heads, even where several became
            # heads at the same time.
            self._heads[tenant] = head
            head.head_since = now

    def _add_wanted_slots(self, waiter: Waiter, count: int) -> None:
        self.slots_wanted += count
        self.slots_wanted_by_tenant[waiter.request.tenant] += count
        if not self.slots_wanted_by_tenant[waiter.request.tenant]:
            del self.slots_wanted_by_tenant[waiter.request.tenant]

    def take_overdue(self, now: float) -> list[Waiter]:
        """Return the waiters whose deadline has passed since the last call. They stay in the queue. `now`: monotonic."""
        overdue: dict[int, Waiter] = {}
        while self._deadlines and self._deadlines[0][0] <= now:
            waiter = self._waiters.get(heapq.heappop(self._deadlines)[1])
            if waiter is not None:
                overdue[waiter.seq] = waiter
        return list(overdue.values())

    def next_deadline(self) -> float:
        """Return the earliest time at which `take_overdue` may return a waiter, monotonic."""
        return self._deadlines[0][0] if self._deadlines else float("inf")

    def tenants(self) -> Iterable[str]:
        """Return the tenants that have waiters."""
        return self._ranks_by_tenant.keys()

    def head(self, tenant: str) -> Waiter:
        """Return the first waiter of a tenant that has waiters."""
        return self._heads[tenant]

    def heads(self) -> Iterable[Waiter]:
        """Return the first waiter of each tenant, in the order in which they became the first."""
        return self._heads.values()

    def count_of(self, tenant: str) -> int:
        """Return how many waiters a tenant has."""
        return len(self._ranks_by_tenant.get(tenant, ()))

    def all(self) -> list[Waiter]:
        """Return every waiter, in no particular order."""
        return list(self._waiters.values())

    def position(self, waiter: Waiter, claimant: Waiter | None = None) -> int:
        """Estimate the position of a waiter in the queue, 1 for the first.

        The estimate counts the waiter itself, the waiters of its tenant before it, as many waiters of each other tenant, and the claimant.
        """
        ranks = self._ranks_by_tenant[waiter.request.tenant]
        place = bisect_left(ranks, waiter.rank) + 1
        others = sum(min(len(other), place - 1) for tenant, other in self._ranks_by_tenant.items() if tenant != waiter.request.tenant)
        # If waiters of its own tenant come before this one, the claimant is already counted among the waiters of the claimant's tenant.
        is_claimant_uncounted = claimant is not None and claimant.request.tenant != waiter.request.tenant and place == 1
        return place + others + is_claimant_uncounted
