"""Sandboxes whose agent cannot be reached, has ended or was replaced, and what becomes of their leases; the stop of the service and orphans."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from sandbox_server.core.errors import BackendUnavailable, Draining, SandboxLost
from sandbox_server.testing import FakeAgent, FakeBackend, settle


async def test_a_dead_sandbox_ends_its_leases_says_so_and_is_replaced(make_world):
    world = await make_world(max_sandboxes=1)
    (lease,) = (await world.acquire()).leases
    link = world.pools.locate_slot("t", lease.lease_id).agent.link

    world.backend.kill(lease.sandbox_id)
    await asyncio.wait([link.closed])

    assert isinstance(await world.pools.wait_for_reconnect_or_loss(lease.lease_id, 5), SandboxLost)
    await settle()
    with pytest.raises(SandboxLost, match=lease.sandbox_id):
        world.pools.locate_slot("t", lease.lease_id)
    assert world.pools.release("t", [lease.lease_id]) == ([lease.lease_id], [])
    await world.clock.advance(1)
    assert world.slots() == {"ready": 2}
    assert world.backend.destroyed == [lease.sandbox_id]


async def test_a_cut_link_is_made_anew_and_the_lease_stays(make_world):
    world = await make_world(max_sandboxes=1)
    (lease,) = (await world.acquire()).leases

    world.backend.agents[lease.sandbox_id].hang_up()
    old = world.pools.locate_slot("t", lease.lease_id).agent
    assert await world.pools.wait_for_reconnect_or_loss(lease.lease_id, 5) is None
    await settle()

    location = world.pools.locate_slot("t", lease.lease_id)
    assert location.agent is not old
    assert location.agent.is_connected
    assert (await world.acquire()).leases[0].slot != lease.slot


async def test_an_agent_that_cannot_be_reached_for_five_seconds_is_lost(make_world):
    class Deaf(FakeBackend):
        deaf = False

        async def connect(self, endpoint, timeout_s=10.0):
            return await super().connect(replace(endpoint, address="fake:nobody") if self.deaf else endpoint, timeout_s)

    world = await make_world(Deaf(), max_sandboxes=1)
    (lease,) = (await world.acquire()).leases
    world.backend.deaf = True
    world.backend.agents[lease.sandbox_id].hang_up()
    await settle()

    with pytest.raises(BackendUnavailable):
        world.pools.locate_slot("t", lease.lease_id)
    await world.clock.advance(4)
    with pytest.raises(BackendUnavailable):
        world.pools.locate_slot("t", lease.lease_id)
    await world.clock.advance(1.2)
    with pytest.raises(SandboxLost, match="could not be reached"):
        world.pools.locate_slot("t", lease.lease_id)


async def test_another_agent_under_the_same_name_is_not_taken_for_the_old_one(make_world):
    world = await make_world(max_sandboxes=1)
    (lease,) = (await world.acquire()).leases

    old = world.backend.agents[lease.sandbox_id]
    world.backend.agents[lease.sandbox_id] = FakeAgent(lease.sandbox_id)
    old.hang_up()
    await settle()

    with pytest.raises(SandboxLost, match="another agent"):
        world.pools.lease("t", lease.lease_id)


async def test_stopping_fails_who_waits_and_leaves_no_sandbox(make_world):
    world = await make_world(max_sandboxes=1)
    await world.acquire(count=2)
    waiting = await world.queue()

    await world.pools.stop()

    with pytest.raises(Draining):
        await waiting
    with pytest.raises(Draining):
        await world.acquire()
    assert world.backend.handles == {}


async def test_what_an_earlier_life_left_is_swept_at_the_start(make_world):
    backend = FakeBackend()
    world = await make_world(backend, max_sandboxes=1)
    (old,) = backend.handles.values()
    backend.handles["s-orphan"] = replace(old, sandbox_id="s-orphan")
    backend.handles["s-other"] = replace(old, sandbox_id="s-other", owner="somebody else")

    world.store.sandboxes.clear()
    await world.pools.stop()
    await make_world(backend, max_sandboxes=1)

    assert "s-orphan" not in backend.handles
    assert "s-other" in backend.handles
