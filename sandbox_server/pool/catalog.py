"""Which pools there are: those of the settings file, those made while the service runs, those of an earlier life. Made, changed, and taken away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from sandbox_server.backends.base import Backend
from sandbox_server.core.errors import InvalidRequest, PoolConflict, PoolNotFound, PoolServiceError, QuotaExceeded
from sandbox_server.core.types import PoolSpec
from sandbox_server.pool.budget import CreationBudget
from sandbox_server.pool.ended import EndedLeases
from sandbox_server.pool.pool import Pool
from sandbox_server.pool.store import Forgotten, PoolRecord, SandboxRecord, State
from sandbox_server.pool.wiring import Wiring

log = logging.getLogger(__name__)

OF_THE_FILE = "file"
#: of no file: the pool that a service without one has
BUILT_IN = "default"
DELETED = "the pool was deleted"

LoadBackend = Callable[[str], Backend]


def load_nothing(name: str) -> Backend:
    """There are no backends but those given.

    Raises:
        InvalidRequest: always.
    """
    raise InvalidRequest(f"there is no backend {name!r} here", field="backend")


class Catalog:
    """The pools by name.

    Args:
        backends: every backend that is in use, by name.
        load_backend: makes one that was not.
        wiring: what every pool is given.
    """

    def __init__(self, backends: Mapping[str, Backend], load_backend: LoadBackend, wiring: Wiring) -> None:
        self.pools: dict[str, Pool] = {}
        self.origins: dict[str, str] = {}
        self.backends = dict(backends)
        self.ended = EndedLeases(wiring.store.put)
        self._load_backend = load_backend
        self._wiring = wiring
        self._budgets: dict[str, CreationBudget] = {}
        self._watches: set[asyncio.Task[None]] = set()
        self._changing = asyncio.Lock()

    def get(self, name: str) -> Pool:
        """The pool of this name.

        Raises:
            PoolNotFound: there is none.
        """
        try:
            return self.pools[name]
        except KeyError:
            raise PoolNotFound(f"there is no pool {name!r}") from None

    def add(self, name: str, spec: PoolSpec, origin: str) -> Pool:
        """Make a pool; it does nothing before it is started.

        Raises:
            InvalidRequest, NotImplementedHere: its backend cannot be had.
        """
        if spec.backend not in self.backends:
            self.backends[spec.backend] = self._load_backend(spec.backend)
        budget = self._budgets.get(spec.backend)
        if budget is None:
            limits, clock, timers = self._wiring.limits, self._wiring.clock, self._wiring.timers
            budget = CreationBudget(spec.backend, at_once=limits.creations_at_once, per_s=limits.creations_per_s, clock=clock, timers=timers)
            self._budgets[spec.backend] = budget
        pool = self.pools[name] = Pool(name, spec, self.backends[spec.backend], budget, self._wiring, self.ended)
        self.origins[name] = origin
        return pool

    def restore(self, state: State) -> None:
        """Bring back the pools of an earlier life, with their sandboxes and leases. Before any is started."""
        for record in state.pools:
            if record.name in self.pools:
                log.warning("the settings file has a pool of this name now; the one that was made over the api is forgotten", extra={"pool": record.name})
                self._wiring.store.put(Forgotten(pool=record.name))
            else:
                self._add_again(record.name, record.spec, record.origin, closes=DELETED if record.closing else None)
        for sandbox in state.sandboxes:
            if sandbox.pool not in self.pools:
                self._add_for(sandbox)
        self.ended.restore_all(state.leases, self._wiring.clock)
        for pool in self.pools.values():
            pool.restore(state)

    def _add_again(self, name: str, spec: PoolSpec, origin: str, *, closes: str | None) -> None:
        try:
            pool = self.add(name, spec, origin)
        except PoolServiceError as error:
            log.error("a pool of an earlier life cannot be served: %s", error.detail, extra={"pool": name})
            return
        if closes is not None:
            pool.close(closes)

    def _add_for(self, sandbox: SandboxRecord) -> None:
        """Its pool is in no settings file any more: it may end its leases in peace."""
        if sandbox.spec is not None:
            log.warning("the settings file has no such pool any more: what it still has drains", extra={"pool": sandbox.pool})
            self._add_again(sandbox.pool, sandbox.spec, OF_THE_FILE, closes="no settings file has the pool any more")

    def start(self, pool: Pool) -> None:
        """Let a pool fill, and take it away when it is over."""
        pool.start()
        task = asyncio.create_task(self._take_away(pool))
        self._watches.add(task)
        task.add_done_callback(self._watches.discard)

    async def _take_away(self, pool: Pool) -> None:
        await pool.over.wait()
        await pool.stop(destroy=True)
        del self.pools[pool.name]
        if self.origins.pop(pool.name) not in (OF_THE_FILE, BUILT_IN):
            self._wiring.store.put(Forgotten(pool=pool.name))
        self._wiring.events.publish("pool.deleted", pool=pool.name)
        log.info("pool deleted", extra={"pool": pool.name})

    async def put(self, name: str, spec: PoolSpec, origin: str) -> bool:
        """Make a pool, or change one. What is answered is on record.

        Returns:
            Whether it was made.

        Raises:
            PoolConflict: it is of the settings file or built in, is being deleted, or lives on another backend.
            QuotaExceeded: there are too many.
            InvalidRequest, NotImplementedHere: its backend cannot be had.
            StorageUnavailable: it cannot be recorded; nothing has changed.
        """
        async with self._changing:
            pool = self.pools.get(name)
            if pool is not None and self._is_same(pool, spec):
                pool.change(spec)
                return False
            if pool is None:
                most = self._wiring.limits.max_pools
                if len(self.pools) >= most:
                    raise QuotaExceeded(f"there are {len(self.pools)} pools, and `limits.pools` is {most}", limit="pools")
                if spec.backend not in self.backends:
                    self.backends[spec.backend] = self._load_backend(spec.backend)
            record = PoolRecord(name=name, spec=spec, origin=origin)
            await self._record(record, replace(record, spec=pool.spec) if pool is not None else Forgotten(pool=name))
            if pool is None:
                self.start(self.add(name, spec, origin))
            else:
                pool.change(spec)
            self._wiring.events.publish("pool.created" if pool is None else "pool.changed", pool=name)
            return pool is None

    def _is_same(self, pool: Pool, spec: PoolSpec) -> bool:
        self._check_changeable(pool)
        if pool.closing:
            raise PoolConflict(f"pool {pool.name!r} is being deleted: make it again when it is gone")
        if pool.spec.backend != spec.backend:
            raise PoolConflict(f"pool {pool.name!r} is on backend {pool.spec.backend!r}, which never changes: delete the pool, or take another name")
        return pool.spec == spec

    def _check_changeable(self, pool: Pool) -> None:
        if self.origins[pool.name] == BUILT_IN:
            raise PoolConflict(f"pool {pool.name!r} is built in: give the service a settings file with one of that name, and start it again")
        if self.origins[pool.name] == OF_THE_FILE:
            raise PoolConflict(f"pool {pool.name!r} is of the settings file: change it there, and start the service again")

    async def delete(self, name: str, *, force: bool) -> None:
        """Close a pool; it goes when its last lease ends, or now. What is answered is on record.

        Raises:
            PoolNotFound: there is none of that name.
            PoolConflict: it is of the settings file, or built in.
            StorageUnavailable: it cannot be recorded; nothing has changed.
        """
        async with self._changing:
            pool = self.get(name)
            if self.origins[name] == BUILT_IN:
                how = "start the service with a settings file that names its pools, with `on_shutdown: destroy` to have them go when it stops"
                raise PoolConflict(f"pool {name!r} is built in and cannot be deleted: {how}")
            self._check_changeable(pool)
            record = PoolRecord(name=name, spec=pool.spec, origin=self.origins[name])
            await self._record(replace(record, closing=True), replace(record, closing=pool.closing))
            pool.close(DELETED, force=force)

    async def _record(self, record: PoolRecord, before: PoolRecord | Forgotten) -> None:
        self._wiring.store.put(record)
        try:
            await self._wiring.store.flush()
        except BaseException:
            self._wiring.store.put(before)
            raise

    async def stop(self, destroys: Callable[[PoolSpec], bool]) -> None:
        """Stop every pool; `destroys` says whether its sandboxes go too."""
        for watch in list(self._watches):
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        await asyncio.gather(*(pool.stop(destroy=destroys(pool.spec)) for pool in list(self.pools.values())))
