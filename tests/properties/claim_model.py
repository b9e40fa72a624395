"""A model of the rules for claimants: which waiter must be the claimant, how many slots it must get, and how many claimants come before it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from sandbox_server.pool.leasing.wait_queue import Waiter


class ClaimModel:
    """Tracks the first waiter of each tenant, and which waiter must be the claimant.

    Args:
        claim_after_s: the age at which the first waiter of a tenant may claim, in seconds.
        tenants: how many tenants there are.
        now: returns the monotonic time in seconds.
        may_claim: returns whether slots may be held for a waiter, given the number of leases of each tenant.
    """

    def __init__(self, claim_after_s: float, tenants: int, now: Callable[[], float], may_claim: Callable[[Waiter, Counter[str]], bool]) -> None:
        self.claimant: Waiter | None = None
        self._claim_after_s = claim_after_s
        self._tenants = tenants
        self._now = now
        self._may_claim = may_claim
        self._firsts: dict[str, Waiter] = {}
        self._since: dict[int, float] = {}
        #: the first waiters, in the order in which they became the first
        self._order: list[Waiter] = []
        #: by first waiter: the waiters that have claimed since it became the first; None if it could not claim itself at some time since then
        self._went_before: dict[int, set[int] | None] = {}
        #: how many slots must still come free until the claimant is served, and how many it could have had at the last check
        self._lacks = 0
        self._had = 0
        self._claimed_at = 0.0
        #: when each tenant may claim again, after a claimant of its own that was not served
        self._may_claim_again: dict[str, float] = {}
        #: by tenant: the claimant that could not be served for a while, and how long slots were held for it until then
        self._interrupted: dict[str, tuple[Waiter, float]] = {}

    def changed(self, waiting: Sequence[Waiter]) -> None:
        """Update the first waiters after a waiter has arrived, left or been served. `waiting`: every waiter."""
        firsts: dict[str, Waiter] = {}
        for waiter in sorted(waiting, key=lambda waiter: (-waiter.request.priority, waiter.seq)):
            firsts.setdefault(waiter.request.tenant, waiter)
        for tenant, waiter in firsts.items():
            if self._firsts.get(tenant) is not waiter:
                self._since[waiter.seq], self._went_before[waiter.seq] = self._now(), set()
                self._order = [*(other for other in self._order if other is not waiter), waiter]
        self._firsts = firsts
        self._order = [waiter for waiter in self._order if firsts.get(waiter.request.tenant) is waiter]

    def look(self, waiting: Sequence[Waiter], leased: Counter[str], has: Callable[[Waiter], int]) -> None:
        """Determine which waiter must be the claimant now.

        Args:
            waiting: every waiter.
            leased: the number of leases of each tenant.
            has: returns how many slots a waiter could be granted now: free ones, and those that are kept for its run.
        """
        self.changed(waiting)
        firsts = self._firsts
        if self.claimant is not None and not (firsts.get(self.claimant.request.tenant) is self.claimant and self._may_claim(self.claimant, leased)):
            self._end(self.claimant)
            self.claimant = None
        if self.claimant is None:
            aged = [waiter for waiter in self._order if self._since[waiter.seq] + self._claim_after_s <= self._now()]
            self.claimant = next((waiter for waiter in aged if self._may_claim(waiter, leased) and not self._rests(waiter)), None)
            if self.claimant is not None:
                self._begin(self.claimant, leased, has)

    def _end(self, claimant: Waiter) -> None:
        tenant, claimed_s = claimant.request.tenant, self._now() - self._claimed_at
        waiter, earlier_s = self._interrupted.pop(tenant, (None, 0.0))
        claimed_s += earlier_s if waiter is claimant else 0.0
        self._may_claim_again[tenant] = self._now() + (0.0 if claimant.leases else claimed_s)
        if self._firsts.get(tenant) is claimant:
            self._interrupted[tenant] = (claimant, claimed_s)

    def _rests(self, waiter: Waiter) -> bool:
        tenant = waiter.request.tenant
        is_interrupted = tenant in self._interrupted and self._interrupted[tenant][0] is waiter
        return not is_interrupted and self._now() < self._may_claim_again.get(tenant, 0.0)

    def _begin(self, claimant: Waiter, leased: Counter[str], has: Callable[[Waiter], int]) -> None:
        before = self._went_before[claimant.seq]
        assert before is None or len(before) < self._tenants, "more than one claimant of another tenant went before this one"
        for waiter in self._firsts.values():
            passed = self._went_before[waiter.seq]
            if not self._may_claim(waiter, leased) or self._rests(waiter):
                self._went_before[waiter.seq] = None
            elif passed is not None and waiter is not claimant:
                passed.add(claimant.seq)
        self._claimed_at = self._now()
        self._had = has(claimant)
        self._lacks = claimant.request.count - self._had

    def begin_assigning(self, has: Callable[[Waiter], int]) -> None:
        """Note how many slots came free or were lost since the last check. To be called before slots are assigned."""
        if self.claimant is not None:
            came_ready = has(self.claimant) - self._had
            self._lacks -= came_ready
            self._had += came_ready

    def granted(self, waiter: Waiter) -> None:
        """Check a grant: while there is a claimant, other waiters get only slots that were kept for their own run."""
        if self.claimant is not None and waiter is not self.claimant:
            assert all(lease.workspace_kept for lease in waiter.leases), "a slot that came free went to somebody else while it was held for the claimant"

    def end_assigning(self, has: Callable[[Waiter], int]) -> None:
        """Check the claimant after every waiter was served that could be."""
        if self.claimant is not None:
            assert has(self.claimant) == self._had, "slots that were held for the claimant are gone"
            assert self._lacks > 0, "as many slots came ready as the claimant lacked, and it still waits"
