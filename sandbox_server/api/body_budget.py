"""Limits how much memory the bodies of requests take: while they are read and, where they hold tool calls, until those have their results."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from sandbox_server.api.limits import Limits, limit_sentence, too_large
from sandbox_server.core.errors import QuotaExceeded
from sandbox_server.dispatch.limits.room_queue import TENANT_SHARE, QueueFull, RoomQueue

SMALL_BODY_BYTES = 16 << 10
"""A body that is no larger, and was received whole, is not counted: it is parsed before anything else is read, and the number of calls is limited."""


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


@dataclass(slots=True)
class BodyBudget:
    """The memory for the bodies of all tenants. One tenant may take half of it.

    Args:
        limits: `body_memory_bytes` and `body_wait_s` of them are used.
    """

    limits: Limits
    _reserved_by_tenant: Counter[str] = field(default_factory=Counter)
    _reserved_bytes: int = 0
    _queue: RoomQueue[BodyReservation] = field(init=False)

    def __post_init__(self) -> None:
        self._queue = RoomQueue(self._fits, self._admit)

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
        if self._queue.try_admit(reservation):
            return reservation
        if size_bytes > self.limits.body_memory_bytes * TENANT_SHARE:
            raise too_large(self.limits, "body_memory_bytes")
        try:
            await self._queue.wait_for_room(reservation, self.limits.body_wait_s)
        except QueueFull as full:
            raise self._quota_error(f"{full.waiting_count} bodies of this tenant wait for memory already") from None
        except TimeoutError:
            raise self._quota_error(f"no memory was free within the {self.limits.body_wait_s} s of `limits.body_wait_s`") from None
        return reservation

    def take_back(self, reservation: BodyReservation) -> None:
        """Count a body no more, and admit those that wait for its memory. Called by `BodyReservation.release`."""
        self._reserved_bytes -= reservation.size_bytes
        self._reserved_by_tenant[reservation.tenant] -= reservation.size_bytes
        if not self._reserved_by_tenant[reservation.tenant]:
            del self._reserved_by_tenant[reservation.tenant]
        self._queue.admit_waiting()

    def _fits(self, reservation: BodyReservation) -> bool:
        most_bytes = self.limits.body_memory_bytes
        tenant_bytes = self._reserved_by_tenant[reservation.tenant] + reservation.size_bytes
        return self._reserved_bytes + reservation.size_bytes <= most_bytes and tenant_bytes <= most_bytes * TENANT_SHARE

    def _admit(self, reservation: BodyReservation) -> None:
        self._reserved_bytes += reservation.size_bytes
        self._reserved_by_tenant[reservation.tenant] += reservation.size_bytes

    def _quota_error(self, why: str) -> QuotaExceeded:
        limit = f"{limit_sentence(self.limits, 'body_memory_bytes')}, of which one tenant may have half"
        return QuotaExceeded(f"{limit}, and {why}: nothing has run; try again later", limit="body_memory_bytes", retry_after_s=2)
