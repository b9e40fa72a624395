"""Limits how much memory the bodies of requests take: while they are read and, where they hold tool calls, until those have their results."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from dataclasses import dataclass, field

from sandbox_server.api.limits import Limits, limit_sentence, too_large
from sandbox_server.core.errors import QuotaExceeded

SMALL_BODY_BYTES = 16 << 10
"""A body that is no larger, and was received whole, is not counted: it is parsed before anything else is read, and the number of calls is limited."""
TENANT_SHARE = 0.5
"""The share of the memory that one tenant may take."""
MAX_WAITING = 64
"""How many bodies of one tenant may wait for memory at once; the server has read the beginning of each already."""


@dataclass(slots=True, eq=False)
class BodyReservation:
    """The memory that is reserved for one body. To be released when neither the body nor what was parsed from it is needed any more.

    Args:
        budget: the budget that it is part of; None: the body is not counted.
        tenant: the tenant that sent the body.
        size_bytes: how much is reserved.
    """

    budget: BodyBudget | None
    tenant: str
    size_bytes: int

    def release(self) -> None:
        """Give the memory back to the budget. A second call does nothing."""
        if self.budget is not None:
            budget, self.budget = self.budget, None
            budget.take_back(self)


@dataclass(slots=True, eq=False)
class _Waiter:
    reservation: BodyReservation
    admitted: asyncio.Future[None]


@dataclass(slots=True)
class BodyBudget:
    """The memory for the bodies of all tenants. One tenant may take half of it.

    Args:
        limits: `body_memory_bytes` and `body_wait_s` of them are used.
    """

    limits: Limits
    _reserved_by_tenant: Counter[str] = field(default_factory=Counter)
    _reserved_bytes: int = 0
    _waiters: dict[str, deque[_Waiter]] = field(default_factory=dict)

    async def reserve(self, tenant: str, size_bytes: int) -> BodyReservation:
        """Reserve memory for a body before more of it is read. Where there is none, wait behind the other bodies of the tenant.

        Args:
            tenant: the tenant that sends the body.
            size_bytes: how much memory the body takes.

        Raises:
            PayloadTooLarge: the body is larger than the share of one tenant.
            QuotaExceeded: no memory was free within `limits.body_wait_s`, or too many bodies of the tenant wait already.
        """
        reservation = BodyReservation(self, tenant, size_bytes)
        if tenant not in self._waiters and self._fits(reservation):
            self._admit(reservation)
            return reservation
        if size_bytes > self.limits.body_memory_bytes * TENANT_SHARE:
            raise too_large(self.limits, "body_memory_bytes")
        await self._wait(reservation)
        return reservation

    def take_back(self, reservation: BodyReservation) -> None:
        """Count a body no more, and admit those that wait for its memory. Called by `BodyReservation.release`."""
        self._reserved_bytes -= reservation.size_bytes
        self._reserved_by_tenant[reservation.tenant] -= reservation.size_bytes
        if not self._reserved_by_tenant[reservation.tenant]:
            del self._reserved_by_tenant[reservation.tenant]
        self._admit_waiters()

    async def _wait(self, reservation: BodyReservation) -> None:
        waiters = self._waiters.setdefault(reservation.tenant, deque())
        if len(waiters) >= MAX_WAITING:
            raise self._quota_error(f"{len(waiters)} bodies of this tenant wait for memory already")
        waiter = _Waiter(reservation, asyncio.get_running_loop().create_future())
        waiters.append(waiter)
        try:
            async with asyncio.timeout(self.limits.body_wait_s):
                await waiter.admitted
        except BaseException as error:
            if waiter.admitted.done() and not waiter.admitted.cancelled():
                reservation.release()
            elif waiter in waiters:
                waiters.remove(waiter)
            self._admit_waiters()
            if isinstance(error, TimeoutError):
                raise self._quota_error(f"no memory was free within the {self.limits.body_wait_s} s of `limits.body_wait_s`") from None
            raise

    def _fits(self, reservation: BodyReservation) -> bool:
        most_bytes = self.limits.body_memory_bytes
        tenant_bytes = self._reserved_by_tenant[reservation.tenant] + reservation.size_bytes
        return self._reserved_bytes + reservation.size_bytes <= most_bytes and tenant_bytes <= most_bytes * TENANT_SHARE

    def _admit(self, reservation: BodyReservation) -> None:
        self._reserved_bytes += reservation.size_bytes
        self._reserved_by_tenant[reservation.tenant] += reservation.size_bytes

    def _admit_waiters(self) -> None:
        """Admit every waiter that fits: within a tenant in order of arrival, and the first of each tenant before the second of any."""
        waiters_of = dict(self._waiters)
        while waiters_of:
            for tenant, waiters in list(waiters_of.items()):
                if waiters and self._fits(waiters[0].reservation):
                    waiter = waiters.popleft()
                    if not waiter.admitted.done():
                        self._admit(waiter.reservation)
                        waiter.admitted.set_result(None)
                else:
                    del waiters_of[tenant]
        self._waiters = {tenant: waiters for tenant, waiters in self._waiters.items() if waiters}

    def _quota_error(self, why: str) -> QuotaExceeded:
        limit = f"{limit_sentence(self.limits, 'body_memory_bytes')}, of which one tenant may have half"
        return QuotaExceeded(f"{limit}, and {why}: nothing has run; try again later", limit="body_memory_bytes", retry_after_s=2)
