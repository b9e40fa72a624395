"""The background loop of a pool: it runs when something has changed, and when something is due."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from sandbox_server.core.clock import Clock
from sandbox_server.pool.timers import Cancellable, Timers

log = logging.getLogger(__name__)

MAX_SLEEP_S = 1.0


class Ticker:
    """Calls a function soon after each `request_tick`, when that function said that something would be due, and at least every `MAX_SLEEP_S`.

    Args:
        tick: does everything that is due, and returns the monotonic time at which something will be due next.
        clock: the clock of that time.
        timers: how to wait.
    """

    def __init__(self, tick: Callable[[], float], clock: Clock, timers: Timers) -> None:
        self._tick = tick
        self._clock = clock
        self._timers = timers
        self._timer: Cancellable | None = None
        self._soon: asyncio.Handle | None = None
        self._running = False

    def start_ticking(self) -> None:
        """Begin to call the function."""
        self._running = True
        self.request_tick()

    def stop_ticking(self) -> None:
        """Never call the function again."""
        self._running = False
        for planned in (self._timer, self._soon):
            if planned is not None:
                planned.cancel()
        self._timer = self._soon = None

    def request_tick(self) -> None:
        """Call the function in the next turn of the event loop. Several requests in one turn lead to one call."""
        if self._running and self._soon is None:
            self._soon = asyncio.get_running_loop().call_soon(self._run_tick)

    def _run_tick(self) -> None:
        self._soon = None
        if self._timer is not None:
            self._timer.cancel()
        due = 0.0
        try:
            due = self._tick()
        except Exception:  # a fault in one tick must not end the loop
            log.exception("a tick failed")
            due = self._clock.monotonic() + MAX_SLEEP_S
        if self._running:
            delay_s = min(max(due - self._clock.monotonic(), 0.0), MAX_SLEEP_S)
            self._timer = self._timers.call_later(delay_s, self._run_timed_tick)

    def _run_timed_tick(self) -> None:
        self._timer = None
        self._run_tick()
