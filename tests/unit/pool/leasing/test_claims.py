"""The claimant: which acquire becomes it, which slots it gets, and when its claim ends."""

from __future__ import annotations

import asyncio

import pytest

from sandbox_server.backends.base import CreateFailed
from sandbox_server.core.errors import NoCapacity
from sandbox_server.pool.leasing.serving_rules import CLAIM_AFTER_S
from sandbox_server.testing import FakeBackend, settle


def give_back(world, leases, *, reset=True):
    for lease in leases:
        world.pools.release(lease.tenant, [lease.lease_id], None, reset)


def claimant(world):
    view = world.pools.view("default").claimant
    return None if view is None else (view.tenant, view.count, view.held_slots)


async def ended(tasks):
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def turn(world, held, waiting, tenant="turning", **fields):
    """Release the oldest lease of a tenant, and queue another acquire of the tenant."""
    give_back(world, held.pop(0).leases)
    waiting.append(await world.queue(tenant, **fields))
    await settle()
    for task in [task for task in waiting if task.done()]:
        waiting.remove(task)
        held.append(task.result())


async def test_a_gang_is_served_once_as_many_slots_came_ready_as_it_lacks(make_world):
    world = await make_world(max_sandboxes=1, slots_per_sandbox=4)
    held, waiting = [await world.acquire("turning") for _ in range(2)], []
    others = await world.acquire("gang", count=2)
    waiting.append(await world.queue("turning"))
    gang = await world.queue("gang", count=4)
    give_back(world, others.leases)

    for _ in range(20):  # for as long as nothing is held, the gang gets nowhere
        await turn(world, held, waiting)
    assert claimant(world) is None
    await world.clock.advance(CLAIM_AFTER_S)
    assert claimant(world) == ("gang", 4, 4 - len(held))

    turns = 0
    while not gang.done():
        await turn(world, held, waiting)
        turns += 1
        assert turns <= 4, "more slots came ready than the gang lacked"

    assert len(gang.result().leases) == 4
    assert claimant(world) == ("turning", 1, 0)
    await ended(waiting)


async def test_slots_that_turn_as_kept_ones_come_to_the_claimant_too(make_world):
    world = await make_world(max_sandboxes=1, slots_per_sandbox=2)
    held = [await world.acquire("turning", run_id="r") for _ in range(2)]
    gang = await world.queue("gang", count=2)
    await world.clock.advance(CLAIM_AFTER_S)

    turns = 0
    while True:
        waiting = await world.queue("turning", run_id="r")
        give_back(world, held.pop(0).leases, reset=False)
        await settle()
        if gang.done():
            break
        assert not waiting.done(), "a slot that the claimant needs was kept from it"
        await ended([waiting])
        turns += 1

    assert turns == 1
    assert len(gang.result().leases) == 2


async def test_kept_slots_that_the_claimant_does_not_need_are_their_runs(make_world):
    world = await make_world(max_sandboxes=1, slots_per_sandbox=4)
    kept = await world.acquire("other", run_id="r", count=2)
    busy = [await world.acquire("busy") for _ in range(2)]
    gang = await world.queue("gang", count=1)  # no slot is free, and none is kept yet
    assert not gang.done()
    await ended([gang])
    gang = await world.queue("gang", count=3)
    await world.clock.advance(CLAIM_AFTER_S)
    give_back(world, busy[0].leases)
    give_back(world, busy[1].leases)
    await settle()
    assert claimant(world) == ("gang", 3, 2)

    give_back(world, kept.leases, reset=False)
    again = await world.queue("other", run_id="r")

    assert len((await gang).leases) == 3
    assert (await again).leases[0].workspace_kept
    assert world.slots() == {"leased": 4}


async def test_nothing_is_held_for_what_a_tenants_own_leases_make_impossible(make_world):
    world = await make_world(max_sandboxes=1, slots_per_sandbox=3)
    own = await world.acquire("gang")
    gang = await world.queue("gang", count=3)
    await world.clock.advance(2 * CLAIM_AFTER_S)
    assert claimant(world) is None

    other = await world.acquire("other")
    give_back(world, own.leases)
    await settle()
    assert claimant(world) == ("gang", 3, 2)
    give_back(world, other.leases)
    assert len((await gang).leases) == 3


async def test_a_tenant_whose_claimants_leave_unserved_claims_half_of_the_time_at_most(make_world):
    world = await make_world(max_sandboxes=1, slots_per_sandbox=2)
    busy = await world.acquire("busy")
    first, second = await world.queue("gang", count=2), await world.queue("gang", count=2)
    await world.clock.advance(CLAIM_AFTER_S)
    assert claimant(world) == ("gang", 2, 1)
    await world.clock.advance(20.0)
    await ended([first])

    await world.clock.advance(19.0)  # the next one has aged, and its tenant has held a slot for 20 s
    assert claimant(world) is None
    other = await world.acquire("other")
    give_back(world, other.leases)
    await settle()
    await world.clock.advance(1.0)
    assert claimant(world) == ("gang", 2, 1)

    give_back(world, busy.leases)
    assert len((await second).leases) == 2


async def test_a_claimant_that_could_not_be_served_for_a_while_goes_on(make_world):
    limits = {"gang": 2}
    world = await make_world(max_sandboxes=1, slots_per_sandbox=2, max_leases=limits)
    busy = await world.acquire("busy")
    gang = await world.queue("gang", count=2)
    await world.clock.advance(CLAIM_AFTER_S + 40.0)
    assert claimant(world) == ("gang", 2, 1)

    limits["gang"] = 1
    give_back(world, (await world.acquire("other")).leases)
    await settle()
    assert claimant(world) is None
    limits["gang"] = 2
    give_back(world, busy.leases)
    assert len((await gang).leases) == 2


async def test_what_is_held_can_be_seen_and_is_said_to_whom_it_is_refused(make_world):
    world = await make_world(max_sandboxes=1, slots_per_sandbox=4)
    busy = await world.acquire("busy", count=2)
    gang = await world.queue("gang", count=4, run_id="g")
    assert world.pools.view("default").claimant is None
    await world.clock.advance(CLAIM_AFTER_S + 1)

    with pytest.raises(NoCapacity) as refused:
        await world.acquire("other", wait_s=0)
    with pytest.raises(NoCapacity) as no_verify:
        await world.pools.verify("default")

    assert "its 2 free slots are held for an acquire of 4 that has waited for 6 s" in refused.value.detail
    assert refused.value.extra["queue_position"] == 2
    assert "are held" in no_verify.value.detail
    view = world.pools.view("default").claimant
    assert (view.tenant, view.run_id, view.count, view.held_slots, view.waited_s) == ("gang", "g", 4, 2, CLAIM_AFTER_S + 1)
    give_back(world, busy.leases)
    await gang
    told = [event for event in world.pools.events._ring if event is not None and event.kind == "pool.claimant"]
    assert [(event.admin_only, event.data["claimant"] and event.data["claimant"]["held_slots"]) for event in told] == [(True, 2), (True, None)]


@pytest.mark.parametrize("end", ["hangs up", "has waited long enough"])
async def test_a_claimant_that_goes_leaves_what_was_held_at_once(make_world, end):
    world = await make_world(max_sandboxes=1, slots_per_sandbox=2)
    await world.acquire("busy", ttl_s=1000)
    gang = await world.queue("gang", count=2, wait_s=8)
    await world.clock.advance(CLAIM_AFTER_S)
    single = await world.queue("other")
    assert not single.done()

    if end == "hangs up":
        await ended([gang])
    else:
        await world.clock.advance(8 - CLAIM_AFTER_S)
        assert isinstance(gang.exception(), NoCapacity)
    await settle()

    assert single.done()
    assert claimant(world) is None


async def test_a_higher_priority_of_its_own_tenant_ends_a_claim_and_the_age_begins_anew(make_world):
    world = await make_world(max_sandboxes=1, slots_per_sandbox=2)
    busy = await world.acquire("busy")
    gang = await world.queue("gang", count=2)
    await world.clock.advance(CLAIM_AFTER_S)
    assert claimant(world) == ("gang", 2, 1)

    urgent = await world.queue("gang", priority=1)

    assert urgent.done()
    assert claimant(world) is None
    give_back(world, urgent.result().leases)
    await world.clock.advance(CLAIM_AFTER_S - 0.1)
    assert claimant(world) is None
    await world.clock.advance(0.1)
    assert claimant(world) == ("gang", 2, 1)
    give_back(world, busy.leases)
    await gang


async def test_nothing_is_held_for_whom_its_own_limits_do_not_admit_any_more(make_world):
    limits = {"gang": 4}
    world = await make_world(max_sandboxes=1, slots_per_sandbox=4, max_leases=limits)
    busy = await world.acquire("busy", count=2)
    own = await world.acquire("gang")
    gang = await world.queue("gang", count=2)
    await world.clock.advance(CLAIM_AFTER_S)
    assert claimant(world) == ("gang", 2, 1)

    limits["gang"] = 2
    single = await world.queue("other")
    assert single.done()
    assert claimant(world) is None
    give_back(world, [*single.result().leases, *busy.leases])
    await settle()
    assert not gang.done(), "it was granted more leases than its tenant may have"

    give_back(world, own.leases)
    assert len((await gang).leases) == 2


async def test_the_pool_grows_for_its_claimant_and_takes_no_sandbox_away(make_world):
    world = await make_world(max_sandboxes=2, slots_per_sandbox=2, min_sandboxes=1, idle_timeout_s=1)
    busy = await world.acquire("busy", ttl_s=1000)
    gang = await world.queue("gang", count=4)
    await world.clock.advance(30)
    assert claimant(world) == ("gang", 4, 3)
    assert world.sandboxes() == {"ready": 2}

    give_back(world, busy.leases)

    assert len((await gang).leases) == 4


async def test_a_sandbox_that_dies_under_a_claim_is_made_again_for_it(make_world):
    world = await make_world(max_sandboxes=2, slots_per_sandbox=2, min_sandboxes=2)
    (busy,) = (await world.acquire("busy", ttl_s=1000)).leases
    gang = await world.queue("gang", count=4)
    await world.clock.advance(CLAIM_AFTER_S)
    assert claimant(world) == ("gang", 4, 3)

    world.backend.kill(next(name for name in world.backend.agents if name != busy.sandbox_id))
    await settle()
    single = await world.queue("other")
    await world.clock.advance(10)
    assert (single.done(), claimant(world)) == (False, ("gang", 4, 3))

    give_back(world, [busy])
    await gang
    await ended([single])


async def test_nothing_is_held_for_more_slots_than_the_pool_can_have(make_world):
    class Broken(FakeBackend):
        broken = False

        async def before_agent(self, sandbox_id):
            if self.broken:
                raise CreateFailed("no room")

    world = await make_world(Broken(), max_sandboxes=2, slots_per_sandbox=2, min_sandboxes=1)
    world.backend.broken = True
    await world.acquire("busy", ttl_s=1000)
    gang = await world.queue("gang", count=3)
    await world.clock.advance(CLAIM_AFTER_S + 1)

    assert claimant(world) is None
    single = await world.queue("other")
    assert single.done()

    world.backend.broken = False
    await world.clock.advance(40)
    give_back(world, single.result().leases)
    assert len((await gang).leases) == 3


async def test_at_most_one_claimant_of_every_other_tenant_goes_first(make_world):
    world = await make_world(max_sandboxes=1, slots_per_sandbox=2, acquire_timeout_s=600)
    held = await world.acquire("busy", count=2)
    waiting = {}
    for tenant in ("a", "b", "c"):
        for number in range(2):
            waiting[tenant, number] = await world.queue(tenant, count=2)
        await world.clock.advance(1)
    order = []
    while waiting:
        await world.clock.advance(CLAIM_AFTER_S)
        give_back(world, held.leases)
        await settle()
        (name,) = [name for name, task in waiting.items() if task.done()]
        held = waiting.pop(name).result()
        order.append(name)

    assert order == [("a", 0), ("b", 0), ("c", 0), ("a", 1), ("b", 1), ("c", 1)]


async def test_the_end_of_one_claim_is_told_before_what_it_gave_and_the_next_claim_after(make_world):
    world = await make_world(max_sandboxes=1, slots_per_sandbox=2)
    busy = await world.acquire("busy", count=2)
    first, second = await world.queue("a"), await world.queue("b", count=2)
    await world.clock.advance(CLAIM_AFTER_S)
    began = world.pools.events.last_id
    give_back(world, busy.leases)
    await first

    told = sorted((event for event in world.pools.events._ring if event is not None and event.id > began), key=lambda event: event.id)
    said = [(event.kind, event.data.get("claimant")) for event in told if event.kind in ("pool.claimant", "lease.acquired")]
    tenants = [(kind, claimant and claimant["tenant"]) for kind, claimant in said]
    assert tenants == [("pool.claimant", None), ("lease.acquired", None), ("pool.claimant", "b")]
    await ended([second])
