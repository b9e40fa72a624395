"""The schedule of faults, which depends on nothing but the seed."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

WEIGHTS: Final[Mapping[str, int]] = {
    "service.kill": 50,
    "agent.kill": 10,
    "agent.stop": 12,
    "cut": 16,
    "link.cut": 14,
    "disk.fill": 8,
    "clock.jump": 6,
    "state.delete": 6,
}
GAP_S = (0.2, 3.5)
HASTY = 0.15
"""The share of faults that do not wait until the service is ready, so that they disturb its start and its recovery as well."""
LASTS_S: Final[Mapping[str, tuple[float, float]]] = {
    # Between the death of a service and its next start.
    "service.kill": (0.0, 0.6),
    "agent.stop": (0.2, 2.0),
    "disk.fill": (0.3, 2.0),
}
JUMPS_S = (-86_400, -3_600, -30, 0, 30, 3_600, 86_400)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One fault.

    Args:
        what: the kind of fault.
        after_s: the pause before it, in seconds.
        hasty: whether the pause begins at once. Otherwise it begins when the service is ready.
        share: which agents or connections it hits, from 0 to 1.
        lasts_s: how long it lasts, in seconds; 0 for a fault that does not last.
        jump_s: the offset of the wall clock from now on, in seconds.
    """

    what: str
    after_s: float
    hasty: bool
    share: float
    lasts_s: float = 0.0
    jump_s: int = 0


def schedule(seed: int, possible: Collection[str] = tuple(WEIGHTS)) -> Iterator[Fault]:
    """Yield the faults of a run, without end. Faults that are not possible on this machine are left out, which does not change the others.

    Args:
        seed: the seed of the run.
        possible: the kinds of fault that can be injected on this machine.
    """
    chance = random.Random(f"faults of {seed}")
    while True:
        what = chance.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        fault = Fault(
            what=what,
            after_s=chance.uniform(*GAP_S),
            hasty=chance.random() < HASTY,
            share=chance.random(),
            lasts_s=chance.uniform(*LASTS_S.get(what, (0.0, 0.0))),
            jump_s=chance.choice(JUMPS_S),
        )
        if what in possible:
            yield fault
