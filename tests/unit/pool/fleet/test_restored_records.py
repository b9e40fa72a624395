"""What a service restores from the records of an earlier one: request keys, runs, ended leases and pools; and what it records."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sandbox_server.core.errors import LeaseLost, LeaseNotFound, StorageUnavailable
from sandbox_server.testing import settle
from tests.unit.pool.lives import SPEC


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
