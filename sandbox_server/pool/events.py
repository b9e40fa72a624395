"""The log of events: the newest ones are kept, and every follower reads them from a position of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from sandbox_server.core.clock import Clock, SystemClock

KEPT = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One change.

    Attributes:
        id: its number, which grows from event to event.
        at: when it happened, in Unix seconds.
        kind: what happened, such as `lease.acquired`.
        tenant: the tenant that it concerns; None if it concerns all.
        admin_only: whether only admins may see it.
        admins_too: whether admins may see it even if it concerns another tenant.
        data: JSON values that describe it.
    """

    id: int
    at: float
    kind: str
    tenant: str | None
    admin_only: bool
    admins_too: bool
    data: Mapping[str, Any]


class EventLog:
    """The newest events. Publishing never waits; a follower that is too slow learns that events are missing.

    Ids keep growing over restarts: the first id is the wall-clock time at which the log is created, in microseconds.

    Args:
        kept: how many events are kept.
        clock: the clock of the events' times.
    """

    def __init__(self, kept: int = KEPT, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._kept = kept
        self._ring: list[Event | None] = [None] * kept
        self._first_id = self._next_id = int(self._clock.wall() * 1e6)
        self._waiting: set[asyncio.Future[None]] = set()

    @property
    def last_id(self) -> int:
        """The id of the newest event; before the first event, an id that no event has."""
        return self._next_id - 1

    def publish(self, kind: str, tenant: str | None = None, *, admin_only: bool = False, admins_too: bool = False, **data: Any) -> None:
        """Add an event.

        Args:
            kind: what happened, such as `lease.acquired`.
            tenant: the tenant that it concerns; None if every tenant may see it.
            admin_only: whether only admins may see it.
            admins_too: whether admins may see it even if it concerns another tenant.
            data: JSON values that describe it.
        """
        number = self._next_id
        at = self._clock.wall()
        event = Event(id=number, at=at, kind=kind, tenant=tenant, admin_only=admin_only, admins_too=admins_too, data=data)
        self._ring[number % self._kept] = event
        self._next_id = number + 1
        waiting, self._waiting = self._waiting, set()
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)

    def follow(self, after: int | None = None) -> AsyncIterator[Event | None]:
        """Read events in order and without an end.

        Args:
            after: begin with the event after this id; default: with the next one that is published.

        Returns:
            The events. None stands for events that are not kept any more, or that never were in this log.
        """
        return self._follow(self._next_id if after is None else after + 1)

    async def _follow(self, at: int) -> AsyncIterator[Event | None]:
        while True:
            oldest = max(self._first_id, self._next_id - self._kept)
            if not oldest <= at <= self._next_id:
                at = oldest if at < oldest else self._next_id
                yield None
                continue
            if at == self._next_id:
                await self._wait_for_next_event()
                continue
            event = self._ring[at % self._kept]
            at += 1
            yield event

    async def _wait_for_next_event(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(waiter)
        try:
            await waiter
        finally:
            self._waiting.discard(waiter)
