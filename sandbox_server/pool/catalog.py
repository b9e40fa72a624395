"""Which pools there are: those of the settings file, those made while the service runs, those of an earlier life. Made, changed, and taken away.

Log lines and events say which tenant did it (`by`), which may be an admin at another tenant's pool.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from sandbox_server.backends.base import Backend
from sandbox_server.core.errors import InvalidRequest, PoolConflict, PoolServiceError, QuotaExceeded
from sandbox_server.core.types import PoolId, PoolSpec
from sandbox_server.pool import access
from sandbox_server.pool.access import Actor
from sandbox_server.pool.dependencies import PoolDependencies
from sandbox_server.pool.fleet.backend_access import BackendAccess, access_backend
from sandbox_server.pool.leasing.ended_leases import EndedLeases
from sandbox_server.pool.pool import Pool
from sandbox_server.pool.quotas import Quotas
from sandbox_server.store.base import Deletion, PoolRecord, SandboxRecord, State

log = logging.getLogger(__name__)

OF_THE_FILE = "file"
#: of no file: the pool that a service without one has
BUILT_IN = "default"
DELETED = "the pool was deleted"

LoadBackend = Callable[[str], Backend]
Check = Callable[[PoolSpec | None], None]
"""Refuses, by raising, what may not become of a pool of this spec; None: of none."""


def load_nothing(name: str) -> Backend:
    """There are no backends but those given.

    Raises:
        InvalidRequest: always.
    """
    raise InvalidRequest(f"there is no backend {name!r} here", field="backend")


def anything(now: PoolSpec | None) -> None:
    """Everything may become of it."""


class Catalog:
    """The pools by their ids.

    Args:
        backends: every backend that is in use, by name.
        load_backend: makes one that was not.
        wiring: what every pool is given.
    """

    def __init__(self, backends: Mapping[str, Backend], load_backend: LoadBackend, dependencies: PoolDependencies) -> None:
        self.pools: dict[PoolId, Pool] = {}
        self.origins: dict[PoolId, str] = {}
        self.quotas = Quotas(self.pools, dependencies)
        self.backends = dict(backends)
        self.ended_leases = EndedLeases(dependencies.store.put, dependencies.store.lease)
        self._load_backend = load_backend
        self._dependencies = dependencies
        self._accesses: dict[str, BackendAccess] = {}
        self._watches: set[asyncio.Task[None]] = set()
        self._changing = asyncio.Lock()

    def add(self, pool_id: PoolId, spec: PoolSpec, origin: str) -> Pool:
        """Make a pool; it does nothing before it is started.

        Raises:
            InvalidRequest, NotImplementedHere: its backend cannot be had.
        """
        if spec.backend not in self.backends:
            self.backends[spec.backend] = self._load_backend(spec.backend)
        if spec.backend not in self._accesses:
            self._accesses[spec.backend] = access_backend(self.backends[spec.backend], self._dependencies)
        pool = self.pools[pool_id] = Pool(pool_id, spec, self._accesses[spec.backend], self._dependencies, self.ended_leases)
        self.origins[pool_id] = origin
        return pool

    def restore(self, state: State) -> None:
        """Bring back the pools of an earlier life, with their sandboxes and leases. Before any is started."""
        for record in state.pools:
            if record.pool_id in self.pools:
                log.warning("the settings file has a pool of this name now; the one that was made over the api is forgotten", extra=record.pool_id.fields)
                self._dependencies.store.put(Deletion(pool=record.pool_id.key))
                continue
            if record.spec.shared and PoolId(record.name) in self.pools:
                log.warning("the settings file has a pool of this name now: to other tenants the name means that one", extra=record.pool_id.fields)
            self._add_again(record.pool_id, record.spec, record.origin, closes=DELETED if record.closing else None)
        for sandbox in state.sandboxes:
            if sandbox.pool_id not in self.pools:
                self._add_for(sandbox)
        self.ended_leases.restore_all(state.leases, self._dependencies.clock)
        for pool in self.pools.values():
            pool.restore(state)

    def _add_again(self, pool_id: PoolId, spec: PoolSpec, origin: str, *, closes: str | None) -> None:
        try:
            pool = self.add(pool_id, spec, origin)
        except PoolServiceError as error:
            log.error("a pool of an earlier life cannot be served: %s", error.detail, extra=pool_id.fields)
            return
        if closes is not None:
            pool.close(closes)

    def _add_for(self, sandbox: SandboxRecord) -> None:
        """Its pool is in no settings file any more: it may end its leases in peace."""
        if sandbox.spec is not None:
            log.warning("the settings file has no such pool any more: what it still has drains", extra=sandbox.pool_id.fields)
            self._add_again(sandbox.pool_id, sandbox.spec, OF_THE_FILE, closes="no settings file has the pool any more")

    def start(self, pool: Pool) -> None:
        """Let a pool fill, and take it away when it is over."""
        pool.start()
        task = asyncio.create_task(self._take_away(pool))
        self._watches.add(task)
        task.add_done_callback(self._watches.discard)

    async def _take_away(self, pool: Pool) -> None:
        await pool.over.wait()
        await pool.stop(destroy=True)
        del self.pools[pool.pool_id]
        if self.origins.pop(pool.pool_id) not in (OF_THE_FILE, BUILT_IN):
            self._dependencies.store.put(Deletion(pool=pool.pool_id.key))
        pool.pool_event("pool.deleted", by=pool.closed_by)
        log.info("a pool is gone", extra=_did(pool.pool_id, pool.closed_by))

    async def put(self, name: str, spec: PoolSpec, origin: str, actor: Actor, tenant: str | None, check: Check) -> tuple[Pool, bool]:
        """Make a pool, or change one. What is answered is on record.

        Args:
            name: what it is called.
            spec: what it is to be.
            origin: where the spec came from.
            actor: who wants it.
            tenant: whose pool it is; default the actor's own, else one that no tenant owns and the actor may change.
            check: refuses what the actor may not make of the pool as it is.

        Returns:
            The pool, and whether it was made.

        Raises:
            PoolConflict: it is of the settings file or built in, is being deleted, lives on another backend, or a shared pool has the name.
            QuotaExceeded: there are too many, or its owner's pools promise too much.
            Forbidden: it is not the actor's to change.
            InvalidRequest, NotImplementedHere: its backend cannot be had.
            StorageUnavailable: it cannot be recorded; nothing has changed.
        """
        async with self._changing:
            pool_id, pool = access.find_to_put(self.pools, name, actor, tenant)
            if pool is not None:
                self._check_changeable(pool)
            check(None if pool is None else pool.spec)
            if pool is not None and self._is_same(pool, spec):
                pool.change(spec)
                return pool, False
            self._check_new(pool_id, pool, spec)
            record = PoolRecord(name=name, tenant=pool_id.tenant, spec=spec, origin=origin)
            await self._record(record, replace(record, spec=pool.spec) if pool is not None else Deletion(pool=pool_id.key))
            made = pool is None
            if pool is None:
                pool = self.add(pool_id, spec, origin)
                self.start(pool)
            else:
                pool.change(spec)
            pool.pool_event("pool.created" if made else "pool.changed", by=actor.tenant)
            log.info("a pool was made" if made else "a pool was changed", extra=_did(pool_id, actor.tenant))
            return pool, made

    def _check_new(self, pool_id: PoolId, pool: Pool | None, spec: PoolSpec) -> None:
        """Refuse a spec with which there would be too much, of this pool or of all."""
        if pool is None:
            most = self._dependencies.limits.max_pools
            if len(self.pools) >= most:
                raise QuotaExceeded(f"there are {len(self.pools)} pools, and `limits.pools` is {most}: delete one first", limit="pools", retry_after_s=5)
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

    async def delete(self, name: str, actor: Actor, tenant: str | None, *, force: bool) -> None:
        """Close a pool; it goes when its last lease ends, or now. What is answered is on record.

        Args:
            name: what it is called.
            actor: who wants it.
            tenant: whose pool it is; default the actor's own, else a shared one.
            force: its leases end now.

        Raises:
            PoolNotFound: there is none of that name.
            PoolConflict: it is of the settings file, built in, or another admin's.
            Forbidden: it is not the actor's to delete.
            StorageUnavailable: it cannot be recorded; nothing has changed.
        """
        async with self._changing:
            pool = access.find_to_delete(self.pools, name, actor, tenant)
            if self.origins[pool.pool_id] == BUILT_IN:
                how = "start the service with a settings file that names its pools, with `on_shutdown: destroy` to have them go when it stops"
                raise PoolConflict(f"pool {name!r} is built in and cannot be deleted: {how}")
            self._check_changeable(pool)
            record = PoolRecord(name=name, tenant=pool.pool_id.tenant, spec=pool.spec, origin=self.origins[pool.pool_id])
            await self._record(replace(record, closing=True), replace(record, closing=pool.closing))
            pool.close(DELETED, force=force, by=actor.tenant)
            log.info("a pool was deleted%s", ": its leases end now" if force else "", extra=_did(pool.pool_id, actor.tenant))

    async def _record(self, record: PoolRecord, before: PoolRecord | Deletion) -> None:
        self._dependencies.store.put(record)
        try:
            await self._dependencies.store.flush()
        except BaseException:
            self._dependencies.store.put(before)
            raise

    async def stop(self, destroys: Callable[[PoolSpec], bool]) -> None:
        """Stop every pool; `destroys` says whether its sandboxes go too."""
        for watch in list(self._watches):
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        try:
            await asyncio.gather(*(pool.stop(destroy=destroys(pool.spec)) for pool in list(self.pools.values())))
        finally:
            await asyncio.gather(*(access.observer.close() for access in self._accesses.values()))


def _did(pool_id: PoolId, by: str | None) -> dict[str, Any]:
    """What a log line says of a pool, and of the tenant that did something to it; None: the service did by itself."""
    return {**pool_id.fields, "by": by}
