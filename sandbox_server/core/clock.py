"""Monotonic time for deadlines, wall time for records."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Where the service reads time. `testing.FakeClock` is the other one."""

    def monotonic(self) -> float:
        """Seconds that never jump; for deadlines."""
        ...

    def wall(self) -> float:
        """Unix seconds, UTC; for what a person or a client reads."""
        ...


def wall_at(clock: Clock, when: float) -> float:
    """What the wall clock shows at a monotonic time, if it goes on from where it stands now: an earlier jump of it moves nothing."""
    return clock.wall() + when - clock.monotonic()


def monotonic_at(clock: Clock, when: float) -> float:
    """The monotonic time of a moment in the past that the wall clock's time was noted of; now, where that is still to come."""
    return clock.monotonic() - max(0.0, clock.wall() - when)


class SystemClock:
    """The machine's own clocks."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()
