"""Creates, changes and deletes pools: those of the settings file, those created over the API, and those that an earlier service has recorded.

Log lines and events name the tenant that asked for a change (`by`). It may be an admin who changes another tenant's pool.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from sandbox_server.backends.base import Backend
from sandbox_server.core.cleanup import cleanup_on_failure
from sandbox_server.core.errors import InvalidRequest, PoolConflict, PoolServiceError, QuotaExceeded
from sandbox_server.core.types import PoolId, PoolSpec
from sandbox_server.pool import access
from sandbox_server.pool.access import Actor
from sandbox_server.pool.dependencies import PoolDependencies
from sandbox_server.pool.fleet.supervision.backend_access import BackendAccess, access_backend
from sandbox_server.pool.lease_directory import LeaseDirectory
from sandbox_server.pool.leasing.ended_leases import EndedLeases
from sandbox_server.pool.operations.quotas import Quotas
from sandbox_server.pool.pool import Pool
from sandbox_server.store.base import Deletion, PoolRecord, SandboxRecord, State

log = logging.getLogger(__name__)

OF_THE_FILE = "file"
#: The origin of the pool that a service without a settings file has.
BUILT_IN = "default"
DELETED = "the pool was deleted"

LoadBackend = Callable[[str], Backend]
Check = Callable[[PoolSpec | None], None]
"""Raises if a pool with this spec may not be changed as asked; None stands for a pool that does not exist yet."""


def load_nothing(name: str) -> Backend:
    """Refuse every backend: for a service that has no others than those it was given.

    Raises:
        InvalidRequest: always.
    """
    raise InvalidRequest(f"there is no backend {name!r} here", field="backend")


def allow_any_change(now: PoolSpec | None) -> None:
    """Allow every change of a pool."""


class Catalog:
    """The pools of a service, by id.

    Args:
        backends: the backends that are in use, by name.
        load_backend: makes a backend that is not in use yet.
        dependencies: the dependencies of every pool.

    Attributes:
        pools: the pools.
        origins: where each pool's spec came from.
        quotas: what each tenant may have of all pools together.
        backends: the backends that are in use, by name.
        ended_leases: the ended leases, which are remembered after their pools are gone.
        directory: the index from held leases to pools.
        tasks: the tasks that wait for closed pools to be gone.
    """

    def __init__(self, backends: Mapping[str, Backend], load_backend: LoadBackend, dependencies: PoolDependencies) -> None:
        self.pools: dict[PoolId, Pool] = {}
        self.origins: dict[PoolId, str] = {}
        self.quotas = Quotas(self.pools, dependencies)
        self.backends = dict(backends)
        self.ended_leases = EndedLeases(dependencies.store.put, dependencies.store.find_lease)
        self.directory: LeaseDirectory[Pool] = LeaseDirectory()
        self.tasks: set[asyncio.Task[None]] = set()
        self._load_backend = load_backend
        self._dependencies = dependencies
        self._accesses: dict[str, BackendAccess] = {}
        self._changing = asyncio.Lock()

    def add_pool(self, pool_id: PoolId, spec: PoolSpec, origin: str) -> Pool:
        """Create a pool. It does nothing before it is started.

        Args:
            pool_id: its name and its owner.
            spec: how its sandboxes are created, and its limits.
            origin: where the spec came from.

        Raises:
            InvalidRequest, NotImplementedHere: this service cannot use the pool's backend.
        """
        if spec.backend not in self.backends:
            self.backends[spec.backend] = self._load_backend(spec.backend)
        if spec.backend not in self._accesses:
            self._accesses[spec.backend] = access_backend(self.backends[spec.backend], self._dependencies)
        pool = self.pools[pool_id] = Pool(pool_id, spec, self._accesses[spec.backend], self._dependencies, self.directory, self.ended_leases)
        self.origins[pool_id] = origin
        return pool

    def restore_pools(self, state: State) -> None:
        """Restore the pools that an earlier service has recorded, with their sandboxes and leases. Call it before any pool is started."""
        for record in state.pools:
            if record.pool_id in self.pools:
                log.warning("the settings file has a pool of this name now; the pool that was created over the API is deleted", extra=record.pool_id.fields)
                self._dependencies.store.put(Deletion(pool=record.pool_id.key))
                continue
            if record.spec.shared and PoolId(record.name) in self.pools:
                log.warning("the settings file has a pool of this name now: for other tenants the name stands for that pool", extra=record.pool_id.fields)
            self._restore_pool(record.pool_id, record.spec, record.origin, closing_reason=DELETED if record.closing else None)
        for sandbox in state.sandboxes:
            if sandbox.pool_id not in self.pools:
                self._restore_pool_of(sandbox)
        self.ended_leases.remember_leases(state.leases, self._dependencies.clock)
        for pool in self.pools.values():
            pool.restore(state)

    def _restore_pool(self, pool_id: PoolId, spec: PoolSpec, origin: str, *, closing_reason: str | None) -> None:
        try:
            pool = self.add_pool(pool_id, spec, origin)
        except PoolServiceError as error:
            log.error("a recorded pool cannot be served: %s", error.detail, extra=pool_id.fields)
            return
        if closing_reason is not None:
            pool.drain_pool(closing_reason)

    def _restore_pool_of(self, sandbox: SandboxRecord) -> None:
        """Restore a pool that was removed from the settings file, so that the leases in its sandboxes can end by themselves."""
        if sandbox.spec is not None:
            log.warning("the settings file has no such pool any more: the sandboxes that it still has drain", extra=sandbox.pool_id.fields)
            self._restore_pool(sandbox.pool_id, sandbox.spec, OF_THE_FILE, closing_reason="no settings file has the pool any more")

    def start_pool(self, pool: Pool) -> None:
        """Let a pool create sandboxes, and remove it once it is closed and has none left."""
        pool.start()
        task = asyncio.create_task(self._remove_when_gone(pool))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _remove_when_gone(self, pool: Pool) -> None:
        await pool.gone.wait()
        await pool.stop(destroy=True)
        del self.pools[pool.pool_id]
        if self.origins.pop(pool.pool_id) not in (OF_THE_FILE, BUILT_IN):
            self._dependencies.store.put(Deletion(pool=pool.pool_id.key))
        pool.publish_event("pool.deleted", by=pool.closed_by)
        log.info("a pool is gone", extra=_log_fields(pool.pool_id, pool.closed_by))

    async def put_pool(self, name: str, spec: PoolSpec, origin: str, actor: Actor, tenant: str | None, check: Check) -> tuple[Pool, bool]:
        """Create a pool, or change one. When this returns, the pool's record is on disk.

        Args:
            name: its name.
            spec: its spec from now on.
            origin: where the spec came from.
            actor: the tenant that sends the request.
            tenant: the tenant that owns the pool; default the actor's own, else a shared pool that the actor may change.
            check: raises if the actor may not change the pool as it is.

        Returns:
            The pool, and whether it was created.

        Raises:
            PoolConflict: it is a pool of the settings file or built in, is being deleted, is on another backend, or a shared pool has the name.
            QuotaExceeded: there are too many pools, or its owner's pools would have too many slots.
            Forbidden: the actor may not change it.
            InvalidRequest, NotImplementedHere: this service cannot use the pool's backend.
            StorageUnavailable: it cannot be written to disk; nothing has changed.
        """
        async with self._changing:
            pool_id, pool = access.find_to_put(self.pools, name, actor, tenant)
            if pool is not None:
                self._check_changeable(pool)
            check(None if pool is None else pool.spec)
            if pool is not None and self._is_same(pool, spec):
                pool.change_spec(spec)
                return pool, False
            self._check_new(pool_id, pool, spec)
            record = PoolRecord(name=name, tenant=pool_id.tenant, spec=spec, origin=origin)
            await self._record(record, replace(record, spec=pool.spec) if pool is not None else Deletion(pool=pool_id.key))
            if pool is not None:
                pool.change_spec(spec)
                self._report_change(pool, "pool.changed", "a pool was changed", actor)
                return pool, False
            created = self.add_pool(pool_id, spec, origin)
            self.start_pool(created)
            self._report_change(created, "pool.created", "a pool was made", actor)
            return created, True

    def _report_change(self, pool: Pool, event: str, sentence: str, actor: Actor) -> None:
        pool.publish_event(event, by=actor.tenant)
        log.info(sentence, extra=_log_fields(pool.pool_id, actor.tenant))

    def _check_new(self, pool_id: PoolId, pool: Pool | None, spec: PoolSpec) -> None:
        """Check that a spec does not exceed the limits of one tenant or of all pools.

        Raises:
            PoolConflict, QuotaExceeded: it does.
            InvalidRequest, NotImplementedHere: this service cannot use the pool's backend.
        """
        if pool is None:
            limit = self._dependencies.limits.max_pools
            if len(self.pools) >= limit:
                raise QuotaExceeded(f"there are {len(self.pools)} pools, and `limits.pools` is {limit}: delete one first", limit="pools", retry_after_s=5)
        if spec.shared:
            access.check_may_share(self.pools, pool_id)
        self.quotas.check_pool(pool_id, spec, None if pool is None else pool.spec)
        if spec.backend not in self.backends:
            self.backends[spec.backend] = self._load_backend(spec.backend)

    def _is_same(self, pool: Pool, spec: PoolSpec) -> bool:
        if pool.closing:
            raise PoolConflict(f"pool {pool.name!r} is being deleted: make it again when it is gone")
        if pool.spec.backend != spec.backend:
            raise PoolConflict(f"pool {pool.name!r} is on backend {pool.spec.backend!r}, which never changes: delete the pool, or take another name")
        return pool.spec == spec

    def _check_changeable(self, pool: Pool) -> None:
        if self.origins[pool.pool_id] == BUILT_IN:
            raise PoolConflict(f"pool {pool.name!r} is built in: give the service a settings file with one of that name, and start it again")
        if self.origins[pool.pool_id] == OF_THE_FILE:
            raise PoolConflict(f"pool {pool.name!r} is of the settings file: change it there, and start the service again")

    async def delete_pool(self, name: str, actor: Actor, tenant: str | None, *, force: bool) -> None:
        """Close a pool. It is removed when its last lease has ended. When this returns, that is on disk.

        Args:
            name: its name.
            actor: the tenant that sends the request.
            tenant: the tenant that owns the pool; default the actor's own, else a shared pool.
            force: whether all its leases end now.

        Raises:
            PoolNotFound: there is no pool of that name.
            PoolConflict: it is a pool of the settings file, built in, or another admin's.
            Forbidden: the actor may not delete it.
            StorageUnavailable: it cannot be written to disk; nothing has changed.
        """
        async with self._changing:
            pool = access.find_to_delete(self.pools, name, actor, tenant)
            if self.origins[pool.pool_id] == BUILT_IN:
                how = "start the service with a settings file that names its pools, with `on_shutdown: destroy` to have them go when it stops"
                raise PoolConflict(f"pool {name!r} is built in and cannot be deleted: {how}")
            self._check_changeable(pool)
            record = PoolRecord(name=name, tenant=pool.pool_id.tenant, spec=pool.spec, origin=self.origins[pool.pool_id])
            await self._record(replace(record, closing=True), replace(record, closing=pool.closing))
            pool.drain_pool(DELETED, force=force, by=actor.tenant)
            log.info("a pool was deleted%s", ": its leases end now" if force else "", extra=_log_fields(pool.pool_id, actor.tenant))

    async def _record(self, record: PoolRecord, before: PoolRecord | Deletion) -> None:
        self._dependencies.store.put(record)
        with cleanup_on_failure(lambda: self._dependencies.store.put(before)):
            await self._dependencies.store.flush()

    async def stop_pools(self, destroys: Callable[[PoolSpec], bool]) -> None:
        """Stop every pool.

        Args:
            destroys: returns for a pool's spec whether its sandboxes are destroyed or left for another service to adopt.
        """
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        try:
            await asyncio.gather(*(pool.stop(destroy=destroys(pool.spec)) for pool in list(self.pools.values())))
        finally:
            await asyncio.gather(*(access.observer.stop_asking() for access in self._accesses.values()))


def _log_fields(pool_id: PoolId, by: str | None) -> dict[str, Any]:
    """The fields that identify, in a log line, a pool and the tenant that asked for a change of it; None for the service itself."""
    return {**pool_id.fields, "by": by}
