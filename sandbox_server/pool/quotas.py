"""What one tenant may have of all pools together: slots of its own pools, leases, and acquires that queue.

Settings that shrink below what a tenant has take nothing away: it gets nothing more until it is below them again.
"""

from __future__ import annotations

from collections.abc import Mapping

from sandbox_server.core.errors import InvalidRequest, QuotaExceeded
from sandbox_server.core.types import AcquireRequest, PoolId, PoolSpec
from sandbox_server.pool.dependencies import PoolDependencies
from sandbox_server.pool.pool import Pool


class Quotas:
    """Holds tenants to their limits.

    Args:
        pools: every pool there is. One that is being deleted counts until it is gone.
        wiring: knows the limits.
    """

    def __init__(self, pools: Mapping[PoolId, Pool], dependencies: PoolDependencies) -> None:
        self._pools = pools
        self._dependencies = dependencies

    def check_pool(self, pool_id: PoolId, spec: PoolSpec, now: PoolSpec | None) -> None:
        """Refuse a pool that promises or reserves more slots than its owner may have; one that promises no more than before is never refused.

        Args:
            pool_id: which pool; one that no tenant owns is within every limit.
            spec: what it is to be.
            now: what it is; None for a new one.

        Raises:
            QuotaExceeded: naming `max_slots` or `max_leases`.
        """
        tenant = pool_id.tenant
        if tenant is None:
            return
        before = (0, 0) if now is None else (now.max_slots, now.reserved_slots)
        most, others = self._dependencies.max_slots(tenant), [pool for pool in self._pools.values() if pool.pool_id != pool_id]
        if most is not None and spec.max_slots > before[0]:
            promised = sum(pool.spec.max_slots for pool in others if pool.pool_id.tenant == tenant)
            if promised + spec.max_slots > most:
                asked = f"the pool asks for {spec.max_slots} slots (max_sandboxes x slots_per_sandbox)"
                raise _too_much(f"{asked}, the tenant's other pools have {promised}, and its max_slots is {most}", "max_slots")
        most = self._dependencies.max_leases(tenant)
        if most is not None and spec.reserved_slots > before[1]:
            has = sum(self._counted(pool, tenant) for pool in others)
            if has + spec.reserved_slots > most:
                asked = f"the pool reserves {spec.reserved_slots} slots (min_sandboxes or warm_slots, in whole sandboxes)"
                raise _too_much(f"{asked}, the tenant has {has} leases and reserved slots elsewhere, and its max_leases is {most}", "max_leases")

    def check_leases(self, request: AcquireRequest, wanted: Pool) -> None:
        """Refuse an acquire with which its tenant would have more leases than it may: those it waits for count, and slots its own pools reserve.

        Args:
            request: the acquire.
            wanted: the pool that it is to be served from. What it reserves for its owner, the owner may have.

        Raises:
            InvalidRequest: it could never be served, whatever is released.
            QuotaExceeded: naming `max_leases`.
        """
        most, tenant = self._dependencies.max_leases(request.tenant), request.tenant
        if most is None:
            return
        if request.count > most:
            raise InvalidRequest(f"count is {request.count}, and this tenant's max_leases is {most}: ask for fewer, or have an admin raise it", field="count")
        has = sum(_leases(pool, tenant) for pool in self._pools.values())
        idle = sum(self._counted(pool, tenant) for pool in self._pools.values()) - has
        unused = self._counted(wanted, tenant) - _leases(wanted, tenant)
        if has + request.count > most:
            why = f"{has} leases are held or waited for, and this tenant's max_leases is {most}"
            raise QuotaExceeded(f"{why}: release some, or ask again later", limit="max_leases", retry_after_s=2)
        if request.count > unused and has + idle - unused + request.count > most:
            why = f"{has} leases are held or waited for, this tenant's own pools reserve {idle} slots more, and its max_leases is {most}"
            raise QuotaExceeded(f"{why}: release some, lower min_sandboxes or warm_slots of a pool, or ask again later", limit="max_leases", retry_after_s=2)

    def _counted(self, pool: Pool, tenant: str) -> int:
        """What a pool takes of its owner's, or its user's, `max_leases`."""
        has = _leases(pool, tenant)
        return max(pool.spec.reserved_slots, has) if pool.pool_id.tenant == tenant else has

    def admits(self, request: AcquireRequest) -> bool:
        """Whether an acquire that waits may be served now: its tenant's limit may be lower than when it came."""
        most = self._dependencies.max_leases(request.tenant)
        return most is None or sum(pool.book.lease_count_by_tenant[request.tenant] for pool in self._pools.values()) + request.count <= most

    def check_waiters(self, tenant: str) -> None:
        """Refuse that one more acquire queues, the one that just joined the line included in those that do.

        Raises:
            QuotaExceeded: naming `max_waiters`.
        """
        most = self._dependencies.max_waiters(tenant)
        if most is None:
            return
        others = sum(pool.book.queue.count_of(tenant) for pool in self._pools.values()) - 1
        if others >= most:
            why = f"no slot is free, {others} acquires of this tenant wait already, and its max_waiters is {most}"
            raise QuotaExceeded(f"{why}: ask again later", limit="max_waiters", retry_after_s=5)


def _leases(pool: Pool, tenant: str) -> int:
    """The leases that a tenant holds and waits for in a pool."""
    return pool.book.lease_count_by_tenant[tenant] + pool.book.queue.slots_wanted_by_tenant[tenant]


def _too_much(why: str, limit: str) -> QuotaExceeded:
    return QuotaExceeded(f"{why}: make it smaller, delete or shrink another pool, or have an admin raise {limit}", limit=limit, retry_after_s=5)
