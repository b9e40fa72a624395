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
from tests.unit.pool.conftest import PoolsHarness


class Failing(FakeBackend):
    """Creations fail until `works`."""

    works = False
    permanent = False

    async def before_agent(self, sandbox_id):
        if not self.works:
            raise CreateFailed("the disk is full", permanent=self.permanent)


async def test_the_minimum_is_kept(make_harness):
    harness = await make_harness(min_sandboxes=2, max_sandboxes=3)
    assert harness.sandboxes() == {"ready": 2}

    harness.backend.kill(next(iter(harness.backend.agents)))
    await harness.clock.advance(1)

    assert harness.sandboxes() == {"ready": 2}


async def test_demand_grows_the_pool_and_never_past_its_maximum(make_harness):
    harness = await make_harness(min_sandboxes=0, max_sandboxes=3, slots_per_sandbox=1)

    tasks = [await harness.queue() for _ in range(9)]
    await harness.clock.advance(5)

    assert len(harness.backend.created) == 3
    assert harness.backend.most_at_once == 3
    assert sum(task.done() for task in tasks) == 3
    for task in tasks:
        task.cancel()


async def test_creations_under_way_count(make_harness):
    class Slow(FakeBackend):
        gate = None

        async def before_agent(self, sandbox_id):
            await self.gate.wait()

    backend = Slow()
    backend.gate = asyncio.Event()
    harness = await make_harness(backend, min_sandboxes=0, max_sandboxes=5, slots_per_sandbox=2)

    tasks = [await harness.queue() for _ in range(4)]
    await harness.clock.advance(3)
    assert len(backend.created) == 2

    backend.gate.set()
    await asyncio.gather(*tasks)
    assert len(backend.created) == 2


async def test_a_backend_makes_only_so_many_at_once(make_harness):
    class Counting(FakeBackend):
        now = most = 0

        async def before_agent(self, sandbox_id):
            self.now += 1
            self.most = max(self.most, self.now)
            await asyncio.sleep(0)
            self.now -= 1

    harness = await make_harness(Counting(), min_sandboxes=9, max_sandboxes=9)
    await settle(200)
    await harness.clock.advance(1)

    assert harness.backend.most == FakeBackend().traits.creations_at_once
    assert harness.sandboxes() == {"ready": 9}


async def test_idle_sandboxes_above_the_minimum_go(make_harness):
    harness = await make_harness(min_sandboxes=1, max_sandboxes=3, idle_timeout_s=20)
    leases = (await harness.acquire(count=6)).leases
    harness.pools.release("t", [lease.lease_id for lease in leases])
    await harness.clock.advance(19)
    assert harness.sandboxes() == {"ready": 3}

    await harness.clock.advance(3)

    assert harness.sandboxes() == {"ready": 1}
    assert len(harness.backend.handles) == 1


async def test_a_sandbox_with_a_lease_is_not_idle(make_harness):
    harness = await make_harness(min_sandboxes=0, max_sandboxes=2, idle_timeout_s=20, slots_per_sandbox=1)
    (lease,) = (await harness.acquire(ttl_s=1000)).leases
    await harness.clock.advance(500)

    assert harness.pools.lease("t", lease.lease_id)


async def test_warm_slots_are_ready_before_anyone_asks(make_harness):
    harness = await make_harness(min_sandboxes=0, max_sandboxes=4, warm_slots=3, idle_timeout_s=5)
    await harness.clock.advance(50)
    assert harness.slots() == {"ready": 4}

    await harness.acquire(count=3)
    await harness.clock.advance(1)

    assert harness.slots() == {"leased": 3, "ready": 3}


async def test_past_its_lifetime_a_sandbox_takes_no_new_leases_and_goes_with_its_last(make_harness):
    harness = await make_harness(min_sandboxes=1, max_sandboxes=2, max_lifetime_s=100, slots_per_sandbox=2)
    (old,) = (await harness.acquire(ttl_s=5000)).leases
    await harness.clock.advance(101)
    assert harness.sandboxes() == {"draining": 1, "ready": 1}
    (new,) = (await harness.acquire()).leases
    assert new.sandbox_id != old.sandbox_id

    harness.pools.release("t", [old.lease_id])
    await harness.clock.advance(0.1)

    assert old.sandbox_id in harness.backend.destroyed


async def test_max_lease_s_after_its_lifetime_a_sandbox_goes_whatever_runs(make_harness):
    harness = await make_harness(min_sandboxes=1, max_sandboxes=2, max_lifetime_s=100, max_lease_s=50)
    (lease,) = (await harness.acquire(ttl_s=5000)).leases
    await harness.clock.advance(149)
    assert harness.pools.lease("t", lease.lease_id)

    await harness.clock.advance(2)

    with pytest.raises(SandboxLost, match="max_lifetime_s"):
        harness.pools.lease("t", lease.lease_id)


async def test_failing_creations_back_off_and_show_why(make_harness):
    harness = await make_harness(Failing(), min_sandboxes=1)
    assert harness.pools.view("default").last_error == "the disk is full"
    assert len(harness.backend.created) == 1

    times = []
    for _ in range(200):
        before = len(harness.backend.created)
        await harness.clock.advance(0.25)
        times.extend([harness.clock.monotonic()] * (len(harness.backend.created) - before))

    gaps = [late - early for early, late in itertools.pairwise(times)]
    assert gaps == sorted(gaps)
    assert 4 < len(times) < 8
    assert harness.backend.handles == {}, "what was half made was destroyed"


async def test_a_pool_recovers_when_its_backend_does(make_harness):
    harness = await make_harness(Failing(), min_sandboxes=1)
    await harness.clock.advance(10)
    harness.backend.works = True
    await harness.clock.advance(30)

    assert harness.slots() == {"ready": 2}
    assert harness.pools.view("default").last_error is None


async def test_waiters_hear_the_reason_when_time_is_up(make_harness):
    harness = await make_harness(Failing(), min_sandboxes=0)
    waiting = await harness.queue(wait_s=2)
    await harness.clock.advance(2)

    with pytest.raises(NoCapacity, match="the disk is full"):
        await waiting


async def test_after_a_permanent_error_waiters_fail_fast(make_harness):
    backend = Failing()
    backend.permanent = True
    harness = await make_harness(backend, min_sandboxes=0)

    with pytest.raises(BackendUnavailable, match="the disk is full"):
        await harness.acquire(wait_s=50)
    with pytest.raises(BackendUnavailable):
        await harness.acquire(wait_s=50)
    assert harness.pools.readiness()["ready"], "a permanent error that is shown does not hold up the service"


async def test_a_permanent_error_is_forgotten_when_it_is_time_to_try_again(make_harness):
    backend = Failing()
    backend.permanent = True
    harness = await make_harness(backend, min_sandboxes=0)
    with pytest.raises(BackendUnavailable):
        await harness.acquire(wait_s=50)
    await harness.clock.advance(31)
    with pytest.raises(BackendUnavailable):
        await harness.acquire(wait_s=50)
    await harness.clock.advance(31)
    backend.works = True

    assert len((await harness.acquire(wait_s=50)).leases) == 1


async def test_a_pool_with_a_minimum_tries_again_after_a_permanent_error(make_harness):
    backend = Failing()
    backend.permanent = True
    harness = await make_harness(backend, min_sandboxes=1)
    assert harness.pools.readiness()["ready"]
    backend.works = True
    await harness.clock.advance(31)

    assert len((await harness.acquire()).leases) == 1


@pytest.mark.parametrize(
    ("isolation", "spec", "why"),
    [
        (None, {}, "no isolation mode works here"),
        ("none", {}, "allow_none"),
        ("none", {"allow_none": True, "require_sandbox": True}, "require_sandbox"),
        ("bwrap", {"require_stateful_sandbox": True}, "bash_stateful, tmux"),
    ],
)
async def test_what_a_spec_asks_and_the_machine_lacks_is_a_permanent_error(make_harness, isolation, spec, why):
    class Backend(FakeBackend):
        def make_agent(self, pool, spec, sandbox_id):
            return FakeAgent(sandbox_id, isolation=isolation)

    harness = await make_harness(Backend(), **spec)

    with pytest.raises(BackendUnavailable, match=why):
        await harness.acquire()


async def test_no_network_is_enforced_or_the_pool_says_that_it_cannot(make_harness):
    class Backend(FakeBackend):
        def make_agent(self, pool, spec, sandbox_id):
            agent = FakeAgent(sandbox_id)
            agent.networks = ["shared"]
            return agent

    harness = await make_harness(Backend(), allow_network=False)

    with pytest.raises(BackendUnavailable, match="cannot enforce"):
        await harness.acquire()


async def test_an_agent_that_never_says_hello_is_given_up(make_harness):
    class Mute(FakeBackend):
        async def connect(self, endpoint, timeout_s=10.0):
            return await super().connect(replace(endpoint, address="fake:nobody"), timeout_s)

    harness = await make_harness(Mute(), min_sandboxes=1)
    await harness.clock.advance(FIRST_HELLO_S + 1)

    assert "did not say hello" in harness.pools.view("default").last_error
    assert len(harness.backend.destroyed) == 1


async def test_a_crash_loop_backs_off(make_harness):
    harness = await make_harness(min_sandboxes=1, max_sandboxes=1)
    for _ in range(100):
        for sandbox_id in list(harness.backend.agents):
            harness.backend.kill(sandbox_id)
        await harness.clock.advance(0.2)

    assert len(harness.backend.created) < 10


async def test_too_many_quarantined_slots_and_the_sandbox_is_replaced(make_harness):
    class Dirty(FakeAgent):
        def reset(self, slot, meta):
            return {"state": "quarantined", "detail": "a process would not die"}

    class Backend(FakeBackend):
        def make_agent(self, pool, spec, sandbox_id):
            return (Dirty if len(self.created) == 1 else FakeAgent)(sandbox_id, slots=4)

    harness = await make_harness(Backend(), slots_per_sandbox=4, max_sandboxes=2)
    one, other = (await harness.acquire(count=2)).leases
    harness.pools.release("t", [one.lease_id])
    await settle()
    assert harness.pools.lease("t", other.lease_id), "the others' leases go on"
    assert harness.sandboxes() == {"draining": 1, "ready": 1}

    harness.pools.release("t", [other.lease_id])
    await harness.clock.advance(1)

    assert harness.sandboxes() == {"ready": 1}
    assert harness.slots() == {"ready": 4}


async def test_a_sandbox_that_cannot_be_destroyed_still_counts_and_is_tried_again(make_harness):
    class Sticky(FakeBackend):
        sticky = True

        async def destroy(self, handle):
            if self.sticky:
                raise OSError("it will not go")
            await super().destroy(handle)

    harness = await make_harness(Sticky(), min_sandboxes=1, max_sandboxes=1)
    harness.backend.kill(next(iter(harness.backend.agents)))
    await harness.clock.advance(20)
    assert harness.sandboxes() == {"failed": 1}
    assert len(harness.backend.created) == 1

    harness.backend.sticky = False
    await harness.clock.advance(20)

    assert harness.sandboxes() == {"ready": 1}


async def test_nonsense_from_an_agent_ends_the_sandbox_and_not_the_pool(make_harness):
    class Liar(FakeAgent):
        def hello(self):
            return super().hello() | {"isolation": "trust me"}

    class Backend(FakeBackend):
        def make_agent(self, pool, spec, sandbox_id):
            return (Liar if len(self.created) == 1 else FakeAgent)(sandbox_id)

    harness = await make_harness(Backend())
    assert "no mode" in harness.pools.view("default").last_error
    await harness.clock.advance(5)

    assert harness.slots() == {"ready": 2}


async def test_pools_of_one_backend_share_its_budget():
    backend = FakeBackend()
    harness = PoolsHarness({"default": PoolSpec(min_sandboxes=3, max_sandboxes=3), "other": PoolSpec(min_sandboxes=3, max_sandboxes=3)}, backend)
    await harness.start()
    await settle(200)
    assert sum(view.sandboxes["ready"] for view in harness.pools.views()) == 4
    await harness.clock.advance(0.3)

    assert [view.sandboxes["ready"] for view in harness.pools.views()] == [3, 3]
    assert len(harness.pools.sandboxes()) == 6
    await harness.pools.stop()
