"""A service dies and another starts from what is on record: what still runs is found again, and what nobody knows of is taken away."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from sandbox_server.core.errors import BackendUnavailable, LeaseLost, LeaseNotFound, SandboxLost, StorageUnavailable
from sandbox_server.core.types import AcquireRequest
from sandbox_server.testing import FakeAgent, FakeBackend, settle
from tests.unit.pool.lives import SPEC, Lives


@pytest.fixture
async def make_lives():
    made = []

    async def make(backend=None, **spec):
        made.append(Lives(backend, **spec))
        return await made[0].start()

    yield make
    await made[0].pools.stop("destroy")
    assert made[0].backend.handles == {}


async def test_leases_keep_their_ids_slots_and_epochs(make_lives):
    lives = await make_lives()
    (lease,) = await lives.acquire(run_id="r", labels={"a": "b"})
    agent = lives.backend.agents[lease.sandbox_id]
    asked = len(agent.requests)

    await lives.again()

    assert lives.pools.lease("t", lease.lease_id) == lease
    location = lives.pools.locate_slot("t", lease.lease_id)
    assert (location.slot_id, location.epoch, location.spec) == (lease.slot_id, lease.epoch, lives.specs["default"])
    assert lives.slots() == {"leased": 1, "ready": 1}
    assert lives.backend.created == [lease.sandbox_id]
    assert [request["op"] for request in agent.requests[asked:]] == ["watch", "quiet"]
    lives.pools.release("t", [lease.lease_id])
    (second,) = await lives.acquire(count=1)
    assert second.lease_id != lease.lease_id
    assert lives.pools.readiness()["ready"]


async def test_a_key_is_on_record_when_its_answer_leaves(make_lives):
    lives = await make_lives()
    (keyed,) = await lives.acquire(request_key="k")

    await lives.again(lossy=True)

    assert (await lives.acquire(request_key="k"))[0].lease_id == keyed.lease_id
    assert lives.slots() == {"leased": 1, "ready": 1}


async def test_what_nobody_took_is_not_kept_under_its_key(make_lives):
    lives = await make_lives()
    lives.store.failure = StorageUnavailable("the disk is full")
    with pytest.raises(StorageUnavailable):
        await lives.acquire(request_key="k")
    lives.store.failure = None

    await lives.again()

    assert lives.store.disk.keys == {}
    (lease,) = await lives.acquire(request_key="k")
    assert lives.pools.lease("t", lease.lease_id).state == "held"


async def test_a_run_a_key_and_the_memory_of_what_ended_come_back(make_lives):
    lives = await make_lives()
    (keyed,) = await lives.acquire(request_key="k", run_id="r")
    (ended,) = await lives.acquire()
    lives.pools.release("t", [ended.lease_id])

    await lives.again()

    assert await lives.acquire(request_key="k", run_id="r") == (keyed,)
    with pytest.raises(LeaseLost, match="released"):
        lives.pools.lease("t", ended.lease_id)
    assert lives.pools.release("t", None, "r") == ([keyed.lease_id], [])
    await lives.clock.advance(3601)
    with pytest.raises(LeaseNotFound):
        lives.pools.lease("t", ended.lease_id)


@pytest.mark.parametrize(("ttl_s", "down_s", "left_s"), [(300, 10, 290), (300, 1000, 60), (20, 1000, 20)])
async def test_after_downtime_a_lease_that_held_gets_its_grace(make_lives, ttl_s, down_s, left_s):
    lives = await make_lives()
    (lease,) = await lives.acquire(ttl_s=ttl_s)

    await lives.again(down_s)

    assert lives.pools.lease("t", lease.lease_id).expires_at == pytest.approx(lives.clock.wall() + left_s)
    await lives.clock.advance(left_s - 1)
    assert lives.pools.lease("t", lease.lease_id)
    await lives.clock.advance(2)
    with pytest.raises(LeaseLost, match="expired"):
        lives.pools.lease("t", lease.lease_id)


@pytest.mark.parametrize(
    ("jump_s", "left_s"), [(-1_000_000, 300), (-200, 300), (200, 100), (1_000_000, 60)], ids=["far back", "back", "forward", "far forward"]
)
async def test_a_clock_that_was_set_while_the_service_was_down_makes_no_lease_immortal(make_lives, jump_s, left_s):
    lives = await make_lives()
    (lease,) = await lives.acquire(ttl_s=300)
    await lives.die()
    lives.clock.jump_wall(jump_s)

    await lives.start()
    again = lives.pools.lease("t", lease.lease_id)
    await lives.again()

    assert again.expires_at == lives.pools.lease("t", lease.lease_id).expires_at == pytest.approx(lives.clock.wall() + left_s)
    await lives.clock.advance(left_s - 1)
    assert lives.pools.lease("t", lease.lease_id)
    await lives.clock.advance(2)
    with pytest.raises(LeaseLost, match="expired"):
        lives.pools.lease("t", lease.lease_id)


async def test_a_renewal_that_shortened_nothing_does_not_either_after_a_restart(make_lives):
    lives = await make_lives()
    (lease,) = await lives.acquire(ttl_s=300)
    lives.pools.renew("t", [lease.lease_id], 1)

    await lives.again(10)

    assert lives.pools.lease("t", lease.lease_id).expires_at == pytest.approx(lives.clock.wall() + 290)


async def test_a_lease_does_not_expire_under_a_command_that_ran_on(make_lives):
    class Busy(FakeAgent):
        running = None

        def respond(self, meta, say):
            if meta["op"] == "quiet":
                self.running = say
            else:
                super().respond(meta, say)

    class Backend(FakeBackend):
        def make_agent(self, pool, spec, sandbox_id):
            return Busy(sandbox_id)

    lives = await make_lives(Backend())
    (lease,) = await lives.acquire(ttl_s=10)
    agent = lives.backend.agents[lease.sandbox_id]
    await lives.again()
    await lives.clock.advance(500)
    agent.hang_up()
    await lives.clock.advance(500)
    assert lives.pools.lease("t", lease.lease_id)

    agent.running({"ran": True})
    await lives.clock.advance(59)
    assert lives.pools.lease("t", lease.lease_id)
    await lives.clock.advance(2)

    with pytest.raises(LeaseLost, match="expired"):
        lives.pools.lease("t", lease.lease_id)


async def test_a_sandbox_that_died_meanwhile_is_lost_with_its_leases_and_replaced(make_lives):
    lives = await make_lives()
    (lease,) = await lives.acquire()
    await lives.die()
    lives.backend.kill(lease.sandbox_id)

    await lives.start()

    with pytest.raises(SandboxLost, match="its agent has ended"):
        lives.pools.lease("t", lease.lease_id)
    await lives.clock.advance(30)
    assert lives.slots() == {"ready": 2}
    assert len(lives.backend.handles) == 1


async def test_a_replacement_under_the_same_name_is_not_adopted(make_lives):
    lives = await make_lives()
    (lease,) = await lives.acquire()
    await lives.die()
    lives.backend.agents[lease.sandbox_id] = FakeAgent(lease.sandbox_id)

    await lives.start()

    with pytest.raises(SandboxLost, match="another agent"):
        lives.pools.lease("t", lease.lease_id)


async def test_until_an_agent_is_found_again_its_leases_wait_and_the_service_is_not_ready(make_lives):
    class Deaf(FakeBackend):
        deaf = False

        async def connect(self, endpoint, timeout_s=10.0):
            return await super().connect(replace(endpoint, address="fake:nobody") if self.deaf else endpoint, timeout_s)

    lives = await make_lives(Deaf(), min_sandboxes=0)
    (lease,) = await lives.acquire()
    await lives.die()
    lives.backend.deaf = True
    await lives.start()
    assert not lives.pools.readiness()["ready"]
    with pytest.raises(BackendUnavailable):
        lives.pools.locate_slot("t", lease.lease_id)
    waiting = asyncio.create_task(lives.pools.wait_for_reconnect_or_loss(lease.lease_id, 50))

    lives.backend.deaf = False
    await lives.clock.advance(1)

    assert await waiting is None
    assert lives.pools.locate_slot("t", lease.lease_id).lease == lease
    assert lives.pools.readiness()["ready"]


async def test_half_made_sandboxes_and_those_nobody_recorded_are_destroyed(make_lives):
    class Slow(FakeBackend):
        gate = asyncio.Event()

        async def before_agent(self, sandbox_id):
            await self.gate.wait()

    Slow.gate = asyncio.Event()
    lives = await make_lives(Slow())
    (half,) = lives.backend.handles
    lives.backend.handles["s-orphan"] = replace(lives.backend.handles[half], sandbox_id="s-orphan")
    Slow.gate.set()
    # The keeper would go on: it dies at this very moment.
    await lives.again()
    await lives.clock.advance(1)

    assert {half, "s-orphan"} <= set(lives.backend.destroyed)
    assert lives.slots() == {"ready": 2}
    assert len(lives.backend.handles) == 1


async def test_a_slot_whose_reset_was_in_flight_is_reset_again(make_lives):
    class Slow(FakeAgent):
        silent = True

        def respond(self, meta, say):
            if meta["op"] != "reset" or not self.silent:
                super().respond(meta, say)

    class Backend(FakeBackend):
        def make_agent(self, pool, spec, sandbox_id):
            return Slow(sandbox_id)

    lives = await make_lives(Backend())
    (lease,) = await lives.acquire()
    lives.pools.release("t", [lease.lease_id])
    await settle()
    agent = lives.backend.agents[lease.sandbox_id]
    agent.silent = False

    await lives.again()

    assert [request["epoch"] for request in agent.requests if request["op"] == "reset"] == [2, 2]
    assert lives.slots() == {"ready": 2}


async def test_what_moved_on_without_being_recorded_is_reset_and_never_held_by_two(make_lives):
    """The release reached the agent and not the disk: for the next service the lease still holds, and its slot is not what it was."""
    lives = await make_lives()
    (lease,) = await lives.acquire()
    lives.store.failure = StorageUnavailable("the disk is full")
    lives.pools.release("t", [lease.lease_id])
    await settle()
    assert lives.slots() == {"ready": 2}, "cleaning up waits for no disk"

    await lives.die(lossy=True)
    lives.store.failure = None
    await lives.start()

    with pytest.raises(SandboxLost, match="newer epoch"):
        lives.pools.lease("t", lease.lease_id)
    assert lives.slots() == {"ready": 2}
    (again, _) = await lives.acquire(count=2)
    assert {slot.epoch for slot in lives.backend.agents[again.sandbox_id].slots.values()} == {1, 3}


async def test_kept_slots_and_caches_come_back(make_lives):
    lives = await make_lives()
    (lease, other) = await lives.acquire(count=2, run_id="r", cache="rw")
    lives.pools.release("t", [lease.lease_id], None, False)
    await settle()

    await lives.again()

    assert lives.slots() == {"kept": 1, "leased": 1}
    (again,) = await lives.acquire(run_id="r")
    assert (again.slot, again.workspace_kept) == (lease.slot, True)
    lives.pools.release("t", None, "r")
    await lives.clock.advance(1)
    assert lives.backend.agents[other.sandbox_id].caches == set()


async def test_pools_made_over_the_api_come_back_and_deleted_ones_go_on_going(make_lives):
    lives = await make_lives()
    await lives.pools.put_pool("mine", SPEC)
    await lives.pools.put_pool("going", SPEC)
    (kept,) = await lives.acquire("mine")
    (ending,) = await lives.acquire("going")
    await lives.pools.delete_pool("going")

    await lives.again()

    assert [(view.name, view.origin) for view in lives.pools.views()] == [("default", "file"), ("going", "api"), ("mine", "api")]
    assert lives.pools.lease("t", kept.lease_id)
    assert lives.pools.lease("t", ending.lease_id)
    assert [(view.state, (view.last_error or "")[:20]) for view in lives.pools.views()] == [("ready", ""), ("draining", "the pool was deleted"), ("ready", "")]
    lives.pools.release("t", [ending.lease_id])
    await lives.clock.advance(1)
    assert [view.name for view in lives.pools.views()] == ["default", "mine"]
    await lives.again()
    assert [view.name for view in lives.pools.views()] == ["default", "mine"]


async def test_what_the_settings_file_says_now_is_what_counts(make_lives):
    lives = await make_lives()
    (lease,) = await lives.acquire()
    lives.specs = {"default": replace(lives.specs["default"], env_vars={"A": "b"}), "new": SPEC}

    await lives.again()

    assert lives.pools.lease("t", lease.lease_id)
    assert lives.pools.view("default").sandboxes["draining"] == 1
    (fresh,) = await lives.acquire()
    assert fresh.sandbox_id != lease.sandbox_id


async def test_a_pool_that_is_in_no_settings_file_any_more_ends_its_leases_in_peace(make_lives):
    lives = await make_lives()
    (lease,) = await lives.acquire()
    lives.specs = {"other": SPEC}

    await lives.again()

    assert lives.pools.lease("t", lease.lease_id)
    assert lives.pools.view("default").state == "draining"
    assert lives.pools.view("default").last_error.startswith("no settings file has the pool any more: it is gone when its lease has ended")
    lives.pools.release("t", [lease.lease_id])
    await lives.clock.advance(1)
    assert [view.name for view in lives.pools.views()] == ["other"]
    assert len(lives.backend.handles) == 1


async def test_a_sandbox_lives_no_longer_for_having_been_adopted(make_lives):
    lives = await make_lives(max_lifetime_s=100)
    (old,) = lives.backend.handles
    await lives.clock.advance(60)

    await lives.again(30)
    assert old in lives.backend.handles
    await lives.clock.advance(12)

    assert old in lives.backend.destroyed


async def test_told_to_keep_it_leaves_its_sandboxes_and_told_to_destroy_it_does_not(make_lives):
    lives = await make_lives()
    (lease,) = await lives.acquire()
    await lives.pools.stop("keep")
    await lives.store.close()
    assert list(lives.backend.agents) == [lease.sandbox_id]

    await lives.start()

    assert lives.pools.locate_slot("t", lease.lease_id).lease == lease
    await lives.pools.stop("destroy")
    assert lives.backend.handles == {}
    await lives.start()


async def test_any_number_of_crashes_leaves_as_many_sandboxes_as_are_known(make_lives):
    lives = await make_lives(min_sandboxes=2)
    for _ in range(10):
        await lives.again()
        await lives.clock.advance(1)

    assert len(lives.backend.handles) == len(lives.pools.sandboxes()) == 2
    assert len(lives.backend.created) == 2


async def test_a_slot_is_on_record_in_its_next_epoch_before_its_agent_hears_of_it(make_lives):
    lives = await make_lives()
    (lease,) = await lives.acquire()
    agent = lives.backend.agents[lease.sandbox_id]
    seen = []
    reset = agent.reset
    agent.reset = lambda slot, meta: seen.append(lives.store.disk.slots[lease.slot].epoch) or reset(slot, meta)

    lives.pools.release("t", [lease.lease_id])
    await settle()

    assert seen == [2]


async def test_a_disk_that_is_full_stops_new_leases_and_no_held_one(make_lives):
    lives = await make_lives()
    (lease,) = await lives.acquire()
    lives.store.failure = StorageUnavailable("the disk is full")

    with pytest.raises(StorageUnavailable):
        await lives.acquire()
    with pytest.raises(StorageUnavailable):
        await lives.acquire(cache="rw")
    await settle()

    assert lives.pools.lease("t", lease.lease_id) == lease
    assert lives.slots() == {"leased": 1, "ready": 1}
    lives.store.failure = None
    assert await lives.acquire()


async def test_mode_none_serves_one_tenant_and_run_at_a_time_over_a_restart_too(make_lives):
    class Backend(FakeBackend):
        def make_agent(self, pool, spec, sandbox_id):
            return FakeAgent(sandbox_id, isolation="none")

    lives = await make_lives(Backend(), allow_none=True, max_sandboxes=1)
    await lives.acquire(run_id="r")
    await lives.again()

    other = asyncio.create_task(lives.pools.acquire(AcquireRequest(tenant="u", pool="default")))
    await settle()
    assert not other.done()

    lives.pools.release("t", None, "r")
    assert (await other).leases
