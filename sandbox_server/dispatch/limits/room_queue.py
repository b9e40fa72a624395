"""Requests that wait for a share of a limited resource, such as memory. Each tenant has a queue of its own."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

TENANT_SHARE = 0.5
"""The share of each limit that one tenant may have."""
MAX_WAITING = 64
"""How many requests of one tenant may wait for room at once. Each holds in memory what the server has read of its body."""


class Reservable(Protocol):
    """A part of a resource that a tenant wants or holds."""

    @property
    def tenant(self) -> str: ...

    def release(self) -> None: ...


R = TypeVar("R", bound=Reservable)


class QueueFull(Exception):
    """As many requests of the tenant wait as may. `waiting_count`: how many that are."""

    def __init__(self, waiting_count: int) -> None:
        super().__init__(waiting_count)
        self.waiting_count = waiting_count


@dataclass(slots=True, eq=False)
class _Waiter(Generic[R]):
    reservation: R
    admitted: asyncio.Future[None]


@dataclass(slots=True)
class RoomQueue(Generic[R]):
    """Admits reservations when there is room: those of one tenant in order of arrival, and the first of each tenant before the second of any.

    Args:
        fits: whether there is room for a reservation now.
        admit: counts a reservation as held. From then on, `release` of the reservation gives its room back.
    """

    fits: Callable[[R], bool] = field(compare=False)
    admit: Callable[[R], None] = field(compare=False)
    _waiters: dict[str, deque[_Waiter[R]]] = field(default_factory=dict)

    def try_admit(self, reservation: R) -> bool:
        """Admit a reservation if there is room and no other reservation of its tenant waits. Returns whether it was admitted."""
        if reservation.tenant in self._waiters or not self.fits(reservation):
            return False
        self.admit(reservation)
        return True

    async def wait_for_room(self, reservation: R, wait_s: float) -> None:
        """Wait until a reservation is admitted.

        Args:
            reservation: the reservation. If the wait is cancelled, it does not stay admitted.
            wait_s: how long it may wait, in seconds.

        Raises:
            QueueFull: too many reservations of the tenant wait already.
            TimeoutError: there was no room in time.
        """
        waiters = self._waiters.setdefault(reservation.tenant, deque())
        if len(waiters) >= MAX_WAITING:
            raise QueueFull(len(waiters))
        waiter = _Waiter(reservation, asyncio.get_running_loop().create_future())
        waiters.append(waiter)
        is_admitted = False
        try:
            async with asyncio.timeout(wait_s):
                await waiter.admitted
            is_admitted = True
        finally:
            if not is_admitted:
                self._withdraw(waiter, waiters)

    def _withdraw(self, waiter: _Waiter[R], waiters: deque[_Waiter[R]]) -> None:
        if waiter.admitted.done() and not waiter.admitted.cancelled():
            waiter.reservation.release()
        elif waiter in waiters:
            waiters.remove(waiter)
        self.admit_waiting()

    def admit_waiting(self) -> None:
        """Admit every reservation that fits. To be called whenever room has become free."""
        if not self._waiters:
            return
        queues = dict(self._waiters)
        while queues:
            for tenant, queue in list(queues.items()):
                if queue and self.fits(queue[0].reservation):
                    waiter = queue.popleft()
                    if not waiter.admitted.done():
                        self.admit(waiter.reservation)
                        waiter.admitted.set_result(None)
                else:
                    del queues[tenant]
        self._waiters = {tenant: queue for tenant, queue in self._waiters.items() if queue}
