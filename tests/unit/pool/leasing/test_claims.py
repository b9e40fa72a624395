"""The claimant: which acquire becomes it, which slots it gets, and when its claim ends."""

from __future__ import annotations

import asyncio

import pytest

from sandbox_server.backends.base import CreateFailed
from sandbox_server.core.errors import NoCapacity
from sandbox_server.pool.leasing.serving_rules import CLAIM_AFTER_S
from sandbox_server.testing import FakeBackend, settle


def give_back(harness, leases, *, reset=True):
    for lease in leases:
        harness.pools.release(lease.tenant, [lease.lease_id], None, reset)


def claimant(harness):
    view = harness.pools.view("default").claimant
    return None if view is None else (view.tenant, view.count, view.held_slots)


async def ended(tasks):
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def turn(harness, held, waiting, tenant="turning", **fields):
    """Release the oldest lease of a tenant, and queue another acquire of the tenant."""
    give_back(harness, held.pop(0).leases)
    waiting.append(await harness.queue(tenant, **fields))
    await settle()
    for task in [task for task in waiting if task.done()]:
        waiting.remove(task)
        held.append(task.result())


async def test_a_gang_is_served_once_as_many_slots_came_ready_as_it_lacks(make_harness):
    harness = await make_harness(max_sandboxes=1, slots_per_sandbox=4)
    held, waiting = [await harness.acquire("turning") for _ in range(2)], []
    others = await harness.acquire("gang", count=2)
    waiting.append(await harness.queue("turning"))
    gang = await harness.queue("gang", count=4)
    give_back(harness, others.leases)

    for _ in range(20):  # for as long as nothing is held, the gang gets nowhere
        await turn(harness, held, waiting)
    assert claimant(harness) is None
    await harness.clock.advance(CLAIM_AFTER_S)
    assert claimant(harness) == ("gang", 4, 4 - len(held))

    turns = 0
    while not gang.done():
        await turn(harness, held, waiting)
        turns += 1
        assert turns <= 4, "more slots came ready than the gang lacked"

    assert len(gang.result().leases) == 4
    assert claimant(harness) == ("turning", 1, 0)
    await ended(waiting)


async def test_slots_that_turn_as_kept_ones_come_to_the_claimant_too(make_harness):
    harness = await make_harness(max_sandboxes=1, slots_per_sandbox=2)
    held = [await harness.acquire("turning", run_id="r") for _ in range(2)]
    gang = await harness.queue("gang", count=2)
    await harness.clock.advance(CLAIM_AFTER_S)

    turns = 0
    while True:
        waiting = await harness.queue("turning", run_id="r")
        give_back(harness, held.pop(0).leases, reset=False)
        await settle()
        if gang.done():
            break
        assert not waiting.done(), "a slot that the claimant needs was kept from it"
        await ended([waiting])
        turns += 1

    assert turns == 1
    assert len(gang.result().leases) == 2


async def test_kept_slots_that_the_claimant_does_not_need_are_their_runs(make_harness):
    harness = await make_harness(max_sandboxes=1, slots_per_sandbox=4)
    kept = await harness.acquire("other", run_id="r", count=2)
    busy = [await harness.acquire("busy") for _ in range(2)]
    gang = await harness.queue("gang", count=1)  # no slot is free, and none is kept yet
    assert not gang.done()
    await ended([gang])
    gang = await harness.queue("gang", count=3)
    await harness.clock.advance(CLAIM_AFTER_S)
    give_back(harness, busy[0].leases)
    give_back(harness, busy[1].leases)
    await settle()
    assert claimant(harness) == ("gang", 3, 2)

    give_back(harness, kept.leases, reset=False)
    again = await harness.queue("other", run_id="r")

    assert len((await gang).leases) == 3
    assert (await again).leases[0].workspace_kept
    assert harness.slots() == {"leased": 4}


async def test_nothing_is_held_for_what_a_tenants_own_leases_make_impossible(make_harness):
    harness = await make_harness(max_sandboxes=1, slots_per_sandbox=3)
    own = await harness.acquire("gang")
    gang = await harness.queue("gang", count=3)
    await harness.clock.advance(2 * CLAIM_AFTER_S)
    assert claimant(harness) is None

    other = await harness.acquire("other")
    give_back(harness, own.leases)
    await settle()
    assert claimant(harness) == ("gang", 3, 2)
    give_back(harness, other.leases)
    assert len((await gang).leases) == 3


async def test_a_tenant_whose_claimants_leave_unserved_claims_half_of_the_time_at_most(make_harness):
    harness = await make_harness(max_sandboxes=1, slots_per_sandbox=2)
    busy = await harness.acquire("busy")
    first, second = await harness.queue("gang", count=2), await harness.queue("gang", count=2)
    await harness.clock.advance(CLAIM_AFTER_S)
    assert claimant(harness) == ("gang", 2, 1)
    await harness.clock.advance(20.0)
    await ended([first])

    await harness.clock.advance(19.0)  # the next one has aged, and its tenant has held a slot for 20 s
    assert claimant(harness) is None
    other = await harness.acquire("other")
    give_back(harness, other.leases)
    await settle()
    await harness.clock.advance(1.0)
    assert claimant(harness) == ("gang", 2, 1)

    give_back(harness, busy.leases)
    assert len((await second).leases) == 2


async def test_a_claimant_that_could_not_be_served_for_a_while_goes_on(make_harness):
    limits = {"gang": 2}
    harness = await make_harness(max_sandboxes=1, slots_per_sandbox=2, max_leases=limits)
    busy = await harness.acquire("busy")
    gang = await harness.queue("gang", count=2)
    await harness.clock.advance(CLAIM_AFTER_S + 40.0)
    assert claimant(harness) == ("gang", 2, 1)

    limits["gang"] = 1
    give_back(harness, (await harness.acquire("other")).leases)
    await settle()
    assert claimant(harness) is None
    limits["gang"] = 2
    give_back(harness, busy.leases)
    assert len((await gang).leases) == 2


async def test_what_is_held_can_be_seen_and_is_said_to_whom_it_is_refused(make_harness):
    harness = await make_harness(max_sandboxes=1, slots_per_sandbox=4)
    busy = await harness.acquire("busy", count=2)
    gang = await harness.queue("gang", count=4, run_id="g")
    assert harness.pools.view("default").claimant is None
    await harness.clock.advance(CLAIM_AFTER_S + 1)

    with pytest.raises(NoCapacity) as refused:
        await harness.acquire("other", wait_s=0)
    with pytest.raises(NoCapacity) as no_verify:
        await harness.pools.verify("default")

    assert "its 2 free slots are held for an acquire of 4 that has waited for 6 s" in refused.value.detail
    assert refused.value.extra["queue_position"] == 2
    assert "are held" in no_verify.value.detail
    view = harness.pools.view("default").claimant
    assert (view.tenant, view.run_id, view.count, view.held_slots, view.waited_s) == ("gang", "g", 4, 2, CLAIM_AFTER_S + 1)
    give_back(harness, busy.leases)
    await gang
    told = [event for event in harness.pools.events._ring if event is not None and event.kind == "pool.claimant"]
    assert [(event.admin_only, event.data["claimant"] and event.data["claimant"]["held_slots"]) for event in told] == [(True, 2), (True, None)]


@pytest.mark.parametrize("end", ["hangs up", "has waited long enough"])
async def test_a_claimant_that_goes_leaves_what_was_held_at_once(make_harness, end):
    harness = await make_harness(max_sandboxes=1, slots_per_sandbox=2)
    await harness.acquire("busy", ttl_s=1000)
    gang = await harness.queue("gang", count=2, wait_s=8)
    await harness.clock.advance(CLAIM_AFTER_S)
    single = await harness.queue("other")
    assert not single.done()

    if end == "hangs up":
        await ended([gang])
    else:
        await harness.clock.advance(8 - CLAIM_AFTER_S)
        assert isinstance(gang.exception(), NoCapacity)
    await settle()

    assert single.done()
    assert claimant(harness) is None


async def test_a_higher_priority_of_its_own_tenant_ends_a_claim_and_the_age_begins_anew(make_harness):
    harness = await make_harness(max_sandboxes=1, slots_per_sandbox=2)
    busy = await harness.acquire("busy")
    gang = await harness.queue("gang", count=2)
    await harness.clock.advance(CLAIM_AFTER_S)
    assert claimant(harness) == ("gang", 2, 1)

    urgent = await harness.queue("gang", priority=1)

    assert urgent.done()
    assert claimant(harness) is None
    give_back(harness, urgent.result().leases)
    await harness.clock.advance(CLAIM_AFTER_S - 0.1)
    assert claimant(harness) is None
    await harness.clock.advance(0.1)
    assert claimant(harness) == ("gang", 2, 1)
    give_back(harness, busy.leases)
    await gang


async def test_nothing_is_held_for_whom_its_own_limits_do_not_admit_any_more(make_harness):
    limits = {"gang": 4}
    harness = await make_harness(max_sandboxes=1, slots_per_sandbox=4, max_leases=limits)
    busy = await harness.acquire("busy", count=2)
    own = await harness.acquire("gang")
    gang = await harness.queue("gang", count=2)
    await harness.clock.advance(CLAIM_AFTER_S)
    assert claimant(harness) == ("gang", 2, 1)

    limits["gang"] = 2
    single = await harness.queue("other")
    assert single.done()
    assert claimant(harness) is None
    give_back(harness, [*single.result().leases, *busy.leases])
    await settle()
    assert not gang.done(), "it was granted more leases than its tenant may have"

    give_back(harness, own.leases)
    assert len((await gang).leases) == 2


async def test_the_pool_grows_for_its_claimant_and_takes_no_sandbox_away(make_harness):
    harness = await make_harness(max_sandboxes=2, slots_per_sandbox=2, min_sandboxes=1, idle_timeout_s=1)
    busy = await harness.acquire("busy", ttl_s=1000)
    gang = await harness.queue("gang", count=4)
    await harness.clock.advance(30)
    assert claimant(harness) == ("gang", 4, 3)
    assert harness.sandboxes() == {"ready": 2}

    give_back(harness, busy.leases)

    assert len((await gang).leases) == 4


async def test_a_sandbox_that_dies_under_a_claim_is_made_again_for_it(make_harness):
    harness = await make_harness(max_sandboxes=2, slots_per_sandbox=2, min_sandboxes=2)
    (busy,) = (await harness.acquire("busy", ttl_s=1000)).leases
    gang = await harness.queue("gang", count=4)
    await harness.clock.advance(CLAIM_AFTER_S)
    assert claimant(harness) == ("gang", 4, 3)

    harness.backend.kill(next(name for name in harness.backend.agents if name != busy.sandbox_id))
    await settle()
    single = await harness.queue("other")
    await harness.clock.advance(10)
    assert (single.done(), claimant(harness)) == (False, ("gang", 4, 3))

    give_back(harness, [busy])
    await gang
    await ended([single])


async def test_nothing_is_held_for_more_slots_than_the_pool_can_have(make_harness):
    class Broken(FakeBackend):
        broken = False

        async def before_agent(self, sandbox_id):
            if self.broken:
                raise CreateFailed("no room")

    harness = await make_harness(Broken(), max_sandboxes=2, slots_per_sandbox=2, min_sandboxes=1)
    harness.backend.broken = True
    await harness.acquire("busy", ttl_s=1000)
    gang = await harness.queue("gang", count=3)
    await harness.clock.advance(CLAIM_AFTER_S + 1)

    assert claimant(harness) is None
    single = await harness.queue("other")
    assert single.done()

    harness.backend.broken = False
    await harness.clock.advance(40)
    give_back(harness, single.result().leases)
    assert len((await gang).leases) == 3


async def test_at_most_one_claimant_of_every_other_tenant_goes_first(make_harness):
    harness = await make_harness(max_sandboxes=1, slots_per_sandbox=2, acquire_timeout_s=600)
    held = await harness.acquire("busy", count=2)
    waiting = {}
    for tenant in ("a", "b", "c"):
        for number in range(2):
            waiting[tenant, number] = await harness.queue(tenant, count=2)
        await harness.clock.advance(1)
    order = []
    while waiting:
        await harness.clock.advance(CLAIM_AFTER_S)
        give_back(harness, held.leases)
        await settle()
        (name,) = [name for name, task in waiting.items() if task.done()]
        held = waiting.pop(name).result()
        order.append(name)

    assert order == [("a", 0), ("b", 0), ("c", 0), ("a", 1), ("b", 1), ("c", 1)]


async def test_the_end_of_one_claim_is_told_before_what_it_gave_and_the_next_claim_after(make_harness):
    harness = await make_harness(max_sandboxes=1, slots_per_sandbox=2)
    busy = await harness.acquire("busy", count=2)
    first, second = await harness.queue("a"), await harness.queue("b", count=2)
    await harness.clock.advance(CLAIM_AFTER_S)
    began = harness.pools.events.last_id
    give_back(harness, busy.leases)
    await first

    told = sorted((event for event in harness.pools.events._ring if event is not None and event.id > began), key=lambda event: event.id)
    said = [(event.kind, event.data.get("claimant")) for event in told if event.kind in ("pool.claimant", "lease.acquired")]
    tenants = [(kind, claimant and claimant["tenant"]) for kind, claimant in said]
    assert tenants == [("pool.claimant", None), ("lease.acquired", None), ("pool.claimant", "b")]
    await ended([second])
