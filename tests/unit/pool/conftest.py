"""The pools of a service on fakes: no sockets, no processes, and a clock that the tests advance."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from sandbox_server.core.errors import StorageUnavailable
from sandbox_server.core.types import AcquireRequest, PoolId, PoolSpec
from sandbox_server.pool.dependencies import PoolDependencies, PoolLimits
from sandbox_server.pool.pool import Pool
from sandbox_server.pool.service import PoolService
from sandbox_server.store.memory import MemoryStore
from sandbox_server.testing import FakeBackend, FakeClock, settle
from tests.unit.pool.restartable_service import RestartableService


class FailingStore(MemoryStore):
    """Forgets as `MemoryStore` does, cannot write while `fail` is set, and takes `flush_turns` turns of the event loop to write."""

    fail: StorageUnavailable | None = None
    flush_turns = 0

    async def flush(self) -> None:
        for _ in range(self.flush_turns):
            await asyncio.sleep(0)
        if self.fail is not None:
            raise self.fail


class PoolsHarness:
    """A service's pools, and the fakes that they run on."""

    def __init__(
        self,
        specs: dict[str, PoolSpec],
        backend: FakeBackend,
        weights: dict[str, float] | None = None,
        max_leases: dict[str, int] | None = None,
        max_pools: int = 100,
        max_waiters: dict[str, int] | None = None,
    ) -> None:
        self.clock = FakeClock()
        self.backend = backend
        self.store = FailingStore()
        weights = weights or {}
        dependencies = PoolDependencies(
            store=self.store,
            clock=self.clock,
            connect=backend.connect,
            timers=self.clock,
            weight=lambda tenant: weights.get(tenant, 1.0),
            max_leases=(max_leases or {}).get,
            max_waiters=(max_waiters or {}).get,
            limits=PoolLimits(max_pools=max_pools),
            jitter=lambda: 0.5,
        )
        self.pools = PoolService(specs, {"local": backend}, self.store, self.clock, dependencies=dependencies)

    @property
    def pool(self) -> Pool:
        """The pool `default`."""
        return self.pools._pools[PoolId("default")]

    async def start(self) -> None:
        """Start and let the pools fill."""
        await self.pools.start()
        await settle()

    async def acquire(self, tenant: str = "t", **fields: Any) -> Any:
        """Acquire from `default`."""
        return await self.pools.acquire(AcquireRequest(tenant=tenant, pool="default", **fields))

    async def queue(self, tenant: str = "t", **fields: Any) -> asyncio.Task[Any]:
        """Begin to acquire, and let it reach the queue."""
        task = asyncio.create_task(self.acquire(tenant, **fields))
        await settle()
        return task

    async def queue_at(self, pool: str, **fields: Any) -> asyncio.Task[Any]:
        """Begin to acquire from another pool, and let it reach the queue."""
        task = asyncio.create_task(self.pools.acquire(AcquireRequest(tenant="t", pool=pool, **fields)))
        await settle()
        return task

    def slots(self) -> dict[str, int]:
        """How many slots are in which state."""
        return {state: count for state, count in self.pools.view("default").slots.items() if count}

    def sandboxes(self) -> dict[str, int]:
        """How many sandboxes are in which state."""
        return {state: count for state, count in self.pools.view("default").sandboxes.items() if count}


@pytest.fixture
async def make_harness() -> AsyncIterator[Callable[..., Any]]:
    """Makes a started harness: `await make_harness(backend=None, weights=None, max_leases=None, max_pools=100, max_waiters=None, **spec)`."""
    harnesses: list[PoolsHarness] = []

    async def make(
        backend: FakeBackend | None = None,
        weights: dict[str, float] | None = None,
        max_leases: dict[str, int] | None = None,
        max_pools: int = 100,
        max_waiters: dict[str, int] | None = None,
        **spec: Any,
    ) -> PoolsHarness:
        spec = {"slots_per_sandbox": 2, "max_sandboxes": 2} | spec
        harness = PoolsHarness({"default": PoolSpec(**spec)}, backend or FakeBackend(), weights, max_leases, max_pools, max_waiters)
        harnesses.append(harness)
        await harness.start()
        return harness

    yield make
    for harness in harnesses:
        await harness.pools.stop()


@pytest.fixture
async def make_service() -> AsyncIterator[Callable[..., Any]]:
    """Makes a started service that can be killed and started again: `await make_service(backend=None, **spec)`. Stops it with its sandboxes at the end."""
    made: list[RestartableService] = []

    async def make(backend: FakeBackend | None = None, **spec: Any) -> RestartableService:
        made.append(RestartableService(backend, **spec))
        return await made[0].start()

    yield make
    await made[0].pools.stop("destroy")
    assert made[0].backend.handles == {}
