"""Sandboxes and slots that a service takes over from an earlier one that was killed, and sandboxes that it destroys because no record names them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from sandbox_server.core.errors import SandboxLost, StorageUnavailable
from sandbox_server.testing import FakeAgent, FakeBackend, settle


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
    # The supervisor could finish the creation now, but the service is killed first.
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
