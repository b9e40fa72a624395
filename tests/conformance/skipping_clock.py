"""The machine's own time, of which a test can skip a part: what is planned for the skipped time happens at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from sandbox_server.core.clock import SystemClock
from sandbox_server.testing.clock import sleep_with_timer


@dataclass(eq=False)
class SkippableTimer:
    """A callback that is planned for a time of a `SkippingClock`.

    Args:
        clock: the clock.
        due: when the callback is due, in monotonic seconds of the clock.
        callback: what is called then.
    """

    clock: SkippingClock
    due: float
    callback: Callable[[], None]

    def __post_init__(self) -> None:
        self.reschedule()

    def reschedule(self) -> None:
        """Plan the callback by the present state of the clock."""
        self._handle = asyncio.get_running_loop().call_later(max(0.0, self.due - self.clock.monotonic()), self._fire)

    def _fire(self) -> None:
        self.clock.timers.discard(self)
        self.callback()

    def cancel(self) -> None:
        """Never call the callback."""
        self.clock.timers.discard(self)
        self._handle.cancel()


class SkippingClock(SystemClock):
    """A clock and its timers, for use with real processes: time passes by itself, and `skip` makes it jump."""

    def __init__(self) -> None:
        self.timers: set[SkippableTimer] = set()
        self._skipped_s = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self._skipped_s

    def wall(self) -> float:
        return super().wall() + self._skipped_s

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> SkippableTimer:
        """Call back after so many seconds of this clock."""
        timer = SkippableTimer(self, self.monotonic() + delay_s, callback)
        self.timers.add(timer)
        return timer

    async def sleep(self, delay_s: float) -> None:
        """Return after so many seconds of this clock."""
        await sleep_with_timer(self, delay_s)

    async def skip(self, seconds: int) -> None:
        """Skip so many seconds, one after the other, with a moment of real time for what each of them sets in motion."""
        for _ in range(seconds):
            self._skipped_s += 1.0
            for timer in list(self.timers):
                timer._handle.cancel()
                timer.reschedule()
            await asyncio.sleep(0.01)
