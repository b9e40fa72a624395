"""The parameters of the rules by which acquires are served."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sandbox_server.core.clock import Clock
from sandbox_server.core.types import AcquireRequest

CLAIM_AFTER_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingRules:
    """Parameters that the choice of the claimant and the order of serving share.

    Attributes:
        clock: its monotonic time is used.
        weight: returns the weight of a tenant, more than 0.
        admits: returns whether the limits of its tenant allow an acquire to be served now.
        capacity: returns how many slots the pool could grant at once if every lease had ended and every sandbox that it may have were ready.
        claim_after_s: how long an acquire is the first of its tenant before the pool may hold slots for it, in seconds.
    """

    clock: Clock
    weight: Callable[[str], float]
    admits: Callable[[AcquireRequest], bool]
    capacity: Callable[[], float]
    claim_after_s: float = CLAIM_AFTER_S
