"""The background loop of a pool: it looks when something happened, and when something is due."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from sandbox_server.core.clock import Clock

log = logging.getLogger(__name__)

MAX_SLEEP_S = 1.0


class Cancellable(Protocol):
    """A callback that is planned."""

    def cancel(self) -> None:
        """Forget it."""
        ...


class Timers(Protocol):
    """How to wait. `testing.FakeClock` is the other one."""

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Cancellable:
        """Call back after so many seconds."""
        ...

    async def sleep(self, delay_s: float) -> None:
        """Return after so many seconds."""
        ...


class LoopTimers:
    """The running event loop's own timers."""

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Cancellable:
        return asyncio.get_running_loop().call_later(delay_s, callback)

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)


class Ticker:
    """Calls `tick` soon after each `kick`, when `tick` said that something is due, and at least every `MAX_SLEEP_S`.

    Args:
        tick: does what is due and returns when the next thing is, monotonic seconds.
        clock: the clock that `tick` speaks of.
        timers: how to wait.
    """

    def __init__(self, tick: Callable[[], float], clock: Clock, timers: Timers) -> None:
        self._tick = tick
        self._clock = clock
        self._timers = timers
        self._timer: Cancellable | None = None
        self._soon: asyncio.Handle | None = None
        self._running = False

    def start(self) -> None:
        """Begin."""
        self._running = True
        self.kick()

    def stop(self) -> None:
        """End; nothing is called any more."""
        self._running = False
        for planned in (self._timer, self._soon):
            if planned is not None:
                planned.cancel()
        self._timer = self._soon = None

    def kick(self) -> None:
        """Something happened: look in the next turn of the loop. Many kicks in one turn are one look."""
        if self._running and self._soon is None:
            self._soon = asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        self._soon = None
        if self._timer is not None:
            self._timer.cancel()
        due = 0.0
        try:
            due = self._tick()
        except Exception:  # the edge of the loop: one bad tick must not be the last
            log.exception("a tick failed")
            due = self._clock.monotonic() + MAX_SLEEP_S
        if self._running:
            delay_s = min(max(due - self._clock.monotonic(), 0.0), MAX_SLEEP_S)
            self._timer = self._timers.call_later(delay_s, self._fire)

    def _fire(self) -> None:
        self._timer = None
        self._run()
