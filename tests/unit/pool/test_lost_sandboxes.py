"""Sandboxes whose agent cannot be reached, has ended or was replaced, and what becomes of their leases; the stop of the service and orphans."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from sandbox_server.core.errors import BackendUnavailable, Draining, SandboxLost
from sandbox_server.testing import FakeAgent, FakeBackend, settle


async def test_a_dead_sandbox_ends_its_leases_says_so_and_is_replaced(make_harness):
    harness = await make_harness(max_sandboxes=1)
    (lease,) = (await harness.acquire()).leases
    link = harness.pools.locate_slot("t", lease.lease_id).agent.link

    harness.backend.kill(lease.sandbox_id)
    await asyncio.wait([link.closed])

    assert isinstance(await harness.pools.wait_for_reconnect_or_loss(lease.lease_id, 5), SandboxLost)
    await settle()
    with pytest.raises(SandboxLost, match=lease.sandbox_id):
        harness.pools.locate_slot("t", lease.lease_id)
    assert harness.pools.release("t", [lease.lease_id]) == ([lease.lease_id], [])
    await harness.clock.advance(1)
    assert harness.slots() == {"ready": 2}
    assert harness.backend.destroyed == [lease.sandbox_id]


async def test_a_cut_link_is_made_anew_and_the_lease_stays(make_harness):
    harness = await make_harness(max_sandboxes=1)
    (lease,) = (await harness.acquire()).leases

    harness.backend.agents[lease.sandbox_id].hang_up()
    old = harness.pools.locate_slot("t", lease.lease_id).agent
    assert await harness.pools.wait_for_reconnect_or_loss(lease.lease_id, 5) is None
    await settle()

    location = harness.pools.locate_slot("t", lease.lease_id)
    assert location.agent is not old
    assert location.agent.is_connected
    assert (await harness.acquire()).leases[0].slot != lease.slot


async def test_an_agent_that_cannot_be_reached_for_five_seconds_is_lost(make_harness):
    class Deaf(FakeBackend):
        deaf = False

        async def connect(self, endpoint, timeout_s=10.0):
            return await super().connect(replace(endpoint, address="fake:nobody") if self.deaf else endpoint, timeout_s)

    harness = await make_harness(Deaf(), max_sandboxes=1)
    (lease,) = (await harness.acquire()).leases
    harness.backend.deaf = True
    harness.backend.agents[lease.sandbox_id].hang_up()
    await settle()

    with pytest.raises(BackendUnavailable):
        harness.pools.locate_slot("t", lease.lease_id)
    await harness.clock.advance(4)
    with pytest.raises(BackendUnavailable):
        harness.pools.locate_slot("t", lease.lease_id)
    await harness.clock.advance(1.2)
    with pytest.raises(SandboxLost, match="could not be reached"):
        harness.pools.locate_slot("t", lease.lease_id)


async def test_another_agent_under_the_same_name_is_not_taken_for_the_old_one(make_harness):
    harness = await make_harness(max_sandboxes=1)
    (lease,) = (await harness.acquire()).leases

    old = harness.backend.agents[lease.sandbox_id]
    harness.backend.agents[lease.sandbox_id] = FakeAgent(lease.sandbox_id)
    old.hang_up()
    await settle()

    with pytest.raises(SandboxLost, match="another agent"):
        harness.pools.lease("t", lease.lease_id)


async def test_stopping_fails_who_waits_and_leaves_no_sandbox(make_harness):
    harness = await make_harness(max_sandboxes=1)
    await harness.acquire(count=2)
    waiting = await harness.queue()

    await harness.pools.stop()

    with pytest.raises(Draining):
        await waiting
    with pytest.raises(Draining):
        await harness.acquire()
    assert harness.backend.handles == {}


async def test_what_an_earlier_life_left_is_swept_at_the_start(make_harness):
    backend = FakeBackend()
    harness = await make_harness(backend, max_sandboxes=1)
    (old,) = backend.handles.values()
    backend.handles["s-orphan"] = replace(old, sandbox_id="s-orphan")
    backend.handles["s-other"] = replace(old, sandbox_id="s-other", owner="somebody else")

    harness.store.sandboxes.clear()
    await harness.pools.stop()
    await make_harness(backend, max_sandboxes=1)

    assert "s-orphan" not in backend.handles
    assert "s-other" in backend.handles
