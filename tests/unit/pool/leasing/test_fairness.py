"""The order in which waiting acquires are served."""

from __future__ import annotations

import asyncio

import pytest

from sandbox_server.core.errors import LeaseLost, NoCapacity
from sandbox_server.pool.leasing.heaps import MAX_STALE_ENTRIES
from sandbox_server.testing import settle


def give_back(harness, leases):
    for lease in leases:
        harness.pools.release(lease.tenant, [lease.lease_id])


async def test_within_a_tenant_priority_then_arrival(make_harness):
    harness = await make_harness(max_sandboxes=1, slots_per_sandbox=1)
    held = (await harness.acquire()).leases
    waiting = {name: await harness.queue(priority=priority, run_id=name) for name, priority in (("late", 0), ("later", 0), ("urgent", 5))}
    order = []
    while waiting:
        give_back(harness, held)
        await harness.clock.advance(0)
        (name,) = [name for name, task in waiting.items() if task.done()]
        held = (await waiting.pop(name)).leases
        order.append(name)

    assert order == ["urgent", "late", "later"]


async def test_between_tenants_the_least_leased_per_weight(make_harness):
    harness = await make_harness(max_sandboxes=1, slots_per_sandbox=6, weights={"big": 2.0})
    held = list((await harness.acquire("x", count=6)).leases)
    waiting = [(tenant, await harness.queue(tenant)) for tenant in ("big", "small") for _ in range(6)]
    give_back(harness, held)
    await harness.clock.advance(0)

    served = [tenant for tenant, task in waiting if task.done()]
    assert (served.count("big"), served.count("small")) == (4, 2)
    for _, task in waiting:
        task.cancel()


async def test_a_waiting_gang_reserves_and_its_tenant_does_not_overtake(make_harness):
    harness = await make_harness(max_sandboxes=1, slots_per_sandbox=4)
    held = (await harness.acquire(count=3)).leases
    gang = await harness.queue(count=4)
    single = await harness.queue()
    assert not single.done()

    give_back(harness, held)
    leases = (await gang).leases

    assert not single.done()
    give_back(harness, leases)
    assert len((await single).leases) == 1


async def test_another_tenant_is_served_beside_a_waiting_gang_up_to_its_share(make_harness):
    harness = await make_harness(max_sandboxes=1, slots_per_sandbox=4)
    await harness.acquire("a")
    gang = await harness.queue("a", count=4)

    first = await harness.queue("b")
    second = await harness.queue("b")
    third = await harness.queue("b")

    assert (first.done(), second.done(), third.done(), gang.done()) == (True, True, False, False)
    for task in (gang, third):
        task.cancel()


async def test_who_has_nothing_gets_one_slot_beside_a_waiting_gang_however_small_its_share(make_harness):
    harness = await make_harness(max_sandboxes=1, slots_per_sandbox=10, weights={"heavy": 10.0})
    held = (await harness.acquire("b")).leases
    gang = await harness.queue("heavy", count=10)
    single, second = await harness.queue("c"), await harness.queue("c")

    assert [len((await single).leases), second.done(), gang.done()] == [1, False, False]
    second.cancel()
    give_back(harness, held)
    give_back(harness, single.result().leases)
    assert len((await gang).leases) == 10


async def test_what_has_ended_is_not_kept_in_mind_for_its_ttl_or_its_wait(make_harness):
    harness = await make_harness(max_sandboxes=1, slots_per_sandbox=2, acquire_timeout_s=86_400)
    (held,) = (await harness.acquire(ttl_s=500)).leases
    harness.pool.book.record_call_start(held.lease_id)
    labels, ended = {"a": "b"}, []
    for _ in range(3 * MAX_STALE_ENTRIES):
        (lease,) = (await harness.acquire(ttl_s=86_400, labels=labels)).leases
        ended.append(lease.lease_id)
        harness.pools.release(lease.tenant, [lease.lease_id])
        await settle(10)

    book = harness.pool.book
    assert len(book.lease_index._expiries) <= MAX_STALE_ENTRIES + 4
    assert len(book.queue._deadlines) <= MAX_STALE_ENTRIES + 4
    assert all(not book.ended_leases.get(lease_id).labels for lease_id in ended)
    book.record_call_end(held.lease_id)
    await harness.clock.advance(501)
    with pytest.raises(LeaseLost):
        harness.pools.lease("t", held.lease_id)


async def test_thousands_may_wait_and_leave(make_harness):
    harness = await make_harness(max_sandboxes=1, slots_per_sandbox=1)
    await harness.acquire(ttl_s=1000)
    waiting = [asyncio.create_task(harness.acquire(f"t{n % 3}", wait_s=5)) for n in range(3000)]
    await harness.clock.advance(4)
    assert harness.pools.view("default").queue == 3000

    await harness.clock.advance(2)

    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {NoCapacity}
    assert harness.pools.view("default").queue == 0
