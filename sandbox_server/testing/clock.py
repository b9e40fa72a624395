"""A clock for tests: its time passes only when a test advances it."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable

from sandbox_server.pool.timers import Timers

# After how many turns in a row in which no other task was ready `settle` returns. More than one, so that what arrives through a socket is seen as well.
_IDLE_TURNS = 3


class FakeTimer:
    """A planned call of a function."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        """Do not call the function any more."""
        self.callback = None


class FakeClock:
    """A clock, and timers that follow it.

    Args:
        monotonic_s: the first monotonic time, in seconds.
        wall_s: the first wall-clock time, in Unix seconds.
    """

    def __init__(self, monotonic_s: float = 1000.0, wall_s: float = 1_800_000_000.0) -> None:
        self._monotonic = monotonic_s
        self._wall = wall_s
        self._timers: list[tuple[float, int, FakeTimer]] = []
        self._seq = itertools.count()

    def monotonic(self) -> float:
        """The monotonic time, in seconds. `jump_wall` does not change it."""
        return self._monotonic

    def wall(self) -> float:
        """The wall-clock time, in Unix seconds."""
        return self._wall

    def jump_wall(self, by_s: float) -> None:
        """Set the wall clock `by_s` seconds ahead, or back if it is negative."""
        self._wall += by_s

    def pass_time(self, by_s: float) -> None:
        """Advance both clocks by `by_s` seconds without calling any timer. For synchronous code."""
        self._monotonic += by_s
        self._wall += by_s

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> FakeTimer:
        """Call a function once `delay_s` seconds have passed."""
        timer = FakeTimer(callback)
        heapq.heappush(self._timers, (self._monotonic + max(0.0, delay_s), next(self._seq), timer))
        return timer

    async def sleep(self, delay_s: float) -> None:
        """Return once `delay_s` seconds have passed."""
        await sleep_with_timer(self, delay_s)

    async def advance(self, by_s: float) -> None:
        """Advance both clocks by `by_s` seconds. Timers that are due at the same time are called together, as an event loop does; then `settle` runs."""
        await settle()
        until = self._monotonic + by_s
        while self._timers and self._timers[0][0] <= until:
            self.pass_time(max(0.0, self._timers[0][0] - self._monotonic))
            if self._call_due_timers():
                await settle()
        self.pass_time(max(0.0, until - self._monotonic))
        await settle()

    def _call_due_timers(self) -> bool:
        """Call the functions of the timers whose time has come. Returns whether there were any that had not been cancelled."""
        due: list[FakeTimer] = []
        while self._timers and self._timers[0][0] <= self._monotonic:
            due.append(heapq.heappop(self._timers)[2])
        has_called = False
        for timer in due:
            if timer.callback is not None:  # an earlier one of them may cancel a later one
                timer.callback()
                has_called = True
        return has_called


async def sleep_with_timer(timers: Timers, delay_s: float) -> None:
    """Return once a timer has fired: the `sleep` of a fake clock, whose time its timers follow.

    Args:
        timers: the timers of the clock.
        delay_s: when the timer fires, in seconds of the clock.
    """
    woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    timer = timers.call_later(delay_s, lambda: None if woken.done() else woken.set_result(None))
    try:
        await woken
    finally:
        timer.cancel()


async def settle(turns: int = 60) -> None:
    """Let every task run until it waits for something that a test controls. The fakes need no more than a few turns of the event loop.

    Args:
        turns: how many turns of the event loop to wait for at most. It returns after a few turns in a row in which no other task had anything to do.
    """
    ready = getattr(asyncio.get_running_loop(), "_ready", None)  # asyncio has no public way to ask for this, and other event loops do not tell
    idle_turns = 0
    for _ in range(turns):
        await asyncio.sleep(0)
        idle_turns = idle_turns + 1 if ready is not None and not ready else 0
        if idle_turns == _IDLE_TURNS:
            return
