"""The claimant of one pool: the waiting acquire for which the pool holds every slot that comes free, so that no head of a tenant starves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sandbox_server.core.clock import Clock
from sandbox_server.core.types import AcquireRequest
from sandbox_server.pool.leasing.wait_queue import Waiter, WaitQueue

CLAIM_AFTER_S = 5.0


@dataclass(frozen=True, slots=True)
class Rest:
    """A tenant's claim ended although it was not served, and the tenant does not claim again for as long as that claim lasted.

    Args:
        claimed_s: how long it lasted, in seconds.
        until: when the tenant may claim again, monotonic.
        spared: who may claim at once all the same: the waiter that was claimant, where it could not be served for a while and is still first.
    """

    claimed_s: float
    until: float
    spared: Waiter | None


class Claims:
    """Chooses the claimant.

    The first waiter of each tenant ages from when it became the first. Once it has aged `claim_after_s`, the oldest of them becomes the claimant, and
    stays it until it is served, leaves the line, is not its tenant's first any more, or could not be served whatever is given back.
    A tenant's next waiter is younger than all who are first already, so at most one claimant of every other tenant goes before any of them.
    A tenant whose claimant ends unserved claims again only after as long as that claim lasted: one claim after the other could else hold the slots for
    ever, and nobody would ever be served by it.

    Args:
        line: who waits.
        clock: its monotonic time is the age.
        claim_after_s: at what age a tenant's first may claim, in seconds.
        admits: whether its tenant's own limits let an acquire be served now.
        capacity: how many slots the pool could give at once when every lease had ended and every sandbox that it may have was there.
        leased_by: how many leases of the pool each tenant holds; a tenant's own cannot end for what it waits for.
    """

    def __init__(
        self,
        line: WaitQueue,
        clock: Clock,
        claim_after_s: float,
        admits: Callable[[AcquireRequest], bool],
        capacity: Callable[[], float],
        leased_by: Mapping[str, int],
    ) -> None:
        self.claimant: Waiter | None = None
        self._line = line
        self._clock = clock
        self._claim_after_s = claim_after_s
        self._admits = admits
        self._capacity = capacity
        self._leased_by = leased_by
        self._claimed_at = 0.0
        self._rests: dict[str, Rest] = {}

    def update(self) -> None:
        """Let the claimant be who it must be now."""
        if self.claimant is not None and not (self._is_first(self.claimant) and self._may_claim(self.claimant)):
            self._end(self.claimant)
        if self.claimant is None:
            now = self._clock.monotonic()
            aged = (head for head in self._line.heads() if self._due(head) <= now)
            self.claimant = next(filter(self._may_claim, aged), None)
            self._claimed_at = now

    def next_due(self) -> float:
        """When there may be a claimant where there is none, although nothing happens, monotonic."""
        if self.claimant is not None:
            return float("inf")
        now = self._clock.monotonic()
        return min((due for head in self._line.heads() if (due := self._due(head)) > now), default=float("inf"))

    def _end(self, claimant: Waiter) -> None:
        """It is the claimant no more."""
        self.claimant = None
        tenant, now = claimant.request.tenant, self._clock.monotonic()
        before = self._rests.pop(tenant, None)
        if claimant.leases:
            return
        claimed_s = now - self._claimed_at
        if before is not None and before.spared is claimant:
            claimed_s += before.claimed_s
        self._rests[tenant] = Rest(claimed_s, now + claimed_s, claimant if self._is_first(claimant) else None)

    def _due(self, head: Waiter) -> float:
        """From when on it may claim, monotonic."""
        aged, rest = head.first_since + self._claim_after_s, self._rests.get(head.request.tenant)
        return aged if rest is None or rest.spared is head else max(aged, rest.until)

    def _is_first(self, waiter: Waiter) -> bool:
        return waiter.waiting and self._line.head(waiter.request.tenant) is waiter

    def _may_claim(self, waiter: Waiter) -> bool:
        # It cannot be served before its tenant has given back leases of its own: nothing is held for it until then.
        own = self._leased_by.get(waiter.request.tenant, 0)
        return self._admits(waiter.request) and waiter.request.count <= self._capacity() - own
