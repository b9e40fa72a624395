"""Limits how many slots are reset at the same time on the sandboxes of one machine, and decides which reset begins next.

Nobody waits for most resets, but each of them takes as much processor time as a few commands. If all resets began at once, commands would have to share the
processors with them, however few processes a command has. With a limit, the clients that wait are those that have no slot yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from sandbox_server.core.clock import Clock
from sandbox_server.pool.timers import Timers

#: For how long one reset counts, in seconds. A reset that takes longer goes on, but it delays no other: a slot can make its own reset slow.
COUNTED_S = 0.05
#: A reset that has waited for so long, in seconds, takes turns with those that acquires wait for. The processes of its ended lease run until then.
MAX_OVERTAKEN_S = 0.5


@dataclass(slots=True, eq=False)
class WaitingReset:
    """A reset that has not begun.

    Attributes:
        asked_at: since when it waits, monotonic.
        is_wanted: returns whether an acquire waits for a slot of its pool.
        begin: done once the reset may begin.
    """

    asked_at: float
    is_wanted: Callable[[], bool]
    begin: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


def choose_next_reset(heads: Sequence[WaitingReset], now: float, *, was_overtaken: bool) -> WaitingReset | None:
    """Return the reset that begins next: the first one that an acquire waits for, or the oldest one of all; None if there is none.

    Args:
        heads: the oldest reset of each pool; that of the pool whose turn it is comes first. The pools take turns, so that one whose resets are many or slow
            delays those of another one by one turn.
        now: the monotonic time.
        was_overtaken: whether the last choice has overtaken an older reset that no acquire waits for. If that has waited for long, it is its turn now.
    """
    wanted = next((reset for reset in heads if reset.is_wanted()), None)
    unwanted = min((reset for reset in heads if not reset.is_wanted()), key=lambda reset: reset.asked_at, default=None)
    if wanted is None or (unwanted is not None and was_overtaken and now - unwanted.asked_at >= MAX_OVERTAKEN_S):
        return unwanted
    return wanted


class ResetBudget:
    """Limits the resets on one backend, whatever the number of its pools.

    Args:
        at_once: how many resets are under way at the same time; None: any number.
        clock: monotonic time.
        timers: end the time for which a reset counts.
    """

    def __init__(self, at_once: int | None, clock: Clock, timers: Timers) -> None:
        self._at_once = at_once
        self._clock = clock
        self._timers = timers
        # Those of each pool in the order in which they came. The pool whose turn it is comes first.
        self._waiting_by_pool: dict[Callable[[], bool], dict[WaitingReset, None]] = {}
        self._was_overtaken = False
        self._counted = 0

    @asynccontextmanager
    async def reserve_reset(self, is_wanted: Callable[[], bool]) -> AsyncIterator[None]:
        """Wait until one more reset may begin. It is under way until the block ends.

        Args:
            is_wanted: returns whether an acquire waits for a slot of the pool. It is the same function for all resets of a pool.
        """
        if self._at_once is None:
            yield
            return
        await self._wait(is_wanted)
        ended = self._count_reset()
        try:
            yield
        finally:
            ended()

    async def _wait(self, is_wanted: Callable[[], bool]) -> None:
        """Wait for the turn of a reset, which then counts."""
        reset = WaitingReset(self._clock.monotonic(), is_wanted)
        self._waiting_by_pool.setdefault(is_wanted, {})[reset] = None
        self._begin_resets()
        try:
            await reset.begin
        except asyncio.CancelledError:
            if reset.begin.cancelled():
                self._remove(reset)
            else:  # it could have begun just now, and is counted
                self._counted -= 1
                self._begin_resets()
            raise

    def _begin_resets(self) -> None:
        while self._at_once is not None and self._counted < self._at_once:
            heads = [next(iter(resets)) for resets in self._waiting_by_pool.values()]
            chosen = choose_next_reset(heads, self._clock.monotonic(), was_overtaken=self._was_overtaken)
            if chosen is None:
                return
            self._was_overtaken = any(head.asked_at < chosen.asked_at and not head.is_wanted() for head in heads)
            self._remove(chosen)
            if chosen.is_wanted in self._waiting_by_pool:
                self._waiting_by_pool[chosen.is_wanted] = self._waiting_by_pool.pop(chosen.is_wanted)  # behind all others
            if not chosen.begin.cancelled():
                self._counted += 1
                chosen.begin.set_result(None)

    def _remove(self, reset: WaitingReset) -> None:
        resets = self._waiting_by_pool.get(reset.is_wanted, {})
        resets.pop(reset, None)
        if not resets:
            self._waiting_by_pool.pop(reset.is_wanted, None)

    def _count_reset(self) -> Callable[[], None]:
        """Count a reset that begins for `COUNTED_S` at most. Returns what is to be called when it ends."""
        is_counted = True

        def stop_counting() -> None:
            nonlocal is_counted
            timer.cancel()
            if is_counted:
                is_counted = False
                self._counted -= 1
                self._begin_resets()

        timer = self._timers.call_later(COUNTED_S, stop_counting)
        return stop_counting
