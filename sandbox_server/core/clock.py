"""The clocks: monotonic time for deadlines, wall-clock time for records and clients."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """The clock that the service reads. `SystemClock` is the real one, `testing.FakeClock` the one for tests."""

    def monotonic(self) -> float:
        """Return a time in seconds that never jumps; for deadlines."""
        ...

    def wall(self) -> float:
        """Return the wall-clock time in Unix seconds, UTC; for times that a person or a client reads."""
        ...


def wall_at(clock: Clock, when: float) -> float:
    """Return the wall-clock time of a monotonic time, reckoned from what the wall clock shows now; its earlier jumps have no effect."""
    return clock.wall() + when - clock.monotonic()


def monotonic_at(clock: Clock, when: float) -> float:
    """Return the monotonic time of a past wall-clock time; the monotonic time of now, if the wall-clock time is in the future."""
    return clock.monotonic() - max(0.0, clock.wall() - when)


class SystemClock:
    """The clocks of the machine."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()
