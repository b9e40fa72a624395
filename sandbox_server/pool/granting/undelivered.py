"""The acquires with a request key whose response has not been sent, by key: those that a release of the key must end."""

from __future__ import annotations

from sandbox_server.pool.leasing.request_keys import TenantKey
from sandbox_server.pool.leasing.wait_queue import Waiter


class UndeliveredAcquires:
    """The acquires of one pool that have a request key, from their arrival until their response is sent or what they were granted is given back.

    There can be several for one key: one whose client has disconnected, and the one that repeats it.
    """

    def __init__(self) -> None:
        self._waiters: dict[TenantKey, list[Waiter]] = {}

    def add_waiter(self, waiter: Waiter) -> None:
        """Add an acquire. One without a request key is ignored."""
        if waiter.request.request_key is not None:
            self._waiters.setdefault((waiter.request.tenant, waiter.request.request_key), []).append(waiter)

    def remove_waiter(self, waiter: Waiter) -> None:
        """Remove an acquire, if it is there."""
        tenant_key = (waiter.request.tenant, waiter.request.request_key or "")
        waiters = self._waiters.get(tenant_key, [])
        if waiter in waiters:
            waiters.remove(waiter)
            if not waiters:
                del self._waiters[tenant_key]

    def take_waiters(self, tenant_key: TenantKey) -> list[Waiter]:
        """Remove and return all acquires with a key."""
        return self._waiters.pop(tenant_key, [])
