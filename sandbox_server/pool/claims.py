"""The claimant of one pool: the waiting acquire for which the pool holds every slot that comes free, so that no head of a tenant starves."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from sandbox_server.core.clock import Clock
from sandbox_server.core.types import AcquireRequest
from sandbox_server.pool.waiting import Waiter, WaitingLine

CLAIM_AFTER_S = 5.0


class Claims:
    """Chooses the claimant.

    The first waiter of each tenant ages from when it became the first. Once it has aged `claim_after_s`, the oldest of them becomes the claimant, and
    stays it until it is served, leaves the line, is not its tenant's first any more, or could not be served whatever is given back.
    A tenant's next waiter is younger than all who are first already, so at most one claimant of every other tenant goes before any of them.

    Args:
        line: who waits.
        clock: its monotonic time is the age.
        claim_after_s: at what age a tenant's first may claim, in seconds.
        admits: whether its tenant's own limits let an acquire be served now.
        capacity: how many slots the pool could give at once when every lease had ended and every sandbox that it may have was there.
    """

    def __init__(self, line: WaitingLine, clock: Clock, claim_after_s: float, admits: Callable[[AcquireRequest], bool], capacity: Callable[[], float]) -> None:
        self.claimant: Waiter | None = None
        self._line = line
        self._clock = clock
        self._claim_after_s = claim_after_s
        self._admits = admits
        self._capacity = capacity

    def update(self) -> None:
        """Let the claimant be who it must be now."""
        if self.claimant is not None and not (self._is_first(self.claimant) and self._may_claim(self.claimant)):
            self.claimant = None
        if self.claimant is None:
            now = self._clock.monotonic()
            aged = itertools.takewhile(lambda head: head.first_since + self._claim_after_s <= now, self._line.heads())
            self.claimant = next(filter(self._may_claim, aged), None)

    def next_due(self) -> float:
        """When there may be a claimant where there is none, although nothing happens, monotonic."""
        if self.claimant is not None:
            return float("inf")
        now = self._clock.monotonic()
        return next((at for head in self._line.heads() if (at := head.first_since + self._claim_after_s) > now), float("inf"))

    def _is_first(self, waiter: Waiter) -> bool:
        return waiter.waiting and self._line.head(waiter.request.tenant) is waiter

    def _may_claim(self, waiter: Waiter) -> bool:
        return self._admits(waiter.request) and waiter.request.count <= self._capacity()
