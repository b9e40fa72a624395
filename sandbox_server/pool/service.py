"""All pools of the service in one object, with the operations that the API and the dispatcher call."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

from sandbox_server.backends.base import Backend
from sandbox_server.core.clock import Clock
from sandbox_server.core.errors import LeaseLost, LeaseNotFound, PoolServiceError, SandboxLost, SandboxNotFound
from sandbox_server.core.types import Acquired, AcquireRequest, Lease, PoolId, PoolSpec, PoolView, SandboxView
from sandbox_server.link import connect as connect_to_agent
from sandbox_server.pool.access import SERVICE, Actor, find_pool
from sandbox_server.pool.catalog import OF_THE_FILE, Catalog, Check, LoadBackend, allow_any_change, load_nothing
from sandbox_server.pool.dependencies import Connect, PoolDependencies
from sandbox_server.pool.fleet.orphans import OrphanCollector
from sandbox_server.pool.leasing.ended_leases import end_error
from sandbox_server.pool.leasing.request_keys import RequestKeys
from sandbox_server.pool.leasing.wait_queue import longest_wait_s
from sandbox_server.pool.operations.narrow import narrow
from sandbox_server.pool.operations.slot_lookup import PoolSlotLocation, locate_slot, wait_for_reconnect_or_loss
from sandbox_server.pool.operations.verify import verify
from sandbox_server.pool.operations.views import sandbox_view
from sandbox_server.pool.pool import Pool
from sandbox_server.pool.reader import PoolReader
from sandbox_server.store.base import Store

log = logging.getLogger(__name__)

STOP_WITHIN_S = 8.0


class PoolService(PoolReader):
    """Every pool of one service.

    Args:
        specs: the specs of the pools that no tenant owns, by name.
        backends: the backends that the specs name, by name.
        store: keeps the records that must survive a crash.
        clock: monotonic and wall time.
        connect: connects to an agent.
        owner: the owner of this service's sandboxes on the backends.
        dependencies: everything else; its store, clock and connect replace the arguments.
        origins: where each spec came from, by pool name; default `file`.
        load_backend: makes a backend that no pool has used yet.

    Attributes:
        events: the log of events of all pools.
        restored: the ids of the leases that were on record when the service started.
    """

    def __init__(
        self,
        specs: Mapping[str, PoolSpec],
        backends: Mapping[str, Backend],
        store: Store,
        clock: Clock,
        *,
        connect: Connect = connect_to_agent,
        owner: str = "local",
        dependencies: PoolDependencies | None = None,
        origins: Mapping[str, str] | None = None,
        load_backend: LoadBackend = load_nothing,
    ) -> None:
        dependencies = replace(dependencies or PoolDependencies(store=store, clock=clock, connect=connect), admits=self._admits)
        self.events = dependencies.events
        self.restored: frozenset[str] = frozenset()
        self._store = dependencies.store
        self._recorded: frozenset[str] = frozenset()
        self._orphans = OrphanCollector(owner, self._known_sandboxes, dependencies)
        super().__init__(Catalog(backends, load_backend, dependencies), self._orphans.problems, dependencies.clock)
        self._keys = RequestKeys(dependencies.clock, dependencies.store)
        self._quotas = self._catalog.quotas
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        for name, spec in specs.items():
            self._catalog.add_pool(PoolId(name), spec, (origins or {}).get(name, OF_THE_FILE))

    # Start and stop.

    async def start(self) -> None:
        """Take over the pools, leases and sandboxes that an earlier service has recorded, destroy orphaned sandboxes, and begin to create new ones."""
        state = self._store.load()
        self.restored = frozenset(lease.lease_id for lease in state.leases)
        self._catalog.restore_pools(state)
        self._keys.remember_keys(state.keys)
        self._recorded = frozenset(record.sandbox_id for record in state.sandboxes)
        await self._orphans.collect_from(self._catalog.backends)
        for pool in list(self._pools.values()):
            self._catalog.start_pool(pool)
        self._started = True

    async def stop(self, on_shutdown: str | None = None) -> None:
        """Refuse all waiters, and leave or destroy the sandboxes, within `STOP_WITHIN_S`. The store stays open.

        Args:
            on_shutdown: `keep` or `destroy`, for all pools; default the value of each pool's spec. With a store that keeps nothing, sandboxes are
                always destroyed, because no other service could adopt them.
        """
        await self._orphans.stop_collecting()
        try:
            async with asyncio.timeout(STOP_WITHIN_S):
                await self._catalog.stop_pools(lambda spec: self._destroys(spec, on_shutdown))
        except TimeoutError:
            log.error("not every sandbox was gone within %g s", STOP_WITHIN_S)
        for backend in self._catalog.backends.values():
            await backend.close()

    def _known_sandboxes(self) -> frozenset[str]:
        return self._recorded.union(*(pool.fleet.sandboxes for pool in self._pools.values()))

    def _destroys(self, spec: PoolSpec, on_shutdown: str | None) -> bool:
        return not self._store.durable or (on_shutdown or spec.on_shutdown) == "destroy"

    async def flush(self) -> None:
        """Return once everything that was decided so far is on disk. Call it before a response that depends on it.

        Raises:
            StorageUnavailable: it cannot be written.
        """
        await self._store.flush()

    # Pools.

    async def put_pool(
        self, name: str, spec: PoolSpec, *, actor: Actor = SERVICE, tenant: str | None = None, check: Check = allow_any_change, origin: str = "api"
    ) -> tuple[PoolView, bool]:
        """Create a pool, or change one. Counts and timeouts change in place; for any other change the old sandboxes drain and new ones are created.

        Args: see `Catalog.put_pool`.

        Returns:
            The pool's view, and whether the pool was created.

        Raises:
            PoolServiceError: as `Catalog.put_pool`.
        """
        pool, made = await self._catalog.put_pool(name, spec, origin, actor, tenant, check)
        return self._view_of(pool), made

    async def delete_pool(self, name: str, *, actor: Actor = SERVICE, tenant: str | None = None, force: bool = False) -> None:
        """Close a pool. It is removed when its last lease has ended, or now with `force`.

        Args: see `Catalog.delete_pool`.

        Raises:
            PoolServiceError: as `Catalog.delete_pool`.
        """
        await self._catalog.delete_pool(name, actor, tenant, force=force)

    async def verify(self, name: str, *, actor: Actor = SERVICE, tenant: str | None = None) -> Mapping[str, Any]:
        """Test the resets of a pool's free slots. The test goes on even if this call is cancelled.

        Args:
            name: the pool's name.
            actor: the tenant that sends the request.
            tenant: the tenant that owns the pool; default the actor's own, else a shared pool.

        Returns:
            See `verify.verify`.

        Raises:
            PoolNotFound: there is no pool of that name.
            NoCapacity: no slot is free.
            NotImplementedHere: the pool's agents have no such test.
        """
        return await verify(find_pool(self._pools, name, actor, tenant))

    async def drain_sandbox(self, sandbox_id: str, *, actor: Actor = SERVICE) -> SandboxView:
        """Give a sandbox no new leases. It is destroyed when its last lease ends.

        Args:
            sandbox_id: the sandbox.
            actor: the tenant that sends the request.

        Raises:
            SandboxNotFound: there is no sandbox with that id.
            StorageUnavailable: it cannot be written to disk.
        """
        for pool in self._pools.values():
            sandbox = pool.fleet.sandboxes.get(sandbox_id)
            if sandbox is not None:
                pool.drain_sandbox(sandbox_id, "an admin drained it", by=actor.tenant)
                await self._store.flush()
                return sandbox_view(pool, sandbox)
        raise SandboxNotFound(f"there is no sandbox {sandbox_id!r}")

    # Acquire and release.

    async def acquire(self, request: AcquireRequest) -> Acquired:
        """Wait for `count` slots of a pool, all or nothing.

        A request that is cancelled leaves the queue, or gives back what it was granted. With a `request_key`, granted leases are kept for a retry.

        Args:
            request: the acquire.

        Raises:
            PoolNotFound: there is no such pool.
            CallConflict: the request key was used with another request.
            LeaseLost: all leases of the request key have ended, or it was released.
            QuotaExceeded: the tenant has as many leases as it may have, or too many acquires are waiting.
            PoolServiceError: as `Pool.acquire`.
        """
        pool = find_pool(self._pools, request.pool, Actor(tenant=request.tenant))
        if request.request_key is None:
            return await self._acquire(pool, request)
        record = self._keys.granted(request)
        if record is None:
            return await self._keys.join(request, lambda: self._acquire(pool, request))
        try:
            leases = tuple(self._find_lease(lease_id)[1] for lease_id in record.lease_ids)
        except LeaseNotFound:
            raise LeaseLost("the leases of this request_key ended long ago") from None
        if all(lease.ended_at is not None for lease in leases):
            raise end_error(leases[0])
        return Acquired(leases=leases, waited_s=0.0)

    def _admits(self, request: AcquireRequest) -> bool:
        return self._quotas.admits(request)

    async def _acquire(self, pool: Pool, request: AcquireRequest) -> Acquired:
        arrived, wait_s = pool.now(), longest_wait_s(request, pool.spec)
        turn = await pool.pace.wait_for_turn(request.tenant, lambda: pool.book.table.free_count > 0, wait_s=wait_s, priority=request.priority)
        # Only now: what is checked must still be true when the acquire is granted or queued.
        self._keys.check_not_released(request)
        self._quotas.check_leases(request, pool)
        acquired = await pool.acquire(request, self._quotas.check_waiters, arrived)
        turn.runs_call = lambda: any(pool.book.lease_index.runs_call(lease.lease_id) for lease in acquired.leases)
        return acquired

    def release_undelivered_leases(self, acquired: Acquired, request_key: str | None) -> None:
        """Release leases that their client did not receive, because it has disconnected. With a request key they are kept for a retry.

        Args:
            acquired: the result of the acquire.
            request_key: the key of the acquire.
        """
        if request_key is None:
            for lease in acquired.leases:
                pool, _ = self._find_lease(lease.lease_id)
                if pool is not None:
                    pool.release_lease(lease.lease_id, keep=False)

    def release(
        self,
        tenant: str,
        lease_ids: Sequence[str] | None = None,
        run_id: str | None = None,
        reset_workspace: bool = True,
        *,
        request_key: str | None = None,
    ) -> tuple[list[str], list[str]]:
        """End leases, by id, all of a run, or those of one acquire. The resets of their slots go on in the background.

        Args:
            tenant: the tenant of the leases.
            lease_ids: the leases.
            run_id: the run whose leases end, too.
            reset_workspace: False keeps the slots' files for the next leases of the same run.
            request_key: the key of an acquire whose leases end, too. The acquire is refused if it still waits, is being granted, or arrives later.

        Returns:
            The ids of the leases that have ended, now or before, and the ids that are not leases of the tenant.
        """
        keep = not reset_workspace
        released: dict[str, None] = {}
        unknown: list[str] = []
        for lease_id in dict.fromkeys((*(lease_ids or ()), *self._release_request_key(tenant, request_key))):
            try:
                pool, _ = self._find_lease(lease_id, tenant)
            except LeaseNotFound:
                unknown.append(lease_id)
                continue
            if pool is not None:
                pool.release_lease(lease_id, keep=keep)
            released[lease_id] = None
        if run_id is not None:
            for pool in self._pools.values():
                released.update(dict.fromkeys(pool.release_run(tenant, run_id, keep=keep)))
        return list(released), unknown

    def _release_request_key(self, tenant: str, request_key: str | None) -> tuple[str, ...]:
        """Refuse the acquires with a request key, now and later. Returns the leases that were granted and delivered under it."""
        if request_key is None:
            return ()
        tenant_key = (tenant, request_key)
        lease_ids = self._keys.release_key(tenant_key)
        for pool in self._pools.values():
            pool.release_request_key(tenant_key)
        return lease_ids

    # Leases.

    def renew(self, tenant: str, lease_ids: Iterable[str], ttl_s: float) -> tuple[list[Lease], list[PoolServiceError]]:
        """Let held leases last at least `ttl_s` seconds from now. A lease never becomes shorter.

        Args:
            tenant: the tenant of the leases.
            lease_ids: the leases.
            ttl_s: that time, in seconds.

        Returns:
            The renewed leases, and an error with a `lease_id` for each that could not be renewed.
        """
        leases: list[Lease] = []
        lost: list[PoolServiceError] = []
        for lease_id in dict.fromkeys(lease_ids):
            try:
                pool, _ = self._find_held_lease(tenant, lease_id)
            except PoolServiceError as error:
                lost.append(error)
            else:
                lease = pool.book.renew_lease(lease_id, ttl_s)
                pool.events.publish_lease_event("lease.renewed", lease, expires_at=lease.expires_at)
                leases.append(lease)
        return leases, lost

    async def narrow(self, tenant: str, lease_id: str, *, allow_network: bool | None = None, cache: str | None = None, read_only: Sequence[str] = ()) -> Lease:
        """Take rights away from a held lease. Its processes end, and its files stay. Taking away a right that it does not have changes nothing.

        Args:
            tenant: the tenant of the lease.
            lease_id: the lease.
            allow_network: False takes the network away; None leaves it as it is.
            cache: `none` takes the cache away; None leaves it as it is.
            read_only: the entries at the top of the workspace that become read-only, in addition to those that are so already.

        Raises:
            LeaseNotFound, LeaseLost, SandboxLost: there is no such lease, or it has ended.
            InvalidRequest: the lease would get a right that it does not have, or an entry does not exist or cannot be made read-only.
            NotImplementedHere: the slot's isolation mode cannot take this right away.
            BackendUnavailable: the agent cannot be reached, or has failed.
        """
        # One request after another: a second one starts from the rights that the first has left.
        async with self._locks.setdefault(lease_id, asyncio.Lock()):
            pool, lease = self._find_held_lease(tenant, lease_id)
            return await narrow(pool, lease, allow_network, cache, read_only)

    def locate_slot(self, tenant: str, lease_id: str) -> PoolSlotLocation:
        """Find the slot of a held lease, to which its calls and file transfers are sent.

        Raises:
            LeaseNotFound: the tenant has no such lease.
            LeaseLost: it has ended.
            SandboxLost: it has ended with its sandbox.
            BackendUnavailable: the agent cannot be reached now.
        """
        pool, lease = self._find_held_lease(tenant, lease_id)
        return locate_slot(pool, lease)

    def record_call_start(self, lease_id: str) -> None:
        """Note that a call of a lease begins. The lease expires 60 s after its last call has ended at the earliest."""
        pool = self._directory.pool_of(lease_id)
        if pool is not None:
            pool.book.record_call_start(lease_id)

    def record_call_end(self, lease_id: str) -> None:
        """Note that a call of a lease has ended."""
        pool = self._directory.pool_of(lease_id)
        if pool is not None:
            pool.book.record_call_end(lease_id)

    def follow_ended_leases(self) -> AsyncIterator[str]:
        """The ids of all leases that end from this call on, in order and without an end."""
        return self._directory.follow_ended_leases()

    async def wait_for_reconnect_or_loss(self, lease_id: str, wait_s: float) -> SandboxLost | None:
        """Wait, after a link was lost, until it is known whether the sandbox is lost as well.

        Args:
            lease_id: a lease of that sandbox.
            wait_s: the longest time to wait, in seconds.

        Returns:
            How the sandbox was lost; None if its agent can be reached again, the lease has ended in another way, or the time is over.
        """
        try:
            pool, lease = self._find_lease(lease_id)
            if pool is None:
                error = end_error(lease)
                return error if isinstance(error, SandboxLost) else None
            async with asyncio.timeout(wait_s):
                return await wait_for_reconnect_or_loss(pool, lease_id)
        except (LeaseNotFound, TimeoutError):
            return None
