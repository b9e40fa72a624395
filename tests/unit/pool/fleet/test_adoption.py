"""Sandboxes and slots that a service takes over from an earlier one that was killed, and sandboxes that it destroys because no record names them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from sandbox_server.core.errors import SandboxLost, StorageUnavailable
from sandbox_server.testing import FakeAgent, FakeBackend, settle


async def test_a_sandbox_that_died_meanwhile_is_lost_with_its_leases_and_replaced(make_service):
    service = await make_service()
    (lease,) = await service.acquire()
    await service.crash()
    service.backend.kill(lease.sandbox_id)

    await service.start()

    with pytest.raises(SandboxLost, match="its agent has ended"):
        service.pools.lease("t", lease.lease_id)
    await service.clock.advance(30)
    assert service.slots() == {"ready": 2}
    assert len(service.backend.handles) == 1


async def test_a_replacement_under_the_same_name_is_not_adopted(make_service):
    service = await make_service()
    (lease,) = await service.acquire()
    await service.crash()
    service.backend.agents[lease.sandbox_id] = FakeAgent(lease.sandbox_id)

    await service.start()

    with pytest.raises(SandboxLost, match="another agent"):
        service.pools.lease("t", lease.lease_id)


async def test_half_made_sandboxes_and_those_nobody_recorded_are_destroyed(make_service):
    class Slow(FakeBackend):
        gate = asyncio.Event()

        async def before_agent(self, sandbox_id):
            await self.gate.wait()

    Slow.gate = asyncio.Event()
    service = await make_service(Slow())
    (half,) = service.backend.handles
    service.backend.handles["s-orphan"] = replace(service.backend.handles[half], sandbox_id="s-orphan")
    Slow.gate.set()
    # The supervisor could finish the creation now, but the service is killed first.
    await service.restart()
    await service.clock.advance(1)

    assert {half, "s-orphan"} <= set(service.backend.destroyed)
    assert service.slots() == {"ready": 2}
    assert len(service.backend.handles) == 1


async def test_a_slot_whose_reset_was_in_flight_is_reset_again(make_service):
    class Slow(FakeAgent):
        silent = True

        def respond(self, meta, say):
            if meta["op"] != "reset" or not self.silent:
                super().respond(meta, say)

    class Backend(FakeBackend):
        def make_agent(self, pool, spec, sandbox_id):
            return Slow(sandbox_id)

    service = await make_service(Backend())
    (lease,) = await service.acquire()
    service.pools.release("t", [lease.lease_id])
    await settle()
    agent = service.backend.agents[lease.sandbox_id]
    agent.silent = False

    await service.restart()

    assert [request["epoch"] for request in agent.requests if request["op"] == "reset"] == [2, 2]
    assert service.slots() == {"ready": 2}


async def test_what_moved_on_without_being_recorded_is_reset_and_never_held_by_two(make_service):
    """The release reached the agent and not the disk: for the next service the lease still holds, and its slot is not what it was."""
    service = await make_service()
    (lease,) = await service.acquire()
    service.store.failure = StorageUnavailable("the disk is full")
    service.pools.release("t", [lease.lease_id])
    await settle()
    assert service.slots() == {"ready": 2}, "cleaning up waits for no disk"

    await service.crash(lossy=True)
    service.store.failure = None
    await service.start()

    with pytest.raises(SandboxLost, match="newer epoch"):
        service.pools.lease("t", lease.lease_id)
    assert service.slots() == {"ready": 2}
    (again, _) = await service.acquire(count=2)
    assert {slot.epoch for slot in service.backend.agents[again.sandbox_id].slots.values()} == {1, 3}


async def test_kept_slots_and_caches_come_back(make_service):
    service = await make_service()
    (lease, other) = await service.acquire(count=2, run_id="r", cache="rw")
    service.pools.release("t", [lease.lease_id], None, False)
    await settle()

    await service.restart()

    assert service.slots() == {"kept": 1, "leased": 1}
    (again,) = await service.acquire(run_id="r")
    assert (again.slot, again.workspace_kept) == (lease.slot, True)
    service.pools.release("t", None, "r")
    await service.clock.advance(1)
    assert service.backend.agents[other.sandbox_id].caches == set()


async def test_a_sandbox_lives_no_longer_for_having_been_adopted(make_service):
    service = await make_service(max_lifetime_s=100)
    (old,) = service.backend.handles
    await service.clock.advance(60)

    await service.restart(30)
    assert old in service.backend.handles
    await service.clock.advance(12)

    assert old in service.backend.destroyed


async def test_told_to_keep_it_leaves_its_sandboxes_and_told_to_destroy_it_does_not(make_service):
    service = await make_service()
    (lease,) = await service.acquire()
    await service.pools.stop("keep")
    await service.store.close()
    assert list(service.backend.agents) == [lease.sandbox_id]

    await service.start()

    assert service.pools.locate_slot("t", lease.lease_id).lease == lease
    await service.pools.stop("destroy")
    assert service.backend.handles == {}
    await service.start()


async def test_any_number_of_crashes_leaves_as_many_sandboxes_as_are_known(make_service):
    service = await make_service(min_sandboxes=2)
    for _ in range(10):
        await service.restart()
        await service.clock.advance(1)

    assert len(service.backend.handles) == len(service.pools.sandboxes()) == 2
    assert len(service.backend.created) == 2
