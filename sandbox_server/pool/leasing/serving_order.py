"""The order in which waiting acquires are served, and which kept slots are reclaimed for them. Decides, and changes nothing."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection

from sandbox_server.core.types import AcquireRequest, SlotState
from sandbox_server.pool.leasing.claims import Claims
from sandbox_server.pool.leasing.serving_rules import ServingRules
from sandbox_server.pool.leasing.slot_table import PoolSlot, RunKey, SlotTable
from sandbox_server.pool.leasing.wait_queue import Waiter, WaitQueue

#: How long an acquire waits for a slot that is about to be kept for its run, instead of taking another slot, in seconds.
WAIT_FOR_KEPT_SLOT_S = 2.0


class ServingOrder:
    """Decides which acquire is served next, and whether it can be served now.

    Among tenants, the one with the fewest leases in proportion to its weight is served first; within a tenant, the acquire with the highest priority,
    then the oldest. The first acquire of a tenant is its head. A head that cannot be served yet reserves the slots that come free: no acquire of its
    tenant is served before it, and other tenants are served meanwhile only up to their share of the pool.

    While there is a claimant, other acquires are served only from slots that are kept for their own run, and only as far as the claimant does not need
    those.

    Args:
        table: the slots.
        queue: the waiting acquires.
        claims: chooses the claimant.
        lease_count_by_tenant: how many leases of the pool each tenant holds.
        rules: the parameters.
    """

    def __init__(self, table: SlotTable, queue: WaitQueue, claims: Claims, lease_count_by_tenant: Counter[str], rules: ServingRules) -> None:
        #: whether only one run of one tenant is served at a time, because nothing isolates the slots from each other
        self.exclusive = False
        #: the run that was served last
        self.last_served: RunKey | None = None
        self._table = table
        self._queue = queue
        self._claims = claims
        self._lease_count_by_tenant = lease_count_by_tenant
        self._rules = rules

    def next_waiter(self, blocked_tenants: Collection[str]) -> Waiter | None:
        """Return the waiter to serve next; None if there is none.

        Args:
            blocked_tenants: the tenants whose head cannot be served now.
        """
        claimant = self._claims.claimant
        if claimant is not None and claimant.request.tenant not in blocked_tenants:
            return claimant
        heads = (head for head in self._queue.heads() if head.request.tenant not in blocked_tenants and self._rules.admits(head.request))
        return min(heads, key=lambda head: (self._lease_count_by_tenant[head.request.tenant] / head.weight, head.seq), default=None)

    def can_be_served(self, waiter: Waiter, *, others_wait: bool) -> bool:
        """Return whether a waiter can be served now.

        Args:
            waiter: the waiter that `next_waiter` returned.
            others_wait: whether a waiter that comes before it cannot be served.
        """
        request = waiter.request
        kept_count = len(self.kept_for(request))
        if self._table.free_count + kept_count < request.count or not self._is_separate(request):
            return False
        if waiter is self._claims.claimant:
            return True
        if self._claims.claimant is not None:
            return request.count <= kept_count
        if kept_count < request.count and self._awaits_kept_slot(waiter):
            return False
        # A slot that was kept for this run does not count towards the share of its tenant.
        return not others_wait or request.count <= kept_count or self._lease_count_by_tenant[request.tenant] + request.count <= self._share(request.tenant)

    def kept_for(self, request: AcquireRequest) -> list[PoolSlot]:
        """Return the slots that are kept for the run of an acquire."""
        if request.run_id is None or not self._table.counts[SlotState.KEPT]:
            return []
        return self._table.kept_for((request.tenant, request.run_id))

    def to_reclaim(self, blocked: Collection[Waiter]) -> list[PoolSlot]:
        """Return the kept slots to reclaim: as many as these waiters lack, beyond the slots that are free or about to be free.

        Args:
            blocked: the waiters that cannot be served now.
        """
        own_runs = {(waiter.request.tenant, waiter.request.run_id) for waiter in blocked}
        reclaimable = (slot for slot in self._table.kept() if slot.keep not in own_runs and not self._table.slots_by_sandbox[slot.ref.sandbox_id].is_cordoned)
        if any(waiter is self._claims.claimant and not self._is_separate(waiter.request) for waiter in blocked):
            return list(reclaimable)
        lacking = sum(waiter.request.count - len(self.kept_for(waiter.request)) for waiter in blocked)
        about_to_be_kept = sum(len(self._table.about_to_be_kept_for(run)) for run in own_runs if run[1] is not None)
        coming = self._table.free_count + self._table.becoming_free_count + about_to_be_kept
        return list(itertools.islice(reclaimable, max(0, lacking - coming)))

    def _is_separate(self, request: AcquireRequest) -> bool:
        """Return whether serving the acquire keeps different runs out of slots that nothing isolates from each other."""
        counts = self._table.counts
        busy = counts[SlotState.LEASED] + counts[SlotState.RESETTING] + counts[SlotState.KEPT]
        return not self.exclusive or not busy or self.last_served in (None, (request.tenant, request.run_id))

    def _share(self, tenant: str) -> float:
        """Return the tenant's share of the usable slots by weight, and at least one: a head that waits for many slots must not block a tenant that has none."""
        active = {name for name, count in self._lease_count_by_tenant.items() if count} | set(self._queue.tenants())
        return max(1.0, self._table.usable() * self._rules.weight(tenant) / sum(self._rules.weight(name) for name in active))

    def _awaits_kept_slot(self, waiter: Waiter) -> bool:
        """Return whether the acquire waits a moment for a slot with the files of its run, whose processes are being ended now."""
        request, now = waiter.request, self._rules.clock.monotonic()
        if request.run_id is None or waiter.deadline <= now:
            return False
        return any(slot.since + WAIT_FOR_KEPT_SLOT_S > now for slot in self._table.about_to_be_kept_for((request.tenant, request.run_id)))
