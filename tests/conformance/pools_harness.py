"""Pools on a backend under test, with a control plane and a network that a test can take away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from sandbox_server.backends.base import Backend, CreateContext, CreateFailed, Observation, RateLimited
from sandbox_server.core.errors import BackendUnavailable
from sandbox_server.core.pipe import Pipe
from sandbox_server.core.types import AcquireRequest, Handle, Lease, PoolSpec
from sandbox_server.link import AgentEndpoint, AgentLink, LinkLost
from sandbox_server.pool.dependencies import PoolDependencies
from sandbox_server.pool.service import PoolService
from tests.conformance.skipping_clock import SkippingClock
from tests.conformance.under_test import BackendUnderTest, wait_until
from tests.support.crash import kill_pools
from tests.support.crashing_store import CrashingStore

AWAY = "the control plane is away: this test took it away"


class InterruptedBackend:
    """Passes everything on to a backend, except what a test interrupts.

    Args:
        backend: the backend under test.

    Attributes:
        is_away: whether the control plane cannot be asked for anything.
        rate_limited_count: how many of the next creations the control plane refuses because there were too many.
        holds_creations: whether creations stop after their first checkpoint, until they are cancelled.
        created: the ids of the sandboxes whose creation was asked for.
        held: the ids of the sandboxes whose creation stands still.
        observe_count: how many times the control plane was asked for the state of sandboxes.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.name = backend.name
        self.traits = backend.traits
        self.is_away = False
        self.rate_limited_count = 0
        self.holds_creations = False
        self.created: list[str] = []
        self.held: list[str] = []
        self.observe_count = 0

    async def create(self, context: CreateContext) -> AsyncGenerator[Handle, None]:
        """Create a sandbox, or refuse to."""
        self.created.append(context.sandbox_id)
        if self.is_away:
            raise CreateFailed(AWAY)
        if self.rate_limited_count:
            self.rate_limited_count -= 1
            raise RateLimited("too many sandboxes were created in a short time", retry_after_s=0.1)
        async with aclosing(self._backend.create(context)) as checkpoints:
            async for handle in checkpoints:
                yield handle
                if self.holds_creations:
                    self.held.append(context.sandbox_id)
                    await asyncio.Event().wait()

    async def destroy(self, handle: Handle) -> None:
        """Destroy a sandbox."""
        self._check_control_plane()
        await self._backend.destroy(handle)

    async def observe(self, handles: Sequence[Handle]) -> Mapping[str, Observation]:
        """Report the state of sandboxes."""
        self.observe_count += 1
        self._check_control_plane()
        return await self._backend.observe(handles)

    async def list_owned(self, owner: str) -> Sequence[Handle]:
        """List the sandboxes of an owner."""
        self._check_control_plane()
        return await self._backend.list_owned(owner)

    async def open_pipe(self, handle: Handle) -> Pipe:
        """Start a relay, if the backend can."""
        return await self._backend.open_pipe(handle)  # type: ignore[attr-defined]  # only handles with a `stdio:` address get here

    async def close(self) -> None:
        """Close the backend."""
        await self._backend.close()

    def _check_control_plane(self) -> None:
        if self.is_away:
            raise BackendUnavailable(AWAY)


class PoolsHarness:
    """One service's pools on a backend under test. `crash` and `start` can follow each other.

    Args:
        under_test: the backend.
        spec: of the pool `default`.
    """

    def __init__(self, under_test: BackendUnderTest, spec: PoolSpec) -> None:
        self.under_test = under_test
        self.clock = SkippingClock()
        self.store = CrashingStore()
        self.is_network_down = False
        self._spec = spec
        self._links: list[AgentLink] = []

    async def start(self) -> None:
        """Start the pools, with a backend object of their own, as a new process has."""
        self.backend = InterruptedBackend(self.under_test.make_backend())
        dependencies = PoolDependencies(store=self.store, clock=self.clock, connect=self._connect, timers=self.clock, jitter=lambda: 0.5)
        specs, backends = {"default": self._spec}, {self._spec.backend: self.backend}
        self.pools = PoolService(specs, backends, self.store, self.clock, owner="first", dependencies=dependencies)
        await self.pools.start()

    async def stop(self) -> None:
        """Stop the pools and destroy their sandboxes."""
        self.backend.is_away = self.is_network_down = False
        await self.pools.stop("destroy")

    async def crash(self) -> None:
        """End the pools as SIGKILL would: nothing is destroyed, and what was not flushed is lost."""
        await kill_pools(self.pools)
        await self._cut_links()
        self.store.crash()

    async def _connect(self, endpoint: AgentEndpoint, timeout_s: float) -> AgentLink:
        if self.is_network_down:
            raise LinkLost("the network is down: this test took it down")
        link = await self.under_test.connect(endpoint, timeout_s)
        self._links.append(link)
        return link

    async def cut_network(self) -> None:
        """Cut every link to an agent, and let none be made until `is_network_down` is unset."""
        self.is_network_down = True
        await self._cut_links()

    async def _cut_links(self) -> None:
        links, self._links = self._links, []
        for link in links:
            await link.close("the network is down: this test took it down")

    async def acquire(self, **fields: Any) -> Lease:
        """Acquire one slot."""
        request = AcquireRequest(tenant="t", pool="default", **{"ttl_s": 3600.0, "wait_s": 60.0, **fields})
        (lease,) = (await self.pools.acquire(request)).leases
        return lease

    async def replace_lease(self, lease: Lease) -> Lease:
        """Release a lease and acquire the slot again, for which its agent has to reset it."""
        self.pools.release("t", [lease.lease_id])
        return await self.acquire()

    def sandbox_counts(self) -> dict[str, int]:
        """Return how many sandboxes are in which state, without the states that none is in."""
        return {state: count for state, count in self.pools.view("default").sandboxes.items() if count}

    async def wait_for_unreachable(self) -> None:
        """Wait until the pool has noticed that the links to its agents are gone."""
        await wait_until(lambda: self.pools.readiness()["pools"]["default"]["sandboxes"] == 0)


def one_slot(under_test: BackendUnderTest, **changes: Any) -> PoolSpec:
    """Return the spec of a pool of at most one sandbox with one slot, which is created when it is needed."""
    return replace(under_test.spec(), **{"slots_per_sandbox": 1, "min_sandboxes": 0, "max_sandboxes": 1, **changes})
