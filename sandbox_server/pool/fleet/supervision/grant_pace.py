"""Limits how many acquires of ready slots are granted within a short time on the sandboxes of one machine.

If hundreds of clients acquire at the same time, hundreds of commands begin together, and each takes as long as all of them. With a limit, most of the clients
wait a moment longer for their slots, and their commands are as quick as those of a few clients.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

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


class GrantPace:
    """Lets acquires of ready slots pass, a few at a time: one of each tenant in turn, and those of a tenant in the order in which they came.

    Args:
        at_once: how many acquires count at the same time; None: any number.
        timers: end the time for which an acquire counts.
    """

    def __init__(self, at_once: int | None, timers: Timers) -> None:
        self._at_once = at_once
        self._timers = timers
        self._waiting_by_tenant: dict[str, deque[tuple[asyncio.Future[None], Callable[[], bool]]]] = {}  # the tenant whose turn it is comes first
        self._counted = 0

    async def wait_for_turn(self, tenant: str, has_free_slots: Callable[[], bool]) -> AcquireTurn:
        """Wait until the acquire may be granted a slot. One that finds no free slot does not wait here, but for a slot.

        Args:
            tenant: the tenant that sends the request.
            has_free_slots: returns whether the pool has free slots.

        Returns:
            The turn of the acquire. The caller sets `runs_call` once it knows the slots.
        """
        turn = AcquireTurn()
        if self._at_once is None or not has_free_slots():
            return turn
        if self._waiting_by_tenant or self._counted >= self._at_once:
            passed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting_by_tenant.setdefault(tenant, deque()).append((passed, has_free_slots))
            try:
                await passed
            except asyncio.CancelledError:
                if not passed.cancelled():  # it passed just now, and is counted
                    self._stop_counting()
                raise
        else:
            self._counted += 1
        self._check_later(turn, MAX_PERIODS)
        return turn

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
            passed, has_free_slots = waiting[0]
            if self._counted >= self._at_once and has_free_slots():
                return
            waiting.popleft()
            del self._waiting_by_tenant[tenant]
            if waiting:
                self._waiting_by_tenant[tenant] = waiting  # behind all others
            if not passed.cancelled():
                self._counted += 1
                passed.set_result(None)
