"""The choice of the claimant: the waiting acquire for which the pool holds every slot that comes free, so that no acquire waits for ever."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sandbox_server.pool.leasing.serving_rules import ServingRules
from sandbox_server.pool.leasing.wait_queue import Waiter, WaitQueue


@dataclass(frozen=True, slots=True)
class ClaimPause:
    """The time for which a tenant may not claim after its claim ended without being served. It is as long as that claim was.

    Attributes:
        claimed_s: how long the claim lasted, in seconds.
        until: when the tenant may claim again, monotonic.
        exempt: the waiter that was the claimant, if it is still the first of its tenant and only could not be served for a while: it may claim
            again at once.
    """

    claimed_s: float
    until: float
    exempt: Waiter | None


class Claims:
    """Chooses the claimant.

    The age of a tenant's first waiter counts from the moment at which it became the first. A first waiter whose age has reached `claim_after_s` may
    claim. The oldest of them becomes the claimant. It stays the claimant until it is served, leaves the queue, is no longer the first of its tenant,
    or could not be served even if every lease ended.

    The next waiter of the claimant's tenant is younger than every waiter that is already the first of its tenant. So at most one claimant of each
    other tenant is served before any of them.

    A tenant whose claimant was not served may claim again only after as long as that claim lasted. Otherwise claims of one tenant that end one after
    the other could hold the free slots for ever, although no acquire is served with them.

    Args:
        queue: the waiting acquires.
        rules: the parameters.
        lease_count_by_tenant: how many leases of the pool each tenant holds. A tenant's own leases cannot be expected to end while it waits.
    """

    def __init__(self, queue: WaitQueue, rules: ServingRules, lease_count_by_tenant: Mapping[str, int]) -> None:
        self.claimant: Waiter | None = None
        self._queue = queue
        self._rules = rules
        self._lease_count_by_tenant = lease_count_by_tenant
        self._claimed_at = 0.0
        self._pauses: dict[str, ClaimPause] = {}

    def update_claimant(self) -> None:
        """End the claim if the claimant may not claim any more, and choose a new claimant if there is none."""
        if self.claimant is not None and not (self._is_first(self.claimant) and self._may_claim(self.claimant)):
            self._end_claim(self.claimant)
        if self.claimant is None:
            now = self._rules.clock.monotonic()
            old_enough = (head for head in self._queue.heads() if self._may_claim_from(head) <= now)
            self.claimant = next(filter(self._may_claim, old_enough), None)
            self._claimed_at = now

    def next_claim_at(self) -> float:
        """Return when a waiter becomes old enough to claim, monotonic; infinite while there is a claimant."""
        if self.claimant is not None:
            return float("inf")
        now = self._rules.clock.monotonic()
        return min((at for head in self._queue.heads() if (at := self._may_claim_from(head)) > now), default=float("inf"))

    def _end_claim(self, claimant: Waiter) -> None:
        self.claimant = None
        tenant, now = claimant.request.tenant, self._rules.clock.monotonic()
        previous = self._pauses.pop(tenant, None)
        if claimant.leases:
            return
        claimed_s = now - self._claimed_at
        if previous is not None and previous.exempt is claimant:
            claimed_s += previous.claimed_s
        self._pauses[tenant] = ClaimPause(claimed_s, now + claimed_s, claimant if self._is_first(claimant) else None)

    def _may_claim_from(self, head: Waiter) -> float:
        """Return from when on a first waiter is old enough to claim, monotonic."""
        old_enough_at, pause = head.head_since + self._rules.claim_after_s, self._pauses.get(head.request.tenant)
        return old_enough_at if pause is None or pause.exempt is head else max(old_enough_at, pause.until)

    def _is_first(self, waiter: Waiter) -> bool:
        return waiter.waiting and self._queue.head(waiter.request.tenant) is waiter

    def _may_claim(self, waiter: Waiter) -> bool:
        # Where its tenant holds so many leases that it cannot be served before some of them end, no slots are held for it until then.
        own_leases = self._lease_count_by_tenant.get(waiter.request.tenant, 0)
        return self._rules.admits(waiter.request) and waiter.request.count <= self._rules.capacity() - own_leases
