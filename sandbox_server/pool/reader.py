"""What clients read of the pools: leases, views of pools and sandboxes, and whether the service is ready. Changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sandbox_server.core.clock import Clock
from sandbox_server.core.errors import LeaseNotFound
from sandbox_server.core.types import Lease, PoolView, SandboxView
from sandbox_server.pool.access import SERVICE, Actor, find_pool, may_see, visible_pools
from sandbox_server.pool.catalog import BUILT_IN, OF_THE_FILE, Catalog
from sandbox_server.pool.fleet.orphans import OrphanProblem
from sandbox_server.pool.leasing.ended_leases import end_error
from sandbox_server.pool.leasing.held_lease import lease_with_current_expiry
from sandbox_server.pool.operations.views import pool_view, readiness, sandbox_view
from sandbox_server.pool.pool import Pool


class PoolReader:
    """Reads the pools of one service. `PoolService` adds the operations that change something.

    Args:
        catalog: the pools.
        orphan_problems: the backends that may still have orphaned sandboxes, by name.
        clock: monotonic and wall time.
    """

    def __init__(self, catalog: Catalog, orphan_problems: Mapping[str, OrphanProblem], clock: Clock) -> None:
        self._catalog = catalog
        self._pools = catalog.pools
        self._directory = catalog.directory
        self._orphan_problems = orphan_problems
        self._clock = clock
        self._started = False

    # Leases.

    def lease(self, tenant: str, lease_id: str) -> Lease:
        """A held lease, with the expiry that it has now.

        Raises:
            LeaseNotFound: the tenant has no such lease.
            LeaseLost: it has ended.
            SandboxLost: it has ended with its sandbox.
        """
        pool, lease = self._find_held_lease(tenant, lease_id)
        return lease_with_current_expiry(pool.book.held[lease.lease_id], self._clock)

    def leases(
        self, tenant: str, run_id: str | None = None, trajectory_id: str | None = None, limit: int = 100, cursor: str | None = None
    ) -> tuple[list[Lease], str | None]:
        """The held leases of a tenant, one page at a time, in an order that stays the same from page to page.

        Args:
            tenant: the tenant.
            run_id: only the leases of this run.
            trajectory_id: only the leases of this trajectory.
            limit: the largest number of leases in a page.
            cursor: the cursor that the previous page returned.

        Returns:
            The page, and the cursor of the next one; None if there is none.
        """
        mine = (
            lease_with_current_expiry(held_lease, self._clock)
            for pool in self._pools.values()
            for held_lease in pool.book.held.values()
            if held_lease.lease.tenant == tenant
            and (run_id is None or held_lease.lease.run_id == run_id)
            and (trajectory_id is None or held_lease.lease.trajectory_id == trajectory_id)
        )
        after = sorted((lease for lease in mine if cursor is None or lease.lease_id > cursor), key=lambda lease: lease.lease_id)
        page = after[:limit]
        return page, page[-1].lease_id if len(after) > limit else None

    # Views.

    def views(self, *, actor: Actor = SERVICE, tenant: str | None = None) -> list[PoolView]:
        """The views of an actor's own pools and of the shared ones, or of the pools of one `tenant`, or of all with `*`, for admins.

        Raises:
            Forbidden: the actor is no admin and names another tenant.
        """
        return [self._view_of(pool) for pool in sorted(visible_pools(self._pools, actor, tenant), key=lambda pool: (pool.name, pool.pool_id.tenant or ""))]

    def view(self, name: str, *, actor: Actor = SERVICE, tenant: str | None = None) -> PoolView:
        """The view of the actor's own pool of a name, else of the shared one, or of one `tenant`'s pool, for admins.

        Raises:
            PoolNotFound: there is no pool of that name.
            Forbidden: the actor is no admin and names another tenant.
        """
        return self._view_of(find_pool(self._pools, name, actor, tenant))

    def _view_of(self, pool: Pool) -> PoolView:
        return pool_view(pool, self._catalog.origins[pool.pool_id])

    def sandboxes(self, *, actor: Actor = SERVICE) -> list[SandboxView]:
        """The views of the sandboxes in an actor's own pools and in shared ones; for an admin, of all."""
        return [sandbox_view(pool, sandbox) for pool in self._pools.values() if may_see(actor, pool) for sandbox in pool.fleet.sandboxes.values()]

    def readiness(self) -> dict[str, Any]:
        """Whether the pools of the settings file are ready; other pools are the concern of their owners.

        Returns:
            `{"ready": …, "pools": {name: {"ready", "sandboxes", "min_sandboxes", "last_error"}}}`.
        """
        given = [pool for pool_id, pool in self._pools.items() if self._catalog.origins[pool_id] in (OF_THE_FILE, BUILT_IN)]
        pools = {pool.name: readiness(pool, self._orphan_problems.get(pool.spec.backend)) for pool in given}
        return {"ready": self._started and all(pool["ready"] for pool in pools.values()), "pools": pools}

    # Finding a lease.

    def _find_lease(self, lease_id: str, tenant: str | None = None) -> tuple[Pool | None, Lease]:
        """Find a lease.

        Returns:
            The pool of the lease if it is held, else None; and the lease.

        Raises:
            LeaseNotFound: there is no such lease, or it is another tenant's.
        """
        pool = self._directory.pool_of(lease_id)
        held_lease = None if pool is None else pool.book.held.get(lease_id)
        if held_lease is not None:
            if tenant in (None, held_lease.lease.tenant):
                return pool, held_lease.lease
        else:
            lease = self._catalog.ended_leases.get(lease_id)
            if lease is not None and tenant in (None, lease.tenant):
                return None, lease
        raise LeaseNotFound(f"there is no lease {lease_id!r}, or it is not yours", lease_id=lease_id)

    def _find_held_lease(self, tenant: str, lease_id: str) -> tuple[Pool, Lease]:
        pool, lease = self._find_lease(lease_id, tenant)
        if pool is None:
            raise end_error(lease)
        return pool, lease
