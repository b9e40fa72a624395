"""All pools of the service behind one face: what the api and the dispatch may ask."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sandbox_server.backends.base import Backend
from sandbox_server.core.clock import Clock
from sandbox_server.core.errors import LeaseNotFound, PoolNotFound, PoolServiceError, SandboxLost
from sandbox_server.core.types import Acquired, AcquireRequest, Handle, Lease, PoolSpec, PoolView, SandboxView
from sandbox_server.link import AgentLink
from sandbox_server.pool.ended import end_error
from sandbox_server.pool.looking import pool_view, readiness, sandbox_views
from sandbox_server.pool.pool import Pool
from sandbox_server.pool.request_keys import RequestKeys
from sandbox_server.pool.store import Store
from sandbox_server.pool.wiring import Connect, Wiring

log = logging.getLogger(__name__)

CREATIONS_AT_ONCE = 4
STOP_WITHIN_S = 8.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """Where the work of a held lease goes."""

    lease: Lease
    spec: PoolSpec
    link: AgentLink
    slot_id: str
    epoch: int


class Pools:
    """Every pool of one service.

    Args:
        specs: the pools, by name.
        backends: every backend the specs name, by name.
        store: what must outlive a crash.
        clock: monotonic and wall time.
        connect: how a link to an agent is made.
        owner: who the sandboxes on the backends belong to: this service, by its state.
        wiring: everything else, for tests and special cases; its store, clock and connect are the ones used.
        origins: where each spec came from, by pool name; default `file`.
    """

    def __init__(
        self,
        specs: Mapping[str, PoolSpec],
        backends: Mapping[str, Backend],
        store: Store,
        clock: Clock,
        *,
        connect: Connect = AgentLink.connect,
        owner: str = "local",
        wiring: Wiring | None = None,
        origins: Mapping[str, str] | None = None,
    ) -> None:
        wiring = wiring or Wiring(store=store, clock=clock, connect=connect)
        self._backends = dict(backends)
        self._store = wiring.store
        self._clock = wiring.clock
        self._owner = owner
        self._keys = RequestKeys(wiring.clock, wiring.store)
        self._origins = dict(origins or {})
        budgets = {name: asyncio.Semaphore(CREATIONS_AT_ONCE) for name in self._backends}
        self._pools = {name: Pool(name, spec, self._backends[spec.backend], budgets[spec.backend], wiring) for name, spec in specs.items()}
        self._started = False

    # Life.

    async def start(self) -> None:
        """Take away what an earlier life left on the backends and nobody can adopt, then begin to fill the pools."""
        await asyncio.gather(*(self._sweep(backend) for backend in self._backends.values()))
        for pool in self._pools.values():
            pool.start()
        self._started = True

    async def _sweep(self, backend: Backend) -> None:
        known = {record.sandbox_id for record in self._store.load().sandboxes}
        orphans = [handle for handle in await backend.list_owned(self._owner) if handle.sandbox_id not in known]
        await asyncio.gather(*(self._destroy_orphan(backend, handle) for handle in orphans))

    async def _destroy_orphan(self, backend: Backend, handle: Handle) -> None:
        fields = {"sandbox_id": handle.sandbox_id, "pool": handle.pool}
        try:
            await backend.destroy(handle)
        except OSError as error:
            log.error("an orphaned sandbox could not be destroyed: %s", error, extra=fields)
        else:
            log.info("an orphaned sandbox was destroyed", extra=fields)

    async def stop(self, on_shutdown: str | None = None) -> None:
        """Refuse new work, fail who waits, and leave or destroy the sandboxes; within `STOP_WITHIN_S`.

        Args:
            on_shutdown: `keep` or `destroy`, for all pools; default what each pool's spec says. A store that forgets always destroys:
                nothing could adopt what it left.
        """
        try:
            async with asyncio.timeout(STOP_WITHIN_S):
                await asyncio.gather(*(pool.stop(destroy=self._destroys(pool.spec, on_shutdown)) for pool in self._pools.values()))
        except TimeoutError:
            log.error("not every sandbox was gone within %g s", STOP_WITHIN_S)
        for backend in self._backends.values():
            await backend.close()

    def _destroys(self, spec: PoolSpec, on_shutdown: str | None) -> bool:
        return not self._store.durable or (on_shutdown or spec.on_shutdown) == "destroy"

    # The three verbs.

    async def acquire(self, request: AcquireRequest) -> Acquired:
        """Wait for `count` slots of a pool, all or nothing.

        Cancelling leaves the queue, or gives back what was granted; with a `request_key` what was granted is kept for a retry.

        Raises:
            PoolNotFound: there is no such pool.
            InvalidRequest: the pool can never serve it.
            NoCapacity: nothing came free in time.
            BackendUnavailable: the pool cannot make the sandboxes this needs.
            Draining: the pool is going away.
            CallConflict: the key was used with another body.
            LeaseLost: the key's leases have all ended.
        """
        pool = self._pool(request.pool)
        if request.request_key is None:
            return await pool.acquire(request)
        record = self._keys.granted(request)
        if record is None:
            return await self._keys.join(request, lambda: pool.acquire(request))
        leases = [self._find(lease_id)[1] for lease_id in record.lease_ids]
        if all(lease.ended_at is not None for lease in leases):
            raise end_error(leases[0])
        return Acquired(leases=tuple(leases), waited_s=0.0)

    def undelivered(self, acquired: Acquired, request_key: str | None) -> None:
        """The caller was gone when its answer came: release what it was granted, or keep it for a retry under its key."""
        if request_key is None:
            for lease in acquired.leases:
                pool = self._pools[lease.pool]
                if lease.lease_id in pool.book.held:
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
                pool, lease = self._find(lease_id, tenant)
            except LeaseNotFound:
                unknown.append(lease_id)
                continue
            if lease.ended_at is None:
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
                leases.append(pool.book.renew(lease_id, ttl_s))
        return leases, lost

    def lease(self, tenant: str, lease_id: str) -> Lease:
        """A held lease.

        Raises:
            LeaseNotFound: it was never known, or is another tenant's.
            LeaseLost: it has ended; SandboxLost where that was with its sandbox.
        """
        return self._held(tenant, lease_id)[1]

    def leases(
        self, tenant: str, run_id: str | None = None, trajectory_id: str | None = None, limit: int = 100, cursor: str | None = None
    ) -> tuple[list[Lease], str | None]:
        """The held leases of a tenant, in an order that stands, one page at a time.

        Returns:
            The page, and the cursor of the next one if there is more.
        """
        mine = (
            holding.lease
            for pool in self._pools.values()
            for holding in pool.book.held.values()
            if holding.lease.tenant == tenant
            and (run_id is None or holding.lease.run_id == run_id)
            and (trajectory_id is None or holding.lease.trajectory_id == trajectory_id)
        )
        after = sorted((lease for lease in mine if cursor is None or lease.lease_id > cursor), key=lambda lease: lease.lease_id)
        page = after[:limit]
        return page, page[-1].lease_id if len(after) > limit else None

    def route(self, tenant: str, lease_id: str) -> Route:
        """Where the work of a lease goes now.

        Raises:
            LeaseNotFound: it was never known, or is another tenant's.
            LeaseLost: it has ended; SandboxLost where that was with its sandbox.
            BackendUnavailable: its agent cannot be reached at the moment.
        """
        pool, lease = self._held(tenant, lease_id)
        return Route(lease=lease, spec=pool.spec, link=pool.link_of(lease), slot_id=lease.slot_id, epoch=lease.epoch)

    def call_started(self, lease_id: str) -> None:
        """A call of this lease begins; the lease does not expire under it, nor within 60 s after its end."""
        for pool in self._pools.values():
            pool.book.call_started(lease_id)

    def call_ended(self, lease_id: str) -> None:
        """The call has ended."""
        for pool in self._pools.values():
            pool.book.call_ended(lease_id)

    async def lost_verdict(self, lease_id: str, wait_s: float) -> SandboxLost | None:
        """After a lost link: wait until it is known whether the sandbox is.

        Args:
            lease_id: a lease of that sandbox.
            wait_s: how long to wait, in seconds.

        Returns:
            How it was lost; None if the link is back, the lease ended otherwise, or nothing is known after `wait_s`.
        """
        try:
            pool, _ = self._find(lease_id)
            async with asyncio.timeout(wait_s):
                return await pool.lost_verdict(lease_id)
        except (LeaseNotFound, TimeoutError):
            return None

    # Looking.

    def views(self) -> list[PoolView]:
        """What a caller may see of every pool."""
        return [self.view(name) for name in sorted(self._pools)]

    def view(self, name: str) -> PoolView:
        """What a caller may see of a pool.

        Raises:
            PoolNotFound: there is none of that name.
        """
        return pool_view(self._pool(name), self._origins.get(name, "file"))

    def sandboxes(self) -> list[SandboxView]:
        """What an admin may see of every sandbox."""
        return [view for pool in self._pools.values() for view in sandbox_views(pool)]

    def readiness(self) -> dict[str, Any]:
        """`{"ready": …, "pools": {name: {"ready", "sandboxes", "min_sandboxes", "last_error"}}}`."""
        pools = {name: readiness(pool) for name, pool in self._pools.items()}
        return {"ready": self._started and all(pool["ready"] for pool in pools.values()), "pools": pools}

    # Finding.

    def _pool(self, name: str) -> Pool:
        try:
            return self._pools[name]
        except KeyError:
            raise PoolNotFound(f"there is no pool {name!r}") from None

    def _find(self, lease_id: str, tenant: str | None = None) -> tuple[Pool, Lease]:
        for pool in self._pools.values():
            holding = pool.book.held.get(lease_id)
            lease = holding.lease if holding is not None else pool.book.ended.get(lease_id)
            if lease is not None and tenant in (None, lease.tenant):
                return pool, lease
        raise LeaseNotFound(f"there is no lease {lease_id!r}, or it is not yours", lease_id=lease_id)

    def _held(self, tenant: str, lease_id: str) -> tuple[Pool, Lease]:
        pool, lease = self._find(lease_id, tenant)
        if lease.ended_at is not None:
            raise end_error(lease)
        return pool, lease
