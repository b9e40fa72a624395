"""Which faults come when: made from the seed alone, before anything runs."""

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
"""How many faults do not wait until the service is ready again, so that its start and its recovery are disturbed too."""
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
        what: which kind.
        after_s: how long after the one before, in seconds.
        hasty: that time passes while the service may still be starting; else it begins when the service is ready.
        share: picks its victims, 0 to 1.
        lasts_s: how long, where it lasts.
        jump_s: what the wall clock is off by from now on.
    """

    what: str
    after_s: float
    hasty: bool
    share: float
    lasts_s: float = 0.0
    jump_s: int = 0


def schedule(seed: int, possible: Collection[str] = tuple(WEIGHTS)) -> Iterator[Fault]:
    """The faults of a run, without end. What is not possible on this machine is left out, and the rest stays as it is.

    Args:
        seed: all there is to it.
        possible: the kinds that can be done here.
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
