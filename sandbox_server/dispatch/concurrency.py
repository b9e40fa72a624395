"""Whose call may begin: a tenant with a limit runs so many at once, and its others wait for their turn, who came first first."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from sandbox_server.core.errors import QuotaExceeded

Key = tuple[str, str]
"""The lease and the id of a call."""


@dataclass(slots=True, eq=False)
class _Line:
    """The calls of one tenant, each once: those that run, with how many requests asked for them, and those that wait, in order."""

    running: Counter[Key] = field(default_factory=Counter)
    waiting: dict[Key, list[asyncio.Future[bool]]] = field(default_factory=dict)


class ConcurrencyLimiter:
    """Gives the calls of each tenant their turns. A call that is asked for several times takes one turn.

    Args:
        most: how many calls a tenant may run at once, at least 1; None: any number, and turns are not counted.
    """

    def __init__(self, limit_of_tenant: Callable[[str], int | None]) -> None:
        self.limit_of_tenant = limit_of_tenant
        self._lines: dict[str, _Line] = {}
        self._waiting_of: dict[str, set[tuple[str, Key]]] = {}

    def check_queue_room(self, tenant: str) -> None:
        """See whether more calls may come.

        Raises:
            QuotaExceeded: as many of the tenant's calls wait already as may run.
        """
        most, line = self.limit_of_tenant(tenant), self._lines.get(tenant)
        if most is not None and line is not None and len(line.waiting) >= most:
            full = f"{len(line.running)} calls of this tenant run and {len(line.waiting)} wait for their turn, and its `max_running_calls` is {most}"
            raise QuotaExceeded(f"{full}: ask again later", limit="max_running_calls", retry_after_s=2)

    def try_acquire(self, tenant: str, key: Key) -> bool:
        """Take a turn if that can be now; whoever has one gives it back."""
        line = self._lines.setdefault(tenant, _Line())
        most = self.limit_of_tenant(tenant)
        if key in line.running or (not line.waiting and (most is None or len(line.running) < most)):
            line.running[key] += 1
            return True
        return False

    async def acquire(self, tenant: str, key: Key) -> bool:
        """Wait for a turn.

        Returns:
            Whether it was taken; if not, something else has become of the call or its lease: look.
        """
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(tenant, _Line()).waiting.setdefault(key, []).append(future)
        self._waiting_of.setdefault(key[0], set()).add((tenant, key))
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.result():
                self.release(tenant, key)
            else:
                self._leave(tenant, key, future)
            raise

    def release(self, tenant: str, key: Key) -> None:
        """The call has come to a result, or is not to run after all."""
        line = self._lines[tenant]
        line.running[key] -= 1
        if not line.running[key]:
            del line.running[key]
        self._go_on(tenant, line)

    def wake_waiters(self, tenant: str, key: Key) -> None:
        """Something became of a call: who waits for its turn is to look."""
        line = self._lines.get(tenant)
        if line is not None and key in line.waiting:
            for future in self._pop(tenant, line, key):
                future.set_result(False)
            self._go_on(tenant, line)

    def wake_waiters_of_lease(self, lease_id: str) -> None:
        """A lease has ended: its calls wait for nothing any more."""
        for tenant, key in list(self._waiting_of.get(lease_id, ())):
            self.wake_waiters(tenant, key)

    def apply_limits(self) -> None:
        """The limits may have changed."""
        for tenant, line in list(self._lines.items()):
            self._go_on(tenant, line)

    def _go_on(self, tenant: str, line: _Line) -> None:
        most = self.limit_of_tenant(tenant)
        while line.waiting and (most is None or len(line.running) < most):
            key = next(iter(line.waiting))
            futures = self._pop(tenant, line, key)
            if futures:
                line.running[key] += len(futures)
            for future in futures:
                future.set_result(True)
        if not line.running and not line.waiting and self._lines.get(tenant) is line:
            del self._lines[tenant]

    def _pop(self, tenant: str, line: _Line, key: Key) -> list[asyncio.Future[bool]]:
        """Those who wait for this call's turn and are still there; they do so no more."""
        waiting = self._waiting_of[key[0]]
        waiting.discard((tenant, key))
        if not waiting:
            del self._waiting_of[key[0]]
        return [future for future in line.waiting.pop(key) if not future.done()]

    def _leave(self, tenant: str, key: Key, future: asyncio.Future[bool]) -> None:
        line = self._lines.get(tenant)
        if line is None or future not in line.waiting.get(key, ()):
            return
        line.waiting[key].remove(future)
        if not line.waiting[key]:
            self._pop(tenant, line, key)
            self._go_on(tenant, line)
