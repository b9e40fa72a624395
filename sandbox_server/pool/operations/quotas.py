"""The limits of one tenant over all pools: slots of its own pools, leases, and waiting acquires.

A limit that is lowered below what a tenant has takes nothing away. The tenant gets nothing more until it is below the limit again.
"""

from __future__ import annotations

from collections.abc import Mapping

from sandbox_server.core.errors import InvalidRequest, QuotaExceeded
from sandbox_server.core.types import AcquireRequest, PoolId, PoolSpec
from sandbox_server.pool.dependencies import PoolDependencies
from sandbox_server.pool.pool import Pool


class Quotas:
    """Enforces the limits of tenants.

    Args:
        pools: all pools. A pool that is being deleted counts until it is gone.
        dependencies: returns the limits of each tenant.
    """

    def __init__(self, pools: Mapping[PoolId, Pool], dependencies: PoolDependencies) -> None:
        self._pools = pools
        self._dependencies = dependencies

    def check_pool(self, pool_id: PoolId, spec: PoolSpec, now: PoolSpec | None) -> None:
        """Check that a pool has and reserves no more slots than its owner may have. A pool that needs no more than before is never refused.

        Args:
            pool_id: the pool. For a pool that no tenant owns there are no limits.
            spec: its spec from now on.
            now: its spec until now; None for a new pool.

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
        """Check that a tenant gets no more leases than it may have. Leases that it waits for count, and slots that its own pools reserve.

        Args:
            request: the acquire.
            wanted: the pool that is to serve it. The owner of the pool may have the slots that it reserves.

        Raises:
            InvalidRequest: the request asks for more leases than the tenant may ever have.
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
        """How many leases of a tenant's `max_leases` a pool uses up."""
        has = _leases(pool, tenant)
        return max(pool.spec.reserved_slots, has) if pool.pool_id.tenant == tenant else has

    def admits(self, request: AcquireRequest) -> bool:
        """Whether a waiting acquire may be served now. The limit of its tenant may have been lowered since it arrived."""
        most = self._dependencies.max_leases(request.tenant)
        return most is None or sum(pool.book.lease_count_by_tenant[request.tenant] for pool in self._pools.values()) + request.count <= most

    def check_waiters(self, tenant: str) -> None:
        """Check that a tenant has no more waiting acquires than it may. The acquire that has just been queued counts as well.

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
