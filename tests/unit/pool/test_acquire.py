"""Acquires: slots, the queue, and the answers of acquires that cannot be served."""

from __future__ import annotations

import asyncio

import pytest

from sandbox_server.core.errors import InvalidRequest, NoCapacity, PoolNotFound
from sandbox_server.core.types import AcquireRequest
from sandbox_server.pool.leasing.no_capacity import describe_no_capacity
from sandbox_server.testing import FakeAgent, FakeBackend, settle


async def test_acquire_of_a_ready_slot_asks_the_agent_nothing(make_harness):
    harness = await make_harness(min_sandboxes=1)
    (agent,) = harness.backend.agents.values()
    asked = len(agent.requests)

    acquired = await harness.acquire(trajectory_ids=("t-1",), run_id="r-1", labels={"a": "b"})

    (lease,) = acquired.leases
    assert (lease.epoch, lease.pool, lease.tenant, lease.trajectory_id, lease.run_id) == (1, "default", "t", "t-1", "r-1")
    assert (lease.workspace, lease.isolation, lease.allow_network, lease.labels) == ("/workspace", "bwrap", True, {"a": "b"})
    assert lease.expires_at == harness.clock.wall() + 300
    assert acquired.waited_s == 0
    assert len(agent.requests) == asked
    assert harness.slots() == {"leased": 1, "ready": 1}


async def test_release_resets_with_the_next_epoch_before_the_next_lease(make_harness):
    harness = await make_harness(max_sandboxes=1, slots_per_sandbox=1)
    (first,) = (await harness.acquire()).leases

    assert harness.pools.release("t", [first.lease_id]) == ([first.lease_id], [])
    assert harness.slots() == {"resetting": 1}
    (second,) = (await harness.acquire()).leases

    (agent,) = harness.backend.agents.values()
    assert {"op": "reset", "slot": "0", "epoch": 2, "network": True, "keep": False} in agent.requests
    assert (second.slot, second.epoch) == (first.slot, 2)
    assert second.lease_id != first.lease_id


async def test_a_gang_is_all_or_nothing_and_makes_the_pool_grow(make_harness):
    harness = await make_harness(min_sandboxes=1, slots_per_sandbox=2, max_sandboxes=2)

    gang = (await harness.acquire(count=4, trajectory_ids=("a", "b", "c", "d"))).leases

    assert len({lease.slot for lease in gang}) == 4
    assert [lease.trajectory_id for lease in gang] == ["a", "b", "c", "d"]
    assert harness.sandboxes() == {"ready": 2}


async def test_more_than_the_pool_can_ever_hold_is_refused_at_once(make_harness):
    harness = await make_harness()

    with pytest.raises(InvalidRequest, match="never hold more than 4"):
        await harness.acquire(count=5)


async def test_an_unknown_pool_is_named(make_harness):
    harness = await make_harness()

    with pytest.raises(PoolNotFound, match="'nope'"):
        await harness.pools.acquire(AcquireRequest(tenant="t", pool="nope"))


async def test_no_capacity_says_where_in_the_queue_and_for_how_long(make_harness):
    harness = await make_harness(max_sandboxes=1)
    await harness.acquire(count=2)
    first = await harness.queue(wait_s=5)
    second = await harness.queue(wait_s=4)

    await harness.clock.advance(4)

    with pytest.raises(NoCapacity) as caught:
        await second
    assert caught.value.extra["queue_position"] == 2
    assert caught.value.extra["waited_s"] == pytest.approx(4)
    assert not first.done()
    first.cancel()


async def test_wait_s_zero_answers_at_once_and_still_makes_the_pool_grow(make_harness):
    harness = await make_harness(min_sandboxes=0, max_sandboxes=1)

    with pytest.raises(NoCapacity):
        await harness.acquire(wait_s=0)
    await settle()

    assert len((await harness.acquire(wait_s=0)).leases) == 1


async def test_who_asks_again_and_again_without_waiting_makes_the_pool_grow_once_and_not_for_good(make_harness):
    class Slow(FakeBackend):
        gate = asyncio.Event()

        async def before_agent(self, sandbox_id):
            await self.gate.wait()

    Slow.gate = asyncio.Event()
    harness = await make_harness(Slow(), min_sandboxes=0, max_sandboxes=5, idle_timeout_s=20)
    for _ in range(20):
        with pytest.raises(NoCapacity, match="pool 'default' has no slot free: a sandbox is being made, ask again in a moment"):
            await harness.acquire(wait_s=0)
        await harness.clock.advance(0.1)
    assert harness.sandboxes() == {"starting": 1}

    Slow.gate.set()
    await harness.clock.advance(19)
    assert harness.sandboxes() == {"ready": 1}
    await harness.clock.advance(2)

    assert harness.sandboxes() == {}


@pytest.mark.parametrize(
    ("count", "waited_s", "creating_count", "last_error", "said"),
    [
        (1, 0.000279, 0, None, "pool 'p' has no slot free: release leases, raise its max_sandboxes, or ask again"),
        (1, 4.0004, 0, "no disk", "pool 'p' had no slot free within 4 s (its last error: no disk): release leases, raise its max_sandboxes, or ask again"),
        (8, 59.9996, 2, None, "pool 'p' had no 8 slots free at once within 60 s: 2 sandboxes are being made, ask again in a moment"),
        (8, 0.5, 1, None, "pool 'p' had no 8 slots free at once within 0.5 s: a sandbox is being made, ask again in a moment"),
    ],
)
def test_who_waited_in_vain_hears_it_in_words_for_people(count, waited_s, creating_count, last_error, said):
    assert describe_no_capacity("p", count, waited_s, creating_count=creating_count, last_error=last_error) == said


async def test_the_place_in_the_queue_counts_the_own_tenants_and_as_many_of_each_other(make_harness):
    harness = await make_harness(max_sandboxes=1)
    await harness.acquire("x", count=2)
    early = [await harness.queue(tenant, wait_s=50) for tenant in ("a", "a", "b", "b", "b", "b")]
    late = [await harness.queue("a", wait_s=1), await harness.queue("a", wait_s=1, priority=5), await harness.queue("b", wait_s=1)]

    await harness.clock.advance(1)

    refused = await asyncio.gather(*late, return_exceptions=True)
    assert [error.extra["queue_position"] for error in refused] == [4 + 3, 1, 5 + 4]
    for task in early:
        task.cancel()


async def test_wait_s_is_bounded_by_the_pools_own(make_harness):
    harness = await make_harness(max_sandboxes=1, acquire_timeout_s=3)
    await harness.acquire(count=2)
    late = await harness.queue(wait_s=500)

    await harness.clock.advance(3)

    with pytest.raises(NoCapacity):
        await late


async def test_a_cancelled_acquire_leaves_the_queue(make_harness):
    harness = await make_harness(max_sandboxes=1)
    held = (await harness.acquire(count=2)).leases
    gone = await harness.queue()
    stays = await harness.queue()

    gone.cancel()
    await settle()
    harness.pools.release("t", [held[0].lease_id])

    assert len((await stays).leases) == 1
    assert harness.pools.view("default").queue == 0


async def test_an_acquire_cancelled_after_its_grant_gives_the_slots_back(make_harness):
    harness = await make_harness(max_sandboxes=1)
    held = (await harness.acquire(count=2)).leases
    waiting = await harness.queue(count=2)
    harness.pools.release("t", [lease.lease_id for lease in held])
    while not harness.pool.book.held:
        await asyncio.sleep(0)
    waiting.cancel()
    await settle()

    assert harness.slots() == {"ready": 2}


async def test_mode_none_serves_one_tenant_and_run_at_a_time(make_harness):
    class Backend(FakeBackend):
        def make_agent(self, pool, spec, sandbox_id):
            return FakeAgent(sandbox_id, isolation="none")

    harness = await make_harness(Backend(), max_sandboxes=1, allow_none=True)
    (mine,) = (await harness.acquire("a", run_id="r")).leases
    other = await harness.queue("b")
    await settle()
    assert not other.done()

    harness.pools.release("a", [mine.lease_id])

    assert (await other).leases[0].tenant == "b"
