"""The line of those who wait for slots of one pool: within a tenant priority, then arrival. Plain data."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from sandbox_server.core.types import AcquireRequest, Lease
from sandbox_server.pool.leasing.heaps import tidied


@dataclass(slots=True, kw_only=True, eq=False)
class Waiter:
    """One acquire in the queue. `leases` is filled when it is served; `first_since`: when it became its tenant's first, monotonic."""

    request: AcquireRequest
    seq: int
    arrived: float
    deadline: float
    weight: float
    leases: tuple[Lease, ...] = ()
    waiting: bool = True
    first_since: float = float("inf")

    @property
    def rank(self) -> tuple[int, int]:
        """Smaller is served earlier within its tenant."""
        return (-self.request.priority, self.seq)


class WaitQueue:
    """Waiters by tenant, each tenant's in order."""

    def __init__(self) -> None:
        self._ranks: dict[str, list[tuple[int, int]]] = {}
        self._waiters: dict[tuple[int, int], Waiter] = {}
        self._heads: dict[str, Waiter] = {}
        self._deadlines: list[tuple[float, tuple[int, int]]] = []
        self.slots_wanted = 0
        self.wanted_by: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._waiters)

    def add(self, waiter: Waiter, now: float) -> None:
        """Queue it where it belongs. `now`: monotonic."""
        insort(self._ranks.setdefault(waiter.request.tenant, []), waiter.rank)
        self._waiters[waiter.rank] = waiter
        self._want(waiter, waiter.request.count)
        self._find_head(waiter.request.tenant, now)
        waiter.waiting = True
        heapq.heappush(self._deadlines, (waiter.deadline, waiter.rank))
        self._deadlines = tidied(self._deadlines, len(self._waiters), ((one.deadline, one.rank) for one in self._waiters.values()))

    def remove(self, waiter: Waiter, now: float) -> None:
        """It waits no more. `now`: monotonic."""
        tenant, rank = waiter.request.tenant, waiter.rank
        ranks = self._ranks[tenant]
        del ranks[bisect_left(ranks, rank)]
        if not ranks:
            del self._ranks[tenant]
        del self._waiters[rank]
        self._want(waiter, -waiter.request.count)
        self._find_head(tenant, now)
        waiter.waiting = False

    def _find_head(self, tenant: str, now: float) -> None:
        ranks = self._ranks.get(tenant)
        head = None if ranks is None else self._waiters[ranks[0]]
        if self._heads.get(tenant) is head:
            return
        self._heads.pop(tenant, None)
        if head is not None:
            # At the end of the dict, which so keeps the order in which they became the first, that of one moment too.
            self._heads[tenant] = head
            head.first_since = now

    def _want(self, waiter: Waiter, count: int) -> None:
        self.slots_wanted += count
        self.wanted_by[waiter.request.tenant] += count
        if not self.wanted_by[waiter.request.tenant]:
            del self.wanted_by[waiter.request.tenant]

    def overdue(self, now: float) -> list[Waiter]:
        """Those who have waited as long as they would, monotonic; they stay in the line, and are told of once."""
        late: dict[int, Waiter] = {}
        while self._deadlines and self._deadlines[0][0] <= now:
            waiter = self._waiters.get(heapq.heappop(self._deadlines)[1])
            if waiter is not None:
                late[waiter.seq] = waiter
        return list(late.values())

    def next_overdue(self) -> float:
        """When `overdue` may have somebody, monotonic."""
        return self._deadlines[0][0] if self._deadlines else float("inf")

    def tenants(self) -> Iterable[str]:
        """Who has somebody waiting."""
        return self._ranks.keys()

    def head(self, tenant: str) -> Waiter:
        """The tenant's first."""
        return self._heads[tenant]

    def heads(self) -> Iterable[Waiter]:
        """Each tenant's first, in the order in which they became that."""
        return self._heads.values()

    def count_of(self, tenant: str) -> int:
        """How many of a tenant's wait."""
        return len(self._ranks.get(tenant, ()))

    def all(self) -> list[Waiter]:
        """Everybody who waits, in no order that means anything."""
        return list(self._waiters.values())

    def position(self, waiter: Waiter, claimant: Waiter | None = None) -> int:
        """About how many are served no later than this one, itself included: its tenant's before it, as many of each other tenant's, and the claimant."""
        ranks = self._ranks[waiter.request.tenant]
        place = bisect_left(ranks, waiter.rank) + 1
        others = sum(min(len(other), place - 1) for tenant, other in self._ranks.items() if tenant != waiter.request.tenant)
        # Where others of its tenant are before it, the claimant is counted as one of its own tenant's.
        is_left_out = claimant is not None and claimant.request.tenant != waiter.request.tenant and place == 1
        return place + others + is_left_out


def crowded_out(max_sandboxes: int, draining: int, leases: int) -> str:
    """The sentence for a pool that may make no sandbox as long as old ones are there.

    Args:
        max_sandboxes: of the pool.
        draining: how many of its sandboxes drain and are held by leases.
        leases: how many leases hold them.
    """
    old = "1 draining sandbox counts" if draining == 1 else f"{draining} draining sandboxes count"
    held = "its last lease" if leases == draining == 1 else f"the last of {leases} leases there"
    return f"{old} towards its max_sandboxes of {max_sandboxes} until {held} has ended"


def held_back(free: int, count: int, waited_s: float) -> str:
    """The sentence for a pool whose free slots are held for somebody else.

    Args:
        free: how many slots are held.
        count: how many its claimant waits for.
        waited_s: for how long, in seconds.
    """
    held = "its 1 free slot is held" if free == 1 else f"its {free} free slots are held"
    return f"{held} for an acquire of {count} that has waited for {waited_s:.0f} s"


def none_free(pool: str, count: int, waited_s: float, *, making: int, held: str | None = None, crowded: str | None = None, last_error: str | None) -> str:
    """The sentence for whom it was too late: what there was none of, why, and what to do.

    Args:
        pool: the pool's name.
        count: how many slots were wanted at once.
        waited_s: how long they were waited for, in seconds.
        making: how many sandboxes are being made.
        held: `held_back`, if that is so.
        crowded: `crowded_out`, if that is so.
        last_error: why none can be made, if that is so.
    """
    slots = "slot free" if count == 1 else f"{count} slots free at once"
    tried = f"had no {slots} within {round(waited_s, 1):g} s" if round(waited_s, 1) else f"has no {slots}"
    if held:
        return f"pool {pool!r} {tried}: {held}: release leases, wait for longer, or ask again"
    if making:
        todo = "a sandbox is being made" if making == 1 else f"{making} sandboxes are being made"
        return f"pool {pool!r} {tried}: {todo}, ask again in a moment"
    if crowded:
        return f"pool {pool!r} {tried}: {crowded}: release leases there, raise its max_sandboxes, or ask again"
    why = f" (its last error: {last_error})" if last_error else ""
    return f"pool {pool!r} {tried}{why}: release leases, raise its max_sandboxes, or ask again"
