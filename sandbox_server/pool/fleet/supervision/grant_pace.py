"""Limits how many acquires of ready slots are granted within a short time on the sandboxes of one machine.

If hundreds of clients acquire at the same time, hundreds of commands begin together, and each takes as long as all of them. With a limit, most of the clients
wait a moment longer for their slots, and their commands are as quick as those of a few clients.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field

from sandbox_server.pool.timers import Timers

#: An acquire counts for so long, in seconds.
COUNTED_S = 0.02
#: If a call runs in one of its slots then, it counts until no call runs, but no longer than so many times `COUNTED_S`.
MAX_PERIODS = 5


class AcquireTurn:
    """One acquire that counts.

    Attributes:
        runs_call: returns whether a call runs in a slot that the acquire was granted.
    """

    def __init__(self) -> None:
        self.runs_call: Callable[[], bool] = lambda: False


@dataclass(slots=True, kw_only=True, eq=False)
class _WaitingAcquire:
    """An acquire that waits for its turn.

    Attributes:
        priority: the one with the highest priority is the first of its tenant.
        has_free_slots: returns whether the pool has free slots.
        passed: done once the acquire passes, with whether it counts.
    """

    priority: int
    has_free_slots: Callable[[], bool]
    passed: asyncio.Future[bool] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def stop_waiting(self) -> None:
        """Let the acquire pass without a turn, because it may wait no longer."""
        if not self.passed.done():
            self.passed.set_result(False)


class GrantPace:
    """Lets acquires of ready slots pass, a few at a time: one of each tenant in turn, and those of a tenant by priority, then in the order in which they came.

    Args:
        at_once: how many acquires count at the same time; None: any number.
        timers: end the time for which an acquire counts, and the time for which it waits.
    """

    def __init__(self, at_once: int | None, timers: Timers) -> None:
        self._at_once = at_once
        self._timers = timers
        self._waiting_by_tenant: dict[str, list[_WaitingAcquire]] = {}  # the tenant whose turn it is comes first
        self._counted = 0

    async def wait_for_turn(self, tenant: str, has_free_slots: Callable[[], bool], *, wait_s: float, priority: int = 0) -> AcquireTurn:
        """Wait until the acquire may be granted a slot. One that finds no free slot does not wait here, but for a slot.

        Args:
            tenant: the tenant that sends the request.
            has_free_slots: returns whether the pool has free slots.
            wait_s: how long the acquire may wait, in seconds. After that it passes, and does not count.
            priority: the priority of the acquire among those of its tenant.

        Returns:
            The turn of the acquire. The caller sets `runs_call` once it knows the slots.
        """
        turn = AcquireTurn()
        if self._at_once is None or wait_s <= 0 or not has_free_slots():
            return turn
        if self._waiting_by_tenant or self._counted >= self._at_once:
            if not await self._wait(tenant, _WaitingAcquire(priority=priority, has_free_slots=has_free_slots), wait_s):
                return turn
        else:
            self._counted += 1
        self._check_later(turn, MAX_PERIODS)
        return turn

    async def _wait(self, tenant: str, acquire: _WaitingAcquire, wait_s: float) -> bool:
        """Wait until an acquire passes. Returns whether it counts."""
        insort(self._waiting_by_tenant.setdefault(tenant, []), acquire, key=lambda other: -other.priority)
        timer = self._timers.call_later(wait_s, acquire.stop_waiting)
        try:
            return await acquire.passed
        except asyncio.CancelledError:
            if not acquire.passed.cancelled() and acquire.passed.result():  # it passed just now, and is counted
                self._stop_counting()
            raise
        finally:
            timer.cancel()

    def _check_later(self, turn: AcquireTurn, periods: int) -> None:
        self._timers.call_later(COUNTED_S, lambda: self._check_turn(turn, periods - 1))

    def _check_turn(self, turn: AcquireTurn, periods: int) -> None:
        if periods and turn.runs_call():
            self._check_later(turn, periods)
        else:
            self._stop_counting()

    def _stop_counting(self) -> None:
        self._counted -= 1
        while self._waiting_by_tenant and self._at_once is not None:
            tenant, waiting = next(iter(self._waiting_by_tenant.items()))
            acquire = waiting[0]
            waits = not acquire.passed.done()
            if waits and self._counted >= self._at_once and acquire.has_free_slots():
                return
            del waiting[0]
            if not waiting:
                del self._waiting_by_tenant[tenant]
            elif waits:
                self._waiting_by_tenant[tenant] = self._waiting_by_tenant.pop(tenant)  # behind all others
            if waits:
                self._counted += 1
                acquire.passed.set_result(True)
