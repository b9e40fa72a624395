"""The results of one request, as they come."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from sandbox_server.core.execution import Result
from sandbox_server.dispatch.answer_budget import Reservation


class Batch:
    """Collects results; read it once, either with `all_results` or with `next_results`, and close it then: until that it holds its reservation.

    Args:
        size: how many results there will be.
        reservation: the memory and files that they may take.
        ended: called once every call has its result, whether or not anybody reads it.
    """

    def __init__(self, size: int, reservation: Reservation, ended: Callable[[], None] = lambda: None) -> None:
        self._ended = ended
        self.reservation = reservation
        self._results: list[Result | None] = [None] * size
        self._has = bytearray(size)
        self._fresh: deque[tuple[int, Result]] = deque()
        self._missing = size
        self._wake: asyncio.Event = asyncio.Event()
        self._done: asyncio.Event = asyncio.Event()

    def deliver_result(self, index: int, result: Result) -> None:
        """Take the result of one call. The first one stays. Once the batch is closed it is only counted."""
        if self._has[index]:
            return
        self._has[index] = True
        if not self.reservation.is_released:
            self._results[index] = result
            self._fresh.append((index, result))
        self._missing -= 1
        self._wake.set()
        if not self._missing:
            self._done.set()
            self._ended()

    async def all_results(self) -> list[Result]:
        """Every result, in the order of the calls, once the last is there."""
        await self._done.wait()
        return [result for result in self._results if result is not None]

    async def next_results(self, wait_s: float) -> list[tuple[int, Result]] | None:
        """What has finished since the last time, in the order of finishing.

        Args:
            wait_s: wait at most so long for the next one.

        Returns:
            The new results with their places in the request; none after `wait_s` seconds without one; None when there will be no more.
        """
        if not self._fresh:
            if not self._missing:
                return None
            self._wake.clear()
            try:
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()
            except TimeoutError:
                return []
        fresh = list(self._fresh)
        self._fresh.clear()
        for index, _ in fresh:
            self._results[index] = None
        return fresh

    def close(self) -> None:
        """Nobody reads any more: let go of what there is, and of what is still to come. The calls go on."""
        self.reservation.release()
        self._results = [None] * len(self._results)
        self._fresh.clear()
