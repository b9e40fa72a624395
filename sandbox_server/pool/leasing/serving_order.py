"""Who of those who wait for slots of one pool is served next, and which kept slots are taken back for them. Decides, changes nothing."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection

from sandbox_server.core.clock import Clock
from sandbox_server.core.types import AcquireRequest, SlotState
from sandbox_server.pool.leasing.claims import Claims
from sandbox_server.pool.leasing.slot_table import Holder, Slot, SlotTable
from sandbox_server.pool.leasing.wait_queue import Waiter, WaitQueue

#: How long a run waits for a slot of its own to be kept, rather than take another.
KEEPING_S = 2.0


class ServingOrder:
    """The rule by which waiters and slots meet.

    Between tenants, the one with the least leased per weight; within a tenant priority, then arrival. A head that cannot be served yet reserves what
    comes free, nobody of its tenant overtakes it, and other tenants are served meanwhile only up to their share of the pool. While there is a
    claimant, they are served only from slots that were kept for their own run, and of these only from what the claimant does not need.

    Args:
        table: the slots.
        line: who waits.
        claims: chooses the claimant.
        leased_by: how many leases each tenant holds in this pool.
        clock: monotonic time.
        weight: a tenant's weight, more than 0.
        admits: whether its tenant's own limits let an acquire be served now.
    """

    def __init__(
        self,
        table: SlotTable,
        line: WaitQueue,
        claims: Claims,
        leased_by: Counter[str],
        clock: Clock,
        weight: Callable[[str], float],
        admits: Callable[[AcquireRequest], bool],
    ) -> None:
        #: whether one tenant and run at a time is served: nothing separates the slots
        self.exclusive = False
        #: the tenant and run that was served last
        self.holder: Holder | None = None
        self._table = table
        self._line = line
        self._claims = claims
        self._leased_by = leased_by
        self._clock = clock
        self._weight = weight
        self._admits = admits

    def next(self, blocked: Collection[str]) -> Waiter | None:
        """Whose turn it is.

        Args:
            blocked: tenants whose head cannot be served now.
        """
        claimant = self._claims.claimant
        if claimant is not None and claimant.request.tenant not in blocked:
            return claimant
        heads = (head for head in self._line.heads() if head.request.tenant not in blocked and self._admits(head.request))
        return min(heads, key=lambda head: (self._leased_by[head.request.tenant] / head.weight, head.seq), default=None)

    def may_have(self, waiter: Waiter, *, others_wait: bool) -> bool:
        """Whether it can be served now.

        Args:
            waiter: whose turn it is.
            others_wait: somebody whose turn was before it cannot be served.
        """
        request = waiter.request
        kept = len(self.kept_for(request))
        if self._table.free_count + kept < request.count or not self._is_separate(request):
            return False
        if waiter is self._claims.claimant:
            return True
        if self._claims.claimant is not None:
            return request.count <= kept
        if kept < request.count and self._is_about_to_be_kept(waiter):
            return False
        # What was kept for this run comes from nobody's share.
        return not others_wait or request.count <= kept or self._leased_by[request.tenant] + request.count <= self._share(request.tenant)

    def kept_for(self, request: AcquireRequest) -> list[Slot]:
        """The slots that are kept for the run of this acquire."""
        if request.run_id is None or not self._table.counts[SlotState.KEPT]:
            return []
        return self._table.kept_for((request.tenant, request.run_id))

    def to_reclaim(self, blocked: Collection[Waiter]) -> list[Slot]:
        """Kept slots that shall become anyone's: as many as these waiters lack beyond what is free or about to be."""
        own = {(waiter.request.tenant, waiter.request.run_id) for waiter in blocked}
        others = (slot for slot in self._table.kept() if slot.keep not in own and self._table.slots_by_sandbox[slot.ref.sandbox_id].open)
        if any(waiter is self._claims.claimant and not self._is_separate(waiter.request) for waiter in blocked):
            return list(others)
        lacking = sum(waiter.request.count - len(self.kept_for(waiter.request)) for waiter in blocked)
        coming = self._table.coming + sum(1 for tenant, run_id in own if run_id is not None for _ in self._table.to_be_kept_for((tenant, run_id)))
        return list(itertools.islice(others, max(0, lacking - self._table.free_count - coming)))

    def _is_separate(self, request: AcquireRequest) -> bool:
        """Whether no other tenant or run would have slots beside this one's where nothing separates them."""
        counts = self._table.counts
        busy = counts[SlotState.LEASED] + counts[SlotState.RESETTING] + counts[SlotState.KEPT]
        return not self.exclusive or not busy or self.holder in (None, (request.tenant, request.run_id))

    def _share(self, tenant: str) -> float:
        # One slot at least: who has nothing is not shut out by a head that waits for many.
        active = {name for name, leased in self._leased_by.items() if leased} | set(self._line.tenants())
        return max(1.0, self._table.usable() * self._weight(tenant) / sum(self._weight(name) for name in active))

    def _is_about_to_be_kept(self, waiter: Waiter) -> bool:
        """Whether a slot with this run's files is worth waiting for, a moment: its processes are being ended."""
        request, now = waiter.request, self._clock.monotonic()
        if request.run_id is None or waiter.deadline <= now:
            return False
        return any(slot.since + KEEPING_S > now for slot in self._table.to_be_kept_for((request.tenant, request.run_id)))
