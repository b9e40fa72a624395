"""How a pool's sandboxes come and go: growth, idleness, lifetimes, failing creations, quarantine."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace

import pytest

from sandbox_server.backends.base import CreateFailed
from sandbox_server.core.errors import BackendUnavailable, NoCapacity, SandboxLost
from sandbox_server.core.types import PoolSpec
from sandbox_server.pool.fleet.supervision.agent_connector import FIRST_HELLO_S
from sandbox_server.testing import FakeAgent, FakeBackend, settle
from tests.unit.pool.conftest import World


class Failing(FakeBackend):
    """Creations fail until `works`."""

    works = False
    permanent = False

    async def before_agent(self, sandbox_id):
        if not self.works:
            raise CreateFailed("the disk is full", permanent=self.permanent)


async def test_the_minimum_is_kept(make_world):
    world = await make_world(min_sandboxes=2, max_sandboxes=3)
    assert world.sandboxes() == {"ready": 2}

    world.backend.kill(next(iter(world.backend.agents)))
    await world.clock.advance(1)

    assert world.sandboxes() == {"ready": 2}


async def test_demand_grows_the_pool_and_never_past_its_maximum(make_world):
    world = await make_world(min_sandboxes=0, max_sandboxes=3, slots_per_sandbox=1)

    tasks = [await world.queue() for _ in range(9)]
    await world.clock.advance(5)

    assert len(world.backend.created) == 3
    assert world.backend.most_at_once == 3
    assert sum(task.done() for task in tasks) == 3
    for task in tasks:
        task.cancel()


async def test_creations_under_way_count(make_world):
    class Slow(FakeBackend):
        gate = None

        async def before_agent(self, sandbox_id):
            await self.gate.wait()

    backend = Slow()
    backend.gate = asyncio.Event()
    world = await make_world(backend, min_sandboxes=0, max_sandboxes=5, slots_per_sandbox=2)

    tasks = [await world.queue() for _ in range(4)]
    await world.clock.advance(3)
    assert len(backend.created) == 2

    backend.gate.set()
    await asyncio.gather(*tasks)
    assert len(backend.created) == 2


async def test_a_backend_makes_only_so_many_at_once(make_world):
    class Counting(FakeBackend):
        now = most = 0

        async def before_agent(self, sandbox_id):
            self.now += 1
            self.most = max(self.most, self.now)
            await asyncio.sleep(0)
            self.now -= 1

    world = await make_world(Counting(), min_sandboxes=9, max_sandboxes=9)
    await settle(200)
    await world.clock.advance(1)

    assert world.backend.most == FakeBackend().traits.creations_at_once
    assert world.sandboxes() == {"ready": 9}


async def test_idle_sandboxes_above_the_minimum_go(make_world):
    world = await make_world(min_sandboxes=1, max_sandboxes=3, idle_timeout_s=20)
    leases = (await world.acquire(count=6)).leases
    world.pools.release("t", [lease.lease_id for lease in leases])
    await world.clock.advance(19)
    assert world.sandboxes() == {"ready": 3}

    await world.clock.advance(3)

    assert world.sandboxes() == {"ready": 1}
    assert len(world.backend.handles) == 1


async def test_a_sandbox_with_a_lease_is_not_idle(make_world):
    world = await make_world(min_sandboxes=0, max_sandboxes=2, idle_timeout_s=20, slots_per_sandbox=1)
    (lease,) = (await world.acquire(ttl_s=1000)).leases
    await world.clock.advance(500)

    assert world.pools.lease("t", lease.lease_id)


async def test_warm_slots_are_ready_before_anyone_asks(make_world):
    world = await make_world(min_sandboxes=0, max_sandboxes=4, warm_slots=3, idle_timeout_s=5)
    await world.clock.advance(50)
    assert world.slots() == {"ready": 4}

    await world.acquire(count=3)
    await world.clock.advance(1)

    assert world.slots() == {"leased": 3, "ready": 3}


async def test_past_its_lifetime_a_sandbox_takes_no_new_leases_and_goes_with_its_last(make_world):
    world = await make_world(min_sandboxes=1, max_sandboxes=2, max_lifetime_s=100, slots_per_sandbox=2)
    (old,) = (await world.acquire(ttl_s=5000)).leases
    await world.clock.advance(101)
    assert world.sandboxes() == {"draining": 1, "ready": 1}
    (new,) = (await world.acquire()).leases
    assert new.sandbox_id != old.sandbox_id

    world.pools.release("t", [old.lease_id])
    await world.clock.advance(0.1)

    assert old.sandbox_id in world.backend.destroyed


async def test_max_lease_s_after_its_lifetime_a_sandbox_goes_whatever_runs(make_world):
    world = await make_world(min_sandboxes=1, max_sandboxes=2, max_lifetime_s=100, max_lease_s=50)
    (lease,) = (await world.acquire(ttl_s=5000)).leases
    await world.clock.advance(149)
    assert world.pools.lease("t", lease.lease_id)

    await world.clock.advance(2)

    with pytest.raises(SandboxLost, match="max_lifetime_s"):
        world.pools.lease("t", lease.lease_id)


async def test_failing_creations_back_off_and_show_why(make_world):
    world = await make_world(Failing(), min_sandboxes=1)
    assert world.pools.view("default").last_error == "the disk is full"
    assert len(world.backend.created) == 1

    times = []
    for _ in range(200):
        before = len(world.backend.created)
        await world.clock.advance(0.25)
        times.extend([world.clock.monotonic()] * (len(world.backend.created) - before))

    gaps = [late - early for early, late in itertools.pairwise(times)]
    assert gaps == sorted(gaps)
    assert 4 < len(times) < 8
    assert world.backend.handles == {}, "what was half made was destroyed"


async def test_a_pool_recovers_when_its_backend_does(make_world):
    world = await make_world(Failing(), min_sandboxes=1)
    await world.clock.advance(10)
    world.backend.works = True
    await world.clock.advance(30)

    assert world.slots() == {"ready": 2}
    assert world.pools.view("default").last_error is None


async def test_waiters_hear_the_reason_when_time_is_up(make_world):
    world = await make_world(Failing(), min_sandboxes=0)
    waiting = await world.queue(wait_s=2)
    await world.clock.advance(2)

    with pytest.raises(NoCapacity, match="the disk is full"):
        await waiting


async def test_after_a_permanent_error_waiters_fail_fast(make_world):
    backend = Failing()
    backend.permanent = True
    world = await make_world(backend, min_sandboxes=0)

    with pytest.raises(BackendUnavailable, match="the disk is full"):
        await world.acquire(wait_s=50)
    with pytest.raises(BackendUnavailable):
        await world.acquire(wait_s=50)
    assert world.pools.readiness()["ready"], "a permanent error that is shown does not hold up the service"


async def test_a_permanent_error_is_forgotten_when_it_is_time_to_try_again(make_world):
    backend = Failing()
    backend.permanent = True
    world = await make_world(backend, min_sandboxes=0)
    with pytest.raises(BackendUnavailable):
        await world.acquire(wait_s=50)
    await world.clock.advance(31)
    with pytest.raises(BackendUnavailable):
        await world.acquire(wait_s=50)
    await world.clock.advance(31)
    backend.works = True

    assert len((await world.acquire(wait_s=50)).leases) == 1


async def test_a_pool_with_a_minimum_tries_again_after_a_permanent_error(make_world):
    backend = Failing()
    backend.permanent = True
    world = await make_world(backend, min_sandboxes=1)
    assert world.pools.readiness()["ready"]
    backend.works = True
    await world.clock.advance(31)

    assert len((await world.acquire()).leases) == 1


@pytest.mark.parametrize(
    ("isolation", "spec", "why"),
    [
        (None, {}, "no isolation mode works here"),
        ("none", {}, "allow_none"),
        ("none", {"allow_none": True, "require_sandbox": True}, "require_sandbox"),
        ("bwrap", {"require_stateful_sandbox": True}, "bash_stateful, tmux"),
    ],
)
async def test_what_a_spec_asks_and_the_machine_lacks_is_a_permanent_error(make_world, isolation, spec, why):
    class Backend(FakeBackend):
        def make_agent(self, pool, spec, sandbox_id):
            return FakeAgent(sandbox_id, isolation=isolation)

    world = await make_world(Backend(), **spec)

    with pytest.raises(BackendUnavailable, match=why):
        await world.acquire()


async def test_no_network_is_enforced_or_the_pool_says_that_it_cannot(make_world):
    class Backend(FakeBackend):
        def make_agent(self, pool, spec, sandbox_id):
            agent = FakeAgent(sandbox_id)
            agent.networks = ["shared"]
            return agent

    world = await make_world(Backend(), allow_network=False)

    with pytest.raises(BackendUnavailable, match="cannot enforce"):
        await world.acquire()


async def test_an_agent_that_never_says_hello_is_given_up(make_world):
    class Mute(FakeBackend):
        async def connect(self, endpoint, timeout_s=10.0):
            return await super().connect(replace(endpoint, address="fake:nobody"), timeout_s)

    world = await make_world(Mute(), min_sandboxes=1)
    await world.clock.advance(FIRST_HELLO_S + 1)

    assert "did not say hello" in world.pools.view("default").last_error
    assert len(world.backend.destroyed) == 1


async def test_a_crash_loop_backs_off(make_world):
    world = await make_world(min_sandboxes=1, max_sandboxes=1)
    for _ in range(100):
        for sandbox_id in list(world.backend.agents):
            world.backend.kill(sandbox_id)
        await world.clock.advance(0.2)

    assert len(world.backend.created) < 10


async def test_too_many_quarantined_slots_and_the_sandbox_is_replaced(make_world):
    class Dirty(FakeAgent):
        def reset(self, slot, meta):
            return {"state": "quarantined", "detail": "a process would not die"}

    class Backend(FakeBackend):
        def make_agent(self, pool, spec, sandbox_id):
            return (Dirty if len(self.created) == 1 else FakeAgent)(sandbox_id, slots=4)

    world = await make_world(Backend(), slots_per_sandbox=4, max_sandboxes=2)
    one, other = (await world.acquire(count=2)).leases
    world.pools.release("t", [one.lease_id])
    await settle()
    assert world.pools.lease("t", other.lease_id), "the others' leases go on"
    assert world.sandboxes() == {"draining": 1, "ready": 1}

    world.pools.release("t", [other.lease_id])
    await world.clock.advance(1)

    assert world.sandboxes() == {"ready": 1}
    assert world.slots() == {"ready": 4}


async def test_a_sandbox_that_cannot_be_destroyed_still_counts_and_is_tried_again(make_world):
    class Sticky(FakeBackend):
        sticky = True

        async def destroy(self, handle):
            if self.sticky:
                raise OSError("it will not go")
            await super().destroy(handle)

    world = await make_world(Sticky(), min_sandboxes=1, max_sandboxes=1)
    world.backend.kill(next(iter(world.backend.agents)))
    await world.clock.advance(20)
    assert world.sandboxes() == {"failed": 1}
    assert len(world.backend.created) == 1

    world.backend.sticky = False
    await world.clock.advance(20)

    assert world.sandboxes() == {"ready": 1}


async def test_nonsense_from_an_agent_ends_the_sandbox_and_not_the_pool(make_world):
    class Liar(FakeAgent):
        def hello(self):
            return super().hello() | {"isolation": "trust me"}

    class Backend(FakeBackend):
        def make_agent(self, pool, spec, sandbox_id):
            return (Liar if len(self.created) == 1 else FakeAgent)(sandbox_id)

    world = await make_world(Backend())
    assert "no mode" in world.pools.view("default").last_error
    await world.clock.advance(5)

    assert world.slots() == {"ready": 2}


async def test_pools_of_one_backend_share_its_budget():
    backend = FakeBackend()
    world = World({"default": PoolSpec(min_sandboxes=3, max_sandboxes=3), "other": PoolSpec(min_sandboxes=3, max_sandboxes=3)}, backend)
    await world.start()
    await settle(200)
    assert sum(view.sandboxes["ready"] for view in world.pools.views()) == 4
    await world.clock.advance(0.3)

    assert [view.sandboxes["ready"] for view in world.pools.views()] == [3, 3]
    assert len(world.pools.sandboxes()) == 6
    await world.pools.stop()
