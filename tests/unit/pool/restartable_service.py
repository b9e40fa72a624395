"""A service that can crash and start again, on fakes."""

from __future__ import annotations

from dataclasses import replace

from sandbox_server.core.types import AcquireRequest, PoolSpec
from sandbox_server.pool.dependencies import PoolDependencies
from sandbox_server.pool.service import PoolService
from sandbox_server.testing import FakeBackend, FakeClock, settle
from tests.support.crash import kill_pools
from tests.support.crashing_store import CrashingStore

SPEC = PoolSpec(slots_per_sandbox=2, min_sandboxes=1, max_sandboxes=2)


class RestartableService:
    """A service that can crash and start again over the same backend and store."""

    def __init__(self, backend=None, **spec):
        self.clock = FakeClock()
        self.backend = backend or FakeBackend()
        self.store = CrashingStore()
        self.specs = {"default": replace(SPEC, **spec)}
        self.pools = None

    async def start(self, **dependencies):
        parts = PoolDependencies(store=self.store, clock=self.clock, connect=self.backend.connect, timers=self.clock, jitter=lambda: 0.5, **dependencies)
        self.pools = PoolService(self.specs, {"local": self.backend}, self.store, self.clock, dependencies=parts)
        await self.pools.start()
        await settle()
        return self

    async def crash(self, down_s=0.0, *, lossy=False):
        """SIGKILL: nothing more is said. `lossy`: what nobody waited for had not been written yet either."""
        await kill_pools(self.pools)
        self.store.crash(0 if lossy else self.store.unflushed)
        self.clock.pass_time(down_s)

    async def restart(self, down_s=0.0, *, lossy=False):
        await self.crash(down_s, lossy=lossy)
        return await self.start()

    async def acquire(self, pool="default", **fields):
        return (await self.pools.acquire(AcquireRequest(tenant="t", pool=pool, **fields))).leases

    def slots(self, pool="default"):
        return {state: count for state, count in self.pools.view(pool).slots.items() if count}
