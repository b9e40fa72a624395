"""Pools that are made, changed and deleted while the service runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sandbox_server.core.errors import (
    Draining,
    InvalidRequest,
    LeaseLost,
    NoCapacity,
    PoolConflict,
    PoolNotFound,
    QuotaExceeded,
    SandboxLost,
    StorageUnavailable,
)
from sandbox_server.core.types import AcquireRequest, PoolSpec
from sandbox_server.testing import FakeBackend, settle

SPEC = PoolSpec(slots_per_sandbox=2, min_sandboxes=1, max_sandboxes=2)


async def put(harness, spec=SPEC, name="mine"):
    view, made = await harness.pools.put_pool(name, spec)
    await settle()
    return view, made


async def acquire(harness, **fields):
    (lease, *_) = (await harness.pools.acquire(AcquireRequest(tenant="t", pool="mine", **fields))).leases
    return lease


def kinds(harness, after):
    ring = [event for event in harness.pools.events._ring if event is not None and event.id > after]
    return [event.kind for event in sorted(ring, key=lambda event: event.id)]


async def test_a_pool_is_made_and_the_same_again_changes_nothing(make_harness):
    harness = await make_harness()
    began = harness.pools.events.last_id
    view, made = await put(harness)
    assert (view.name, view.origin, view.spec, made) == ("mine", "api", SPEC, True)
    lease = await acquire(harness)

    assert (await put(harness))[1] is False

    assert harness.pools.lease("t", lease.lease_id)
    assert len(harness.backend.created) == 2
    assert kinds(harness, began).count("pool.changed") == 0
    assert kinds(harness, began).count("pool.created") == 1


async def test_counts_and_timeouts_change_in_place(make_harness):
    harness = await make_harness()
    await put(harness)
    before = set(harness.backend.agents)

    view, made = await put(harness, replace(SPEC, min_sandboxes=2, idle_timeout_s=5, acquire_timeout_s=7, max_sandboxes=3))

    assert (made, view.spec.acquire_timeout_s) == (False, 7)
    assert before < set(harness.backend.agents)
    assert harness.pools.view("mine").sandboxes["ready"] == 2
    assert harness.backend.destroyed == []


async def test_anything_else_drains_the_old_sandboxes_and_makes_new_ones_beside(make_harness):
    harness = await make_harness(min_sandboxes=0)
    await put(harness)
    old = await acquire(harness)

    await put(harness, replace(SPEC, env_vars={"A": "b"}))

    assert harness.pools.lease("t", old.lease_id), "the old lease goes on"
    assert {state: n for state, n in harness.pools.view("mine").sandboxes.items() if n} == {"draining": 1, "ready": 1}
    new = await acquire(harness)
    assert new.sandbox_id != old.sandbox_id
    harness.pools.release("t", [old.lease_id])
    await harness.clock.advance(1)
    assert old.sandbox_id in harness.backend.destroyed


async def test_old_and_new_sandboxes_together_never_pass_the_maximum(make_harness):
    backend = FakeBackend()
    harness = await make_harness(backend, min_sandboxes=0)
    await put(harness, replace(SPEC, max_sandboxes=1))
    old = await acquire(harness)
    await put(harness, replace(SPEC, max_sandboxes=1, slot_processes=9))
    await harness.clock.advance(5)
    assert backend.most_at_once == 1
    view, crowded = harness.pools.view("mine"), "1 draining sandbox counts towards its max_sandboxes of 1 until its last lease has ended"
    assert (view.slots["ready"], view.slots["leased"], view.last_error) == (0, 1, crowded)
    with pytest.raises(NoCapacity, match=f"no slot free: {crowded}: release leases there, raise its max_sandboxes, or ask again"):
        await acquire(harness, wait_s=0)

    harness.pools.release("t", [old.lease_id])
    await harness.clock.advance(1)

    assert backend.most_at_once == 1
    assert (await acquire(harness)).sandbox_id != old.sandbox_id


async def test_a_smaller_maximum_drains_what_is_too_many(make_harness):
    harness = await make_harness(min_sandboxes=0)
    await put(harness, replace(SPEC, min_sandboxes=2))
    lease = await acquire(harness)

    await put(harness, replace(SPEC, min_sandboxes=1, max_sandboxes=1))
    await harness.clock.advance(1)

    assert harness.pools.view("mine").sandboxes["ready"] == 1
    assert harness.pools.lease("t", lease.lease_id)


async def test_who_waits_for_more_than_the_new_spec_can_hold_hears_it(make_harness):
    harness = await make_harness(min_sandboxes=0)
    await put(harness)
    await acquire(harness)
    waiting = await harness.queue_at("mine", count=4)

    await put(harness, replace(SPEC, max_sandboxes=1))

    with pytest.raises(InvalidRequest, match="no longer hold"):
        await waiting


async def test_pools_of_the_settings_file_and_backends_do_not_change(make_harness):
    harness = await make_harness()
    await put(harness)

    with pytest.raises(PoolConflict, match="settings file"):
        await put(harness, name="default")
    with pytest.raises(PoolConflict, match="settings file"):
        await harness.pools.delete_pool("default")
    with pytest.raises(PoolConflict, match="backend"):
        await put(harness, replace(SPEC, backend="nomad"))
    with pytest.raises(InvalidRequest, match="'nomad'"):
        await put(harness, replace(SPEC, backend="nomad"), name="other")
    with pytest.raises(PoolNotFound):
        await harness.pools.delete_pool("nope")


async def test_a_deleted_pool_drains_and_then_is_gone(make_harness):
    harness = await make_harness()
    await put(harness)
    lease = await acquire(harness)
    waiting = await harness.queue_at("mine", count=4)

    await harness.pools.delete_pool("mine")
    await settle()

    with pytest.raises(Draining):
        await waiting
    with pytest.raises(Draining):
        await acquire(harness)
    with pytest.raises(PoolConflict, match="being deleted"):
        await put(harness)
    assert harness.pools.lease("t", lease.lease_id)
    harness.pools.release("t", [lease.lease_id])
    await harness.clock.advance(1)
    with pytest.raises(PoolNotFound):
        harness.pools.view("mine")
    with pytest.raises(LeaseLost, match="released"):
        harness.pools.lease("t", lease.lease_id)
    assert harness.store.pools == {}
    assert len(harness.backend.handles) == 1
    assert (await put(harness))[1] is True


async def test_a_pool_that_drains_says_why_and_when_it_is_gone(make_harness):
    harness = await make_harness()
    await put(harness)
    (lease, other) = (await harness.pools.acquire(AcquireRequest(tenant="t", pool="mine", count=2, ttl_s=50))).leases
    assert (harness.pools.view("mine").state, harness.pools.view("mine").last_error) == ("ready", None)
    began = harness.pools.events.last_id

    await harness.pools.delete_pool("mine")
    await harness.pools.delete_pool("mine")

    assert kinds(harness, began).count("pool.draining") == 1
    view = harness.pools.view("mine")
    assert view.state == "draining"
    assert view.last_error == "the pool was deleted: it is gone when its 2 leases have ended, in 50 s unless they are renewed or used"
    harness.pools.release("t", [other.lease_id])
    assert harness.pools.view("mine").last_error == "the pool was deleted: it is gone when its lease has ended, in 50 s unless it is renewed or used"
    harness.pools.record_call_start(lease.lease_id)
    assert harness.pools.view("mine").last_error == "the pool was deleted: it is gone when its lease has ended"
    harness.pools.release("t", [lease.lease_id])
    assert harness.pools.view("mine").last_error == "the pool was deleted: it is gone as soon as its sandboxes are"
    with pytest.raises(Draining, match="pool 'mine' gives no new leases: the pool was deleted"):
        await acquire(harness)


async def test_force_ends_the_leases_of_a_deleted_pool(make_harness):
    harness = await make_harness()
    await put(harness)
    lease = await acquire(harness)

    await harness.pools.delete_pool("mine", force=True)
    await harness.clock.advance(1)

    with pytest.raises(SandboxLost, match="deleted"):
        harness.pools.lease("t", lease.lease_id)
    assert await harness.pools.wait_for_reconnect_or_loss(lease.lease_id, 1)
    with pytest.raises(PoolNotFound):
        harness.pools.view("mine")


async def test_a_pool_nobody_uses_goes_by_itself(make_harness):
    harness = await make_harness()
    await put(harness, replace(SPEC, delete_after_idle_s=30))
    lease = await acquire(harness, ttl_s=60)
    await harness.clock.advance(59)
    harness.pools.release("t", [lease.lease_id])
    await harness.clock.advance(20)
    await put(harness, replace(SPEC, delete_after_idle_s=30))
    await harness.clock.advance(29)
    assert harness.pools.view("mine")

    await harness.clock.advance(4)

    with pytest.raises(PoolNotFound):
        harness.pools.view("mine")


async def test_there_are_only_so_many_pools(make_harness):
    harness = await make_harness(max_pools=2)
    await put(harness)

    with pytest.raises(QuotaExceeded, match=r"limits\.pools"):
        await put(harness, name="other")


async def test_what_cannot_be_recorded_is_not_changed(make_harness):
    harness = await make_harness()
    await put(harness)
    harness.store.fail = StorageUnavailable("the disk is full")

    with pytest.raises(StorageUnavailable):
        await put(harness, replace(SPEC, max_sandboxes=9))
    with pytest.raises(StorageUnavailable):
        await put(harness, name="other")
    with pytest.raises(StorageUnavailable):
        await harness.pools.delete_pool("mine")

    harness.store.fail = None
    assert harness.pools.view("mine").spec == SPEC
    assert [view.name for view in harness.pools.views()] == ["default", "mine"]
    assert {name: (record.spec, record.closing) for name, record in harness.store.pools.items()} == {"mine": (SPEC, False)}


async def test_a_tenant_has_only_so_many_leases(make_harness):
    harness = await make_harness(max_leases={"t": 2})
    await put(harness)
    held = await acquire(harness)
    await harness.acquire()
    with pytest.raises(QuotaExceeded, match="max_leases is 2"):
        await acquire(harness)
    assert (await harness.acquire("u")).leases
    with pytest.raises(InvalidRequest, match="count is 3, and this tenant's max_leases is 2"):
        await acquire(harness, count=3)

    harness.pools.release("t", [held.lease_id])

    assert await acquire(harness)


async def test_so_many_acquires_of_a_tenant_wait_over_all_pools_and_no_more(make_harness):
    harness = await make_harness(max_sandboxes=1, max_waiters={"t": 2})
    await put(harness, replace(SPEC, max_sandboxes=1))
    here = (await harness.acquire(count=2)).leases
    await acquire(harness, count=2)
    first, second = await harness.queue(count=2), await harness.queue_at("mine")

    with pytest.raises(QuotaExceeded, match="2 acquires of this tenant wait already, and its max_waiters is 2") as refused:
        await harness.acquire()
    with pytest.raises(NoCapacity):
        await harness.acquire(wait_s=0)
    other = await harness.queue("u")

    assert refused.value.extra == {"limit": "max_waiters", "retry_after_s": 5}
    assert harness.pools.view("default").queue == 2, "one of each tenant"
    other.cancel()
    harness.pools.release("t", [lease.lease_id for lease in here])
    assert len((await first).leases) == 2
    third = await harness.queue()
    assert not third.done()
    for task in (second, third):
        task.cancel()


async def test_a_tenant_that_may_not_wait_is_served_where_it_need_not(make_harness):
    harness = await make_harness(max_sandboxes=1, max_waiters={"t": 1})
    await put(harness)
    await harness.acquire(count=2)
    waiting = await harness.queue()

    assert await acquire(harness)
    with pytest.raises(QuotaExceeded):
        await acquire(harness, count=4)
    await settle()

    assert harness.pools.view("mine").sandboxes["ready"] == 1, "what may not wait makes no pool grow"
    waiting.cancel()


async def test_what_a_tenant_waits_for_counts_towards_its_leases(make_harness):
    harness = await make_harness(max_sandboxes=1, max_leases={"t": 3})
    await harness.acquire(count=2)
    waiting = await harness.queue()

    with pytest.raises(QuotaExceeded):
        await harness.acquire()

    waiting.cancel()
