"""Random histories of whole pools with fake agents and a fake backend: agents stop answering, links are lost, and the service crashes.

The model knows only what was promised: which leases callers were told of, until when they hold, which sandboxes were killed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from sandbox_server.core.errors import PoolServiceError
from sandbox_server.core.types import Acquired, AcquireRequest, Lease, PoolSpec
from sandbox_server.pool.dependencies import PoolDependencies
from sandbox_server.pool.service import PoolService
from sandbox_server.testing import FakeAgent, FakeBackend, FakeClock, settle
from tests.support.crash import kill_pools
from tests.support.crashing_store import CrashingStore

MAX_SANDBOXES = 3


class Moody(FakeAgent):
    """An agent that can stop answering for a while. It answers the requests of that time afterwards."""

    stalled = False

    def __init__(self, sandbox_id: str) -> None:
        super().__init__(sandbox_id, slots=2)
        self.asked: list[tuple[dict[str, Any], Callable[[dict[str, Any]], None]]] = []

    def respond(self, meta: dict[str, Any], say: Callable[[dict[str, Any]], None]) -> None:
        if self.stalled:
            self.asked.append((meta, say))
        else:
            super().respond(meta, say)

    def recover(self) -> None:
        self.stalled = False
        asked, self.asked = self.asked, []
        for meta, say in asked:
            super().respond(meta, say)


class MoodyBackend(FakeBackend):
    """Creates sandboxes with such agents."""

    def make_agent(self, pool: str, spec: PoolSpec, sandbox_id: str) -> FakeAgent:
        return Moody(sandbox_id)


@dataclass
class Promise:
    """A lease that a caller was granted. `until`: it must be held at least until then, monotonic."""

    lease: Lease
    until: float


class PoolsHistory:
    """The pools of one example: what happens to them, and what their callers were promised.

    Args:
        chance: chooses what happens. What can be chosen depends on what the pools did, and that depends on their random ids, too.
    """

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.clock = FakeClock()
        self.backend = MoodyBackend()
        self.store = CrashingStore()
        self.spec = PoolSpec(slots_per_sandbox=2, min_sandboxes=1, max_sandboxes=MAX_SANDBOXES, idle_timeout_s=20, max_lifetime_s=1e6)
        self.promises: dict[str, Promise] = {}
        self.over: set[str] = set()
        self.gangs: list[asyncio.Task[Acquired]] = []
        self.epochs: dict[tuple[str, str], int] = {}

    async def start(self) -> None:
        dependencies = PoolDependencies(store=self.store, clock=self.clock, connect=self.backend.connect, timers=self.clock, jitter=lambda: 0.5)
        self.pools = PoolService({"default": PoolSpec(min_sandboxes=0)}, {"local": self.backend}, self.store, self.clock, dependencies=dependencies)
        await self.pools.start()
        await settle()

    # What happens.

    async def acquire(self) -> None:
        chance = self.chance
        request = AcquireRequest(
            tenant="t", pool="mine", count=chance.randint(1, 3), run_id=chance.choice((None, "r")), wait_s=0.0,
            ttl_s=chance.choice((5.0, 100.0, 1000.0)), cache=chance.choice(("none", "none", "rw")),
        )  # fmt: skip
        before = self.pools.view("mine").claimant
        task = asyncio.create_task(self.pools.acquire(request))
        await settle()
        if not task.done():
            task.cancel()
            await settle()
        if task.cancelled() or isinstance(task.exception(), PoolServiceError):
            return
        if before is not None and self.pools.view("mine").claimant is not None:
            assert all(lease.workspace_kept for lease in task.result().leases), "a slot that was held for the claimant went to somebody else"
        for lease in task.result().leases:
            assert lease.epoch > self.epochs.get((lease.sandbox_id, lease.slot_id), 0), "an epoch was used again"
            assert lease.lease_id not in self.over
            self.epochs[lease.sandbox_id, lease.slot_id] = lease.epoch
            self.promises[lease.lease_id] = Promise(lease, self.clock.monotonic() + lease.ttl_s)

    async def gang_waits(self) -> None:
        """Start an acquire of many slots for another tenant. Its leases are left to expire."""
        request = AcquireRequest(tenant="gang", pool="mine", count=self.chance.randint(2, 2 * MAX_SANDBOXES), ttl_s=5.0)
        self.gangs.append(asyncio.create_task(self.pools.acquire(request)))
        await settle()

    async def gang_hangs_up(self) -> None:
        for task in self.gangs[:1]:
            task.cancel()
            await settle()

    def _any_promise(self) -> Promise | None:
        return self.chance.choice([self.promises[lease_id] for lease_id in self.promises]) if self.promises else None

    async def release(self) -> None:
        promise = self._any_promise()
        if promise is None:
            return
        self.pools.release("t", [promise.lease.lease_id], None, self.chance.choice((False, True)))
        del self.promises[promise.lease.lease_id]
        if self.chance.choice((False, True)):
            await self.pools.flush()
            self.over.add(promise.lease.lease_id)

    async def renew(self) -> None:
        promise = self._any_promise()
        if promise is not None:
            leases, _ = self.pools.renew("t", [promise.lease.lease_id], 50)
            await self.pools.flush()
            for lease in leases:
                promise.lease = lease
                promise.until = max(promise.until, self.clock.monotonic() + 50)

    async def narrow(self) -> None:
        promise = self._any_promise()
        if promise is None:
            return
        task = asyncio.create_task(self.pools.narrow("t", promise.lease.lease_id, allow_network=False, cache="none"))
        await settle()
        if task.done() and task.exception() is None:
            promise.lease = task.result()
        elif not task.done():
            task.cancel()
            await settle()

    async def time_passes(self) -> None:
        await self.clock.advance(self.chance.choice((0.1, 1.0, 6.0, 30.0, 61.0)))

    def _any_agent(self) -> Moody | None:
        agents = sorted(self.backend.agents.values(), key=lambda agent: self.backend.created.index(agent.sandbox_id))
        return self.chance.choice(agents) if agents else None  # type: ignore[return-value]

    async def agent_dies(self) -> None:
        agent = self._any_agent()
        if agent is not None:
            self.backend.kill(agent.sandbox_id)
            self.promises = {lease_id: p for lease_id, p in self.promises.items() if p.lease.sandbox_id != agent.sandbox_id}

    async def link_is_cut(self) -> None:
        agent = self._any_agent()
        if agent is not None:
            agent.hang_up()

    async def agent_stalls(self) -> None:
        agent = self._any_agent()
        if agent is not None:
            agent.stalled = True

    async def agents_recover(self) -> None:
        for agent in self.backend.agents.values():
            if isinstance(agent, Moody):
                agent.recover()
        await settle()

    async def spec_changes(self) -> None:
        change = self.chance.choice(({"slot_processes": 7}, {"slot_processes": 512}, {"min_sandboxes": 2}, {"min_sandboxes": 0}))
        self.spec = replace(self.spec, **change)
        await self.pools.put_pool("mine", self.spec)

    async def verify(self) -> None:
        task = asyncio.create_task(self.pools.verify("mine"))
        await settle()
        if not task.done():
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def service_dies(self) -> None:
        for task in self.gangs:
            task.cancel()
        await asyncio.gather(*self.gangs, return_exceptions=True)
        self.gangs.clear()
        await kill_pools(self.pools)
        self.store.crash(self.chance.randint(0, self.store.unflushed))
        down_s = self.chance.choice((0.0, 3.0, 1000.0))
        self.clock.pass_time(down_s)
        await self.start()
        now, wall = self.clock.monotonic(), self.clock.wall()
        held = {lease.lease_id: lease for lease in self.pools.leases("t", limit=1000)[0]}
        assert not self.over & set(held), "what was released came back"
        for lease_id, promise in list(self.promises.items()):
            # What expired before the death may be on record as such.
            if promise.until <= now - down_s:
                del self.promises[lease_id]
                continue
            assert lease_id in held, "a promised lease was lost"
            left_s = held[lease_id].expires_at - wall
            assert left_s >= min(promise.lease.ttl_s, 60.0) - 1e-6, "no grace after downtime"
            promise.until = now + left_s

    STEPS = (
        gang_waits, gang_waits, gang_hangs_up,
        acquire, acquire, acquire, acquire, release, release, renew, narrow, time_passes, time_passes, agent_dies, link_is_cut, agent_stalls,
        agents_recover, agents_recover, spec_changes, verify, service_dies, service_dies,
    )  # fmt: skip

    # What must hold.

    def check(self) -> None:
        """Check what must hold after every step."""
        held = [*self.pools.leases("t", limit=1000)[0], *self.pools.leases("gang", limit=1000)[0]]
        slots = [(lease.sandbox_id, lease.slot_id) for lease in held]
        assert len(slots) == len(set(slots)), "a slot with two holders"
        now = self.clock.monotonic()
        self.promises = {lease_id: promise for lease_id, promise in self.promises.items() if promise.until > now}
        ids = {lease.lease_id for lease in held}
        for lease_id, promise in self.promises.items():
            assert lease_id in ids, "a promised lease does not hold"
            slot = self.backend.agents[promise.lease.sandbox_id].slots[promise.lease.slot_id]
            assert slot.epoch == promise.lease.epoch, "its agent has moved on under a held lease"
        assert self.backend.most_at_once <= MAX_SANDBOXES, "past max_sandboxes"

    async def check_at_rest(self) -> None:
        """Check what must hold at the end, when every operation has finished."""
        await self.agents_recover()
        await self.clock.advance(200)
        await settle()
        self.check()
        assert all(task.done() for task in self.gangs), "a gang that waits is never answered"
        for task in self.gangs:
            assert task.cancelled() or task.exception() is None or isinstance(task.exception(), PoolServiceError)
        view = self.pools.view("mine")
        assert len(self.backend.handles) == len(self.pools.sandboxes()), "sandboxes that nobody knows"
        assert view.sandboxes["ready"] >= view.spec.min_sandboxes or sum(view.sandboxes.values()) == MAX_SANDBOXES
        assert view.claimant is None, "slots are held for nobody"
        assert not view.slots["resetting"], "a slot that nobody resets"
        for lease in self.pools.leases("t", limit=1000)[0]:
            location = self.pools.locate_slot("t", lease.lease_id)
            assert self.backend.agents[lease.sandbox_id].slots[location.slot_id].epoch == location.epoch
        self.pools.release("t", [lease.lease_id for lease in self.pools.leases("t", limit=1000)[0]])
        await self.clock.advance(200)
        assert all(not agent.caches for agent in self.backend.agents.values()), "a cache outlives its run"
        await self.pools.stop("destroy")
        assert self.backend.handles == {}


async def live(seed: int, steps: int) -> None:
    """Run one random history with a number of steps."""
    history = PoolsHistory(random.Random(seed))
    await history.start()
    await history.pools.put_pool("mine", history.spec)
    await settle()
    for _ in range(steps):
        step = history.chance.choice(PoolsHistory.STEPS)
        await step(history)
        await settle()
        history.check()
    await history.check_at_rest()
