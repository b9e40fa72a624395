"""The results of one request, as they arrive."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from sandbox_server.core.execution import Result
from sandbox_server.dispatch.limits.response_budget import ResponseReservation


class Batch:
    """Collects the results of one request. Read it once, with `all_results` or `next_results`. It holds its reservation until `discard_results`.

    Args:
        size: how many results there will be.
        reservation: the memory and files that the results may take.
        ended: called when every call has its result, whether or not the batch is read.
    """

    def __init__(self, size: int, reservation: ResponseReservation, ended: Callable[[], None] = lambda: None) -> None:
        self._ended = ended
        self.reservation = reservation
        self._results: list[Result | None] = [None] * size
        self._is_delivered = bytearray(size)
        self._unread: deque[tuple[int, Result]] = deque()
        self._missing_count = size
        self._has_unread: asyncio.Event = asyncio.Event()
        self._is_complete: asyncio.Event = asyncio.Event()

    def deliver_result(self, index: int, result: Result) -> None:
        """Add the result of a call. A second result for the same call is ignored. After `discard_results`, results are only counted.

        Args:
            index: the place of the call in the request.
            result: its result.
        """
        if self._is_delivered[index]:
            return
        self._is_delivered[index] = True
        if not self.reservation.is_released:
            self._results[index] = result
            self._unread.append((index, result))
        self._missing_count -= 1
        self._has_unread.set()
        if not self._missing_count:
            self._is_complete.set()
            self._ended()

    async def all_results(self) -> list[Result]:
        """Wait for every result. Returns them in the order of the calls."""
        await self._is_complete.wait()
        return [result for result in self._results if result is not None]

    async def next_results(self, wait_s: float) -> list[tuple[int, Result]] | None:
        """Wait for the results that have arrived since the last time, in the order of their arrival.

        Args:
            wait_s: how long to wait for the next result, in seconds.

        Returns:
            The results with the places of their calls in the request; an empty list after `wait_s` without a result; None when no more will arrive.
        """
        if not self._unread:
            if not self._missing_count:
                return None
            self._has_unread.clear()
            try:
                async with asyncio.timeout(wait_s):
                    await self._has_unread.wait()
            except TimeoutError:
                return []
        unread = list(self._unread)
        self._unread.clear()
        for index, _ in unread:
            self._results[index] = None
        return unread

    def discard_results(self) -> None:
        """Release the reservation and the results that were not read. Results that arrive later are not kept. The calls go on."""
        self.reservation.release()
        self._results = [None] * len(self._results)
        self._unread.clear()
