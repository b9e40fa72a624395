"""How much memory request bodies may take: while they are read, and, where they hold calls, until those have their results."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from dataclasses import dataclass, field

from sandbox_server.api.limits import Limits, sentence, too_large
from sandbox_server.core.errors import QuotaExceeded

SMALL_BODY_BYTES = 16 << 10
"""A body that is no larger, and came whole, takes no room: it is parsed before anything else is read, and there is a limit of calls under way."""
TENANT_SHARE = 0.5
"""The share of the memory that one tenant may have."""
MAX_WAITING = 64
"""How many bodies of a tenant wait for room at once; the server has read some of each already."""


@dataclass(slots=True, eq=False)
class BodyRoom:
    """What one body holds of the budget. To be released when the body, and what was parsed from it, is needed no more.

    Args:
        budget: whose part it is; None: the body takes no room.
        tenant: whose body.
        size_bytes: how much it holds.
    """

    budget: BodyBudget | None
    tenant: str
    size_bytes: int

    def release(self) -> None:
        """Give everything back. Again: nothing."""
        if self.budget is not None:
            budget, self.budget = self.budget, None
            budget.give_back(self)


@dataclass(slots=True, eq=False)
class _Waiter:
    room: BodyRoom
    admitted: asyncio.Future[None]


@dataclass(slots=True)
class BodyBudget:
    """The budget of all bodies, and each tenant's share of it: half.

    Args:
        limits: those of them that are used are `body_memory_bytes` and `body_wait_s`.
    """

    limits: Limits
    _of: Counter[str] = field(default_factory=Counter)
    _all_bytes: int = 0
    _waiting: dict[str, deque[_Waiter]] = field(default_factory=dict)

    async def take(self, tenant: str, size_bytes: int) -> BodyRoom:
        """Take room for a body before more of it is read; wait for it where there is none, behind the tenant's other bodies.

        Raises:
            PayloadTooLarge: it is more than a tenant can ever have.
            QuotaExceeded: there has been no room for `limits.body_wait_s`.
        """
        room = BodyRoom(self, tenant, size_bytes)
        if tenant not in self._waiting and self._fits(room):
            self._admit(room)
            return room
        if size_bytes > self.limits.body_memory_bytes * TENANT_SHARE:
            raise too_large(self.limits, "body_memory_bytes")
        await self._wait(room)
        return room

    def give_back(self, room: BodyRoom) -> None:
        """A body is held no more; whoever waits for its room goes on."""
        self._all_bytes -= room.size_bytes
        self._of[room.tenant] -= room.size_bytes
        if not self._of[room.tenant]:
            del self._of[room.tenant]
        self._go_on()

    async def _wait(self, room: BodyRoom) -> None:
        line = self._waiting.setdefault(room.tenant, deque())
        if len(line) >= MAX_WAITING:
            raise self._no_room(f"{len(line)} bodies of this tenant wait for room already")
        waiter = _Waiter(room, asyncio.get_running_loop().create_future())
        line.append(waiter)
        try:
            async with asyncio.timeout(self.limits.body_wait_s):
                await waiter.admitted
        except BaseException as error:
            if waiter.admitted.done() and not waiter.admitted.cancelled():
                room.release()
            elif waiter in line:
                line.remove(waiter)
            self._go_on()
            if isinstance(error, TimeoutError):
                raise self._no_room(f"there was no room within the {self.limits.body_wait_s} s of `limits.body_wait_s`") from None
            raise

    def _fits(self, room: BodyRoom) -> bool:
        most = self.limits.body_memory_bytes
        return self._all_bytes + room.size_bytes <= most and self._of[room.tenant] + room.size_bytes <= most * TENANT_SHARE

    def _admit(self, room: BodyRoom) -> None:
        self._all_bytes += room.size_bytes
        self._of[room.tenant] += room.size_bytes

    def _go_on(self) -> None:
        """Let in whoever fits: within a tenant the first first, and each tenant's first before anybody's second."""
        lines = dict(self._waiting)
        while lines:
            for tenant, line in list(lines.items()):
                if line and self._fits(line[0].room):
                    waiter = line.popleft()
                    if not waiter.admitted.done():
                        self._admit(waiter.room)
                        waiter.admitted.set_result(None)
                else:
                    del lines[tenant]
        self._waiting = {tenant: line for tenant, line in self._waiting.items() if line}

    def _no_room(self, why: str) -> QuotaExceeded:
        full = f"{sentence(self.limits, 'body_memory_bytes')}, of which one tenant may have half"
        return QuotaExceeded(f"{full}, and {why}: nothing has run; ask again later", limit="body_memory_bytes", retry_after_s=2)
