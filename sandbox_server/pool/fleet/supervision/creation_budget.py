"""Limits how fast sandboxes are created on one backend, whatever the number of pools and clients that want them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sandbox_server.backends.base import RateLimited
from sandbox_server.core.clock import Clock
from sandbox_server.pool.timers import Timers

log = logging.getLogger(__name__)

FIRST_CREATION_PAUSE_S = 1.0
LONGEST_CREATION_PAUSE_S = 60.0
#: The rounding error that a sum of floats may have.
ROUNDING_S = 1e-6


class CreationBudget:
    """Limits how many creations are under way at once, how many begin in a second, and lets none begin while the backend itself limits the rate.

    The rate follows the generic cell rate algorithm (ITU-T I.371): as many creations may begin together as may be under way at once, and from then
    on they begin at even intervals. When the backend reports a rate limit, no creation begins for the time that it asks for, or for a pause that
    doubles each time.

    Args:
        backend: the name of the backend, for the log.
        at_once: how many creations may be under way.
        per_s: how many creations may begin in one second.
        clock: monotonic time.
        timers: wait for the next creation.
    """

    def __init__(self, backend: str, *, at_once: int, per_s: float, clock: Clock, timers: Timers) -> None:
        self._backend = backend
        self._places = asyncio.Semaphore(at_once)
        self._interval_s = 1.0 / per_s
        self._burst_s = (at_once - 1) * self._interval_s
        self._clock = clock
        self._timers = timers
        self._next = float("-inf")
        self._not_before = float("-inf")
        self._pauses = 0

    @asynccontextmanager
    async def reserve_creation(self) -> AsyncIterator[None]:
        """Wait until one more creation may begin. It is under way until the block ends.

        Raises:
            RateLimited: as raised in the block. No other creation begins for a while.
        """
        async with self._places:
            await self._wait()
            try:
                yield
            except RateLimited as limited:
                self._pause(limited.retry_after_s)
                raise
            self._pauses = 0

    async def _wait(self) -> None:
        now = self._clock.monotonic()
        begins_at = max(self._next, now)
        self._next = begins_at + self._interval_s
        begins_at -= self._burst_s
        while (wait_s := max(begins_at, self._not_before) - self._clock.monotonic()) > ROUNDING_S:
            await self._timers.sleep(wait_s)

    def _pause(self, retry_after_s: float | None) -> None:
        now = self._clock.monotonic()
        if now < self._not_before:
            return  # several creations were under way together, and the first that was limited has begun the pause
        pause_s = min(FIRST_CREATION_PAUSE_S * 2**self._pauses if retry_after_s is None else retry_after_s, LONGEST_CREATION_PAUSE_S)
        self._pauses = min(self._pauses + 1, 10)
        self._not_before = now + pause_s
        log.warning("backend %s limits the rate of creations: none begins there for %g s", self._backend, pause_s)
