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


class SystemClock:
    """The machine's own clocks."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()
