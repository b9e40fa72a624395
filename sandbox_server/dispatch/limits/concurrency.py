"""How many calls of a tenant may run at the same time. The others wait for a permit, in the order in which they came."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from sandbox_server.core.errors import QuotaExceeded

CallKey = tuple[str, str]
"""The lease and the id of a call."""


@dataclass(slots=True, eq=False)
class _TenantCalls:
    """The calls of one tenant: those that run, with the number of requests that asked for each, and those that wait, in order."""

    running: Counter[CallKey] = field(default_factory=Counter)
    waiting: dict[CallKey, list[asyncio.Future[bool]]] = field(default_factory=dict)


class ConcurrencyLimiter:
    """Gives permits to calls. A call that several requests ask for needs one permit, which it keeps until each of them has released it.

    Args:
        limit_of_tenant: how many calls of a tenant may run at the same time, at least 1; None for any number.
    """

    def __init__(self, limit_of_tenant: Callable[[str], int | None]) -> None:
        self.limit_of_tenant = limit_of_tenant
        self._calls_by_tenant: dict[str, _TenantCalls] = {}
        self._waiting_by_lease: dict[str, set[tuple[str, CallKey]]] = {}

    def check_queue_room(self, tenant: str) -> None:
        """Check whether more calls of a tenant may wait.

        Raises:
            QuotaExceeded: as many of its calls wait already as may run.
        """
        limit, calls = self.limit_of_tenant(tenant), self._calls_by_tenant.get(tenant)
        if limit is not None and calls is not None and len(calls.waiting) >= limit:
            full = f"{len(calls.running)} calls of this tenant run and {len(calls.waiting)} wait for their turn, and its `max_running_calls` is {limit}"
            raise QuotaExceeded(f"{full}: ask again later", limit="max_running_calls", retry_after_s=2)

    def try_acquire_permit(self, tenant: str, key: CallKey) -> bool:
        """Acquire a permit if one is free and no other call waits for it. The caller releases it.

        Args:
            tenant: the tenant that sends the request.
            key: the call.
        """
        calls = self._calls_by_tenant.setdefault(tenant, _TenantCalls())
        limit = self.limit_of_tenant(tenant)
        if key in calls.running or (not calls.waiting and (limit is None or len(calls.running) < limit)):
            calls.running[key] += 1
            return True
        return False

    async def acquire_permit(self, tenant: str, key: CallKey) -> bool:
        """Wait for a permit. The caller releases it.

        Args:
            tenant: the tenant that sends the request.
            key: the call.

        Returns:
            Whether the permit was acquired. False means that the call or its lease has ended while it waited.
        """
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._calls_by_tenant.setdefault(tenant, _TenantCalls()).waiting.setdefault(key, []).append(future)
        self._waiting_by_lease.setdefault(key[0], set()).add((tenant, key))
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.result():
                self.release_permit(tenant, key)
            else:
                self._remove_waiter(tenant, key, future)
            raise

    def release_permit(self, tenant: str, key: CallKey) -> None:
        """Release a permit that was acquired, and give it to the next call that waits."""
        calls = self._calls_by_tenant[tenant]
        calls.running[key] -= 1
        if not calls.running[key]:
            del calls.running[key]
        self._give_free_permits(tenant, calls)

    def wake_waiters(self, tenant: str, key: CallKey) -> None:
        """Have every `acquire_permit` of a call return False, because the call has ended while it waited."""
        calls = self._calls_by_tenant.get(tenant)
        if calls is not None and key in calls.waiting:
            for future in self._pop_waiters(tenant, calls, key):
                future.set_result(False)
            self._give_free_permits(tenant, calls)

    def wake_waiters_of_lease(self, lease_id: str) -> None:
        """Have every `acquire_permit` of the calls of a lease return False, because the lease has ended."""
        for tenant, key in list(self._waiting_by_lease.get(lease_id, ())):
            self.wake_waiters(tenant, key)

    def apply_limits(self) -> None:
        """Give permits that are free after the limits were changed."""
        for tenant, calls in list(self._calls_by_tenant.items()):
            self._give_free_permits(tenant, calls)

    def _give_free_permits(self, tenant: str, calls: _TenantCalls) -> None:
        limit = self.limit_of_tenant(tenant)
        while calls.waiting and (limit is None or len(calls.running) < limit):
            key = next(iter(calls.waiting))
            futures = self._pop_waiters(tenant, calls, key)
            if futures:
                calls.running[key] += len(futures)
            for future in futures:
                future.set_result(True)
        if not calls.running and not calls.waiting and self._calls_by_tenant.get(tenant) is calls:
            del self._calls_by_tenant[tenant]

    def _pop_waiters(self, tenant: str, calls: _TenantCalls, key: CallKey) -> list[asyncio.Future[bool]]:
        """Remove a call from those that wait. Returns the futures that nobody has cancelled."""
        waiting = self._waiting_by_lease[key[0]]
        waiting.discard((tenant, key))
        if not waiting:
            del self._waiting_by_lease[key[0]]
        return [future for future in calls.waiting.pop(key) if not future.done()]

    def _remove_waiter(self, tenant: str, key: CallKey, future: asyncio.Future[bool]) -> None:
        calls = self._calls_by_tenant.get(tenant)
        if calls is None or future not in calls.waiting.get(key, ()):
            return
        calls.waiting[key].remove(future)
        if not calls.waiting[key]:
            self._pop_waiters(tenant, calls, key)
            self._give_free_permits(tenant, calls)
