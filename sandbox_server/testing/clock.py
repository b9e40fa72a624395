"""Time that stands still until it is told to move."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable


class FakeTimer:
    """A callback that is planned."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        """Forget it."""
        self.callback = None


class FakeClock:
    """A clock and the timers that go by it.

    Args:
        monotonic_s: where the monotonic clock stands at first.
        wall_s: where the wall clock stands at first.
    """

    def __init__(self, monotonic_s: float = 1000.0, wall_s: float = 1_800_000_000.0) -> None:
        self._monotonic = monotonic_s
        self._wall = wall_s
        self._timers: list[tuple[float, int, FakeTimer]] = []
        self._seq = itertools.count()

    def monotonic(self) -> float:
        """Seconds that never jump."""
        return self._monotonic

    def wall(self) -> float:
        """Unix seconds."""
        return self._wall

    def jump_wall(self, by_s: float) -> None:
        """Somebody sets the machine's clock."""
        self._wall += by_s

    def pass_time(self, by_s: float) -> None:
        """Both clocks go on; no timer fires. For synchronous code."""
        self._monotonic += by_s
        self._wall += by_s

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> FakeTimer:
        """Call back once so many seconds have passed."""
        timer = FakeTimer(callback)
        heapq.heappush(self._timers, (self._monotonic + max(0.0, delay_s), next(self._seq), timer))
        return timer

    async def sleep(self, delay_s: float) -> None:
        """Return once so many seconds have passed."""
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        timer = self.call_later(delay_s, lambda: None if woken.done() else woken.set_result(None))
        try:
            await woken
        finally:
            timer.cancel()

    async def advance(self, by_s: float) -> None:
        """Let time pass, timer by timer, and let everything that they set in motion settle after each."""
        await settle()
        until = self._monotonic + by_s
        while self._timers and self._timers[0][0] <= until:
            at, _, timer = heapq.heappop(self._timers)
            if timer.callback is not None:
                self.pass_time(max(0.0, at - self._monotonic))
                timer.callback()
                await settle()
        self.pass_time(max(0.0, until - self._monotonic))
        await settle()


async def settle(turns: int = 60) -> None:
    """Let the event loop turn until what is ready to run has run. Nothing in the fakes waits for anything but the loop."""
    for _ in range(turns):
        await asyncio.sleep(0)
