"""What has changed, in order, for whoever follows along: the last events are kept, each follower has its own place."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from sandbox_server.core.clock import Clock, SystemClock

KEPT = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One change. `tenant`: whose it is, None for everybody's; `admin_only`: shown to admins alone; `admins_too`: to admins, whosever it is."""

    id: int
    at: float
    kind: str
    tenant: str | None
    admin_only: bool
    admins_too: bool
    data: Mapping[str, Any]


class EventLog:
    """The last events. Publishing never waits; who follows too slowly is told that some are missing.

    Ids grow over restarts too: the first is the wall clock's microseconds when the log is made.

    Args:
        kept: how many events are remembered.
        clock: tells when things happened.
    """

    def __init__(self, kept: int = KEPT, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._kept = kept
        self._ring: list[Event | None] = [None] * kept
        self._first_id = self._next_id = int(self._clock.wall() * 1e6)
        self._waiting: set[asyncio.Future[None]] = set()

    @property
    def last_id(self) -> int:
        """The id of the newest event; of none, where nothing has happened yet."""
        return self._next_id - 1

    def publish(self, kind: str, tenant: str | None = None, *, admin_only: bool = False, admins_too: bool = False, **data: Any) -> None:
        """Something has changed.

        Args:
            kind: what, as `lease.acquired`.
            tenant: whose it is; None: everybody may know.
            admin_only: only admins may know.
            admins_too: admins may know, whosever it is.
            data: what to say of it, JSON values.
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
        """Every event from here on, without end.

        Args:
            after: begin with the event after this id; default: with the next one that happens.

        Returns:
            The events in order. None in place of those that are forgotten, or were never of this log's.
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
                await self._more()
                continue
            event = self._ring[at % self._kept]
            at += 1
            yield event

    async def _more(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(waiter)
        try:
            await waiter
        finally:
            self._waiting.discard(waiter)
