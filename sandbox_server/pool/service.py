"""All pools of the service behind one face: what the api and the dispatch may ask."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

from sandbox_server.backends.base import Backend
from sandbox_server.core.clock import Clock
from sandbox_server.core.errors import LeaseLost, LeaseNotFound, PoolServiceError, SandboxLost, SandboxNotFound
from sandbox_server.core.types import Acquired, AcquireRequest, Lease, PoolId, PoolSpec, PoolView, SandboxState, SandboxView
from sandbox_server.link import connect as connect_to_agent
from sandbox_server.pool.access import SERVICE, Actor, find_pool, may_see, seen_pools
from sandbox_server.pool.catalog import BUILT_IN, OF_THE_FILE, Catalog, Check, LoadBackend, anything, load_nothing
from sandbox_server.pool.dependencies import Connect, PoolDependencies
from sandbox_server.pool.fleet.orphans import Orphans
from sandbox_server.pool.leasing.ended_leases import end_error
from sandbox_server.pool.leasing.held_lease import lease_with_current_expiry
from sandbox_server.pool.leasing.request_keys import RequestKeys
from sandbox_server.pool.narrow import narrow
from sandbox_server.pool.pool import Pool, SlotLocation
from sandbox_server.pool.verify import verify
from sandbox_server.pool.views import pool_view, readiness, sandbox_view
from sandbox_server.store.base import Store

log = logging.getLogger(__name__)

STOP_WITHIN_S = 8.0


class PoolService:
    """Every pool of one service.

    Args:
        specs: the pools that no tenant owns, by name.
        backends: every backend the specs name, by name.
        store: what must outlive a crash.
        clock: monotonic and wall time.
        connect: how a link to an agent is made.
        owner: who the sandboxes on the backends belong to: this service, by its state.
        wiring: everything else, for tests and special cases; its store, clock and connect are the ones used.
        origins: where each spec came from, by pool name; default `file`.
        load_backend: makes a backend that no pool has used yet.
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
        #: the leases that were on record when it started
        self.restored: frozenset[str] = frozenset()
        self._dependencies = dependencies
        self._store = dependencies.store
        self._recorded: frozenset[str] = frozenset()
        self._orphans = Orphans(owner, self._known_sandboxes, dependencies)
        self._keys = RequestKeys(dependencies.clock, dependencies.store)
        self._catalog = Catalog(backends, load_backend, dependencies)
        self._pools = self._catalog.pools
        self._quotas = self._catalog.quotas
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._started = False
        for name, spec in specs.items():
            self._catalog.add(PoolId(name), spec, (origins or {}).get(name, OF_THE_FILE))

    # Life.

    async def start(self) -> None:
        """Take over the pools, leases and sandboxes of an earlier life, take away what nobody recorded, and begin to fill."""
        state = self._store.load()
        self.restored = frozenset(lease.lease_id for lease in state.leases)
        self._catalog.restore(state)
        self._keys.restore(state.keys)
        self._recorded = frozenset(record.sandbox_id for record in state.sandboxes)
        await self._orphans.sweep(self._catalog.backends)
        for pool in list(self._pools.values()):
            self._catalog.start(pool)
        self._started = True

    async def stop(self, on_shutdown: str | None = None) -> None:
        """Refuse new work, fail who waits, and leave or destroy the sandboxes; within `STOP_WITHIN_S`. The store stays open.

        Args:
            on_shutdown: `keep` or `destroy`, for all pools; default what each pool's spec says. A store that forgets always destroys:
                nothing could adopt what it left.
        """
        await self._orphans.stop()
        try:
            async with asyncio.timeout(STOP_WITHIN_S):
                await self._catalog.stop(lambda spec: self._destroys(spec, on_shutdown))
        except TimeoutError:
            log.error("not every sandbox was gone within %g s", STOP_WITHIN_S)
        for backend in self._catalog.backends.values():
            await backend.close()

    def _known_sandboxes(self) -> frozenset[str]:
        return self._recorded.union(*(pool.fleet.sandboxes for pool in self._pools.values()))

    def _destroys(self, spec: PoolSpec, on_shutdown: str | None) -> bool:
        return not self._store.durable or (on_shutdown or spec.on_shutdown) == "destroy"

    async def flush(self) -> None:
        """Return once everything decided so far is on record, or raise StorageUnavailable; before an answer that depends on it."""
        await self._store.flush()

    # Pools.

    async def put_pool(
        self, name: str, spec: PoolSpec, *, actor: Actor = SERVICE, tenant: str | None = None, check: Check = anything, origin: str = "api"
    ) -> tuple[PoolView, bool]:
        """Make a pool, or change one: counts and timeouts in place, for anything else the old sandboxes drain and new ones come beside.

        Returns:
            The pool, and whether it was made.

        Raises:
            PoolServiceError: whatever `Catalog.put` raises.
        """
        pool, made = await self._catalog.put(name, spec, origin, actor, tenant, check)
        return self._view(pool), made

    async def delete_pool(self, name: str, *, actor: Actor = SERVICE, tenant: str | None = None, force: bool = False) -> None:
        """Let a pool's leases end, then take it away; `force`: now. Answers when that is on record.

        Raises:
            PoolServiceError: whatever `Catalog.delete` raises.
        """
        await self._catalog.delete(name, actor, tenant, force=force)

    async def verify(self, name: str, *, actor: Actor = SERVICE, tenant: str | None = None) -> Mapping[str, Any]:
        """Plant leftovers of every kind in a pool's free slots, reset them, and report what was found. Goes on when nobody waits for it.

        Raises:
            PoolNotFound: there is none of that name.
            NoCapacity: no slot is free.
            NotImplementedHere: its agents cannot.
        """
        return await verify(find_pool(self._pools, name, actor, tenant))

    async def drain_sandbox(self, sandbox_id: str, *, actor: Actor = SERVICE) -> SandboxView:
        """Give a sandbox no new leases; it goes when its last one ends.

        Raises:
            SandboxNotFound: there is none with that id.
            StorageUnavailable: it cannot be recorded.
        """
        for pool in self._pools.values():
            sandbox = pool.fleet.sandboxes.get(sandbox_id)
            if sandbox is not None:
                if sandbox.state in (SandboxState.STARTING, SandboxState.READY):
                    pool.fleet.drain(sandbox, "an admin drained it", by=actor.tenant)
                    log.info("a sandbox was drained", extra={**sandbox.fields, "by": actor.tenant})
                await self._store.flush()
                return sandbox_view(pool, sandbox)
        raise SandboxNotFound(f"there is no sandbox {sandbox_id!r}")

    # The three verbs.

    async def acquire(self, request: AcquireRequest) -> Acquired:
        """Wait for `count` slots of a pool, all or nothing.

        Cancelling leaves the queue, or gives back what was granted; with a `request_key` what was granted is kept for a retry.

        Raises:
            PoolNotFound: there is no such pool; and whatever `Pool.acquire` raises.
            CallConflict: the key was used with another body.
            LeaseLost: the key's leases have all ended.
            QuotaExceeded: its tenant has all the leases it may have, or too many wait, of all or of its tenant's.
        """
        pool = find_pool(self._pools, request.pool, Actor(tenant=request.tenant))
        if request.request_key is None:
            return await self._acquire(pool, request)
        record = self._keys.granted(request)
        if record is None:
            return await self._keys.join(request, lambda: self._acquire(pool, request))
        try:
            leases = tuple(self._find(lease_id)[1] for lease_id in record.lease_ids)
        except LeaseNotFound:
            raise LeaseLost("the leases of this request_key ended long ago") from None
        if all(lease.ended_at is not None for lease in leases):
            raise end_error(leases[0])
        return Acquired(leases=leases, waited_s=0.0)

    def _admits(self, request: AcquireRequest) -> bool:
        return self._quotas.admits(request)

    async def _acquire(self, pool: Pool, request: AcquireRequest) -> Acquired:
        self._quotas.check_leases(request, pool)
        return await pool.acquire(request, self._quotas.check_waiters)

    def undelivered(self, acquired: Acquired, request_key: str | None) -> None:
        """The caller was gone when its answer came: release what it was granted, or keep it for a retry under its key."""
        if request_key is None:
            for lease in acquired.leases:
                pool, _ = self._find(lease.lease_id)
                if pool is not None:
                    pool.release(lease.lease_id, keep=False)

    def release(
        self, tenant: str, lease_ids: Sequence[str] | None = None, run_id: str | None = None, reset_workspace: bool = True
    ) -> tuple[list[str], list[str]]:
        """End leases, by id or all of a run. Answers at once; the resets run behind.

        Returns:
            The ids released (those that had ended before too), and those that are not known as this tenant's.
        """
        keep = not reset_workspace
        released: dict[str, None] = {}
        unknown: list[str] = []
        for lease_id in dict.fromkeys(lease_ids or ()):
            try:
                pool, _ = self._find(lease_id, tenant)
            except LeaseNotFound:
                unknown.append(lease_id)
                continue
            if pool is not None:
                pool.release(lease_id, keep=keep)
            released[lease_id] = None
        if run_id is not None:
            for pool in self._pools.values():
                released.update(dict.fromkeys(pool.release_run(tenant, run_id, keep=keep)))
        return list(released), unknown

    # Leases.

    def renew(self, tenant: str, lease_ids: Iterable[str], ttl_s: float) -> tuple[list[Lease], list[PoolServiceError]]:
        """Let leases last at least `ttl_s` from now.

        Returns:
            The leases renewed, and an error with a `lease_id` for each that could not be.
        """
        leases: list[Lease] = []
        lost: list[PoolServiceError] = []
        for lease_id in dict.fromkeys(lease_ids):
            try:
                pool, _ = self._held(tenant, lease_id)
            except PoolServiceError as error:
                lost.append(error)
            else:
                lease = pool.book.renew_lease(lease_id, ttl_s)
                pool.lease_event("lease.renewed", lease, expires_at=lease.expires_at)
                leases.append(lease)
        return leases, lost

    async def narrow(self, tenant: str, lease_id: str, *, allow_network: bool | None = None, cache: str | None = None) -> Lease:
        """Take rights away from a held lease: its processes end, its files stay. What it has not got to begin with changes nothing.

        Args:
            tenant: whose lease it is.
            lease_id: which lease.
            allow_network: False takes the network away; None leaves it.
            cache: `none` takes the cache away; None leaves it.

        Raises:
            LeaseNotFound, LeaseLost, SandboxLost: there is no such lease, or it has ended.
            InvalidRequest: it would widen them.
            NotImplementedHere: the slot's isolation mode cannot.
            BackendUnavailable: its agent cannot be reached, or could not do it.
        """
        # One after another: what the second asks is told from what the first has left.
        async with self._locks.setdefault(lease_id, asyncio.Lock()):
            pool, lease = self._held(tenant, lease_id)
            return await narrow(pool, lease, allow_network, cache)

    def lease(self, tenant: str, lease_id: str) -> Lease:
        """A held lease.

        Raises:
            LeaseNotFound: it was never known, or is another tenant's.
            LeaseLost: it has ended; SandboxLost where that was with its sandbox.
        """
        pool, lease = self._held(tenant, lease_id)
        return lease_with_current_expiry(pool.book.held[lease.lease_id], self._dependencies.clock)

    def leases(
        self, tenant: str, run_id: str | None = None, trajectory_id: str | None = None, limit: int = 100, cursor: str | None = None
    ) -> tuple[list[Lease], str | None]:
        """The held leases of a tenant, in an order that stands, one page at a time.

        Returns:
            The page, and the cursor of the next one if there is more.
        """
        mine = (
            lease_with_current_expiry(held_lease, self._dependencies.clock)
            for pool in self._pools.values()
            for held_lease in pool.book.held.values()
            if held_lease.lease.tenant == tenant
            and (run_id is None or held_lease.lease.run_id == run_id)
            and (trajectory_id is None or held_lease.lease.trajectory_id == trajectory_id)
        )
        after = sorted((lease for lease in mine if cursor is None or lease.lease_id > cursor), key=lambda lease: lease.lease_id)
        page = after[:limit]
        return page, page[-1].lease_id if len(after) > limit else None

    def route(self, tenant: str, lease_id: str) -> SlotLocation:
        """Where the work of a lease goes now.

        Raises:
            LeaseNotFound: it was never known, or is another tenant's.
            LeaseLost: it has ended; SandboxLost where that was with its sandbox.
            BackendUnavailable: its agent cannot be reached at the moment.
        """
        pool, lease = self._held(tenant, lease_id)
        return pool.route(lease)

    def call_started(self, lease_id: str) -> None:
        """A call of this lease begins; the lease does not expire under it, nor within 60 s after its end."""
        for pool in self._pools.values():
            pool.book.call_started(lease_id)

    def call_ended(self, lease_id: str) -> None:
        """The call has ended."""
        for pool in self._pools.values():
            pool.book.call_ended(lease_id)

    def when_a_lease_ends(self, hear: Callable[[str], None]) -> None:
        """Have this told the id of every lease that ends from now on, however that comes."""
        self._dependencies.lease_watchers.append(hear)

    async def wait_for_reconnect_or_loss(self, lease_id: str, wait_s: float) -> SandboxLost | None:
        """After a lost link: wait until it is known whether the sandbox is.

        Args:
            lease_id: a lease of that sandbox.
            wait_s: how long to wait, in seconds.

        Returns:
            How it was lost; None if the link is back, the lease ended otherwise, or nothing is known after `wait_s`.
        """
        try:
            pool, lease = self._find(lease_id)
            if pool is None:
                error = end_error(lease)
                return error if isinstance(error, SandboxLost) else None
            async with asyncio.timeout(wait_s):
                return await pool.wait_for_reconnect_or_loss(lease_id)
        except (LeaseNotFound, TimeoutError):
            return None

    # Looking.

    def views(self, *, actor: Actor = SERVICE, tenant: str | None = None) -> list[PoolView]:
        """What an actor may see of its own pools and the shared ones; `tenant`: of that tenant's, `*`: of all, for admins.

        Raises:
            Forbidden: somebody who is no admin names another tenant.
        """
        return [self._view(pool) for pool in sorted(seen_pools(self._pools, actor, tenant), key=lambda pool: (pool.name, pool.pool_id.tenant or ""))]

    def view(self, name: str, *, actor: Actor = SERVICE, tenant: str | None = None) -> PoolView:
        """What an actor may see of a pool: its own of that name, else the shared one; `tenant`: that tenant's, for admins.

        Raises:
            PoolNotFound, Forbidden: there is none of that name, or somebody who is no admin names another tenant.
        """
        return self._view(find_pool(self._pools, name, actor, tenant))

    def _view(self, pool: Pool) -> PoolView:
        return pool_view(pool, self._catalog.origins[pool.pool_id])

    def sandboxes(self, *, actor: Actor = SERVICE) -> list[SandboxView]:
        """What an actor may see of the sandboxes: of its own pools and of shared ones, an admin of all."""
        return [sandbox_view(pool, sandbox) for pool in self._pools.values() if may_see(actor, pool) for sandbox in pool.fleet.sandboxes.values()]

    def readiness(self) -> dict[str, Any]:
        """`{"ready": …, "pools": {name: {"ready", "sandboxes", "min_sandboxes", "last_error"}}}`, of the settings file's pools: others are their owners'."""
        given = [pool for pool_id, pool in self._pools.items() if self._catalog.origins[pool_id] in (OF_THE_FILE, BUILT_IN)]
        pools = {pool.name: readiness(pool, self._orphans.troubles.get(pool.spec.backend)) for pool in given}
        return {"ready": self._started and all(pool["ready"] for pool in pools.values()), "pools": pools}

    # Finding.

    def _find(self, lease_id: str, tenant: str | None = None) -> tuple[Pool | None, Lease]:
        """The lease, and its pool if it is held."""
        for pool in self._pools.values():
            held_lease = pool.book.held.get(lease_id)
            if held_lease is not None:
                if tenant in (None, held_lease.lease.tenant):
                    return pool, held_lease.lease
                break
        lease = self._catalog.ended_leases.get(lease_id)
        if lease is not None and tenant in (None, lease.tenant):
            return None, lease
        raise LeaseNotFound(f"there is no lease {lease_id!r}, or it is not yours", lease_id=lease_id)

    def _held(self, tenant: str, lease_id: str) -> tuple[Pool, Lease]:
        pool, lease = self._find(lease_id, tenant)
        if pool is None:
            raise end_error(lease)
        return pool, lease
