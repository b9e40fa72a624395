"""What a service restores from the records of an earlier one: request keys, runs, ended leases and pools; and what it records."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sandbox_server.core.errors import LeaseLost, LeaseNotFound, StorageUnavailable
from sandbox_server.testing import settle
from tests.unit.pool.restartable_service import SPEC


async def test_a_key_is_on_record_when_its_answer_leaves(make_service):
    service = await make_service()
    (keyed,) = await service.acquire(request_key="k")

    await service.restart(lossy=True)

    assert (await service.acquire(request_key="k"))[0].lease_id == keyed.lease_id
    assert service.slots() == {"leased": 1, "ready": 1}


async def test_what_nobody_took_is_not_kept_under_its_key(make_service):
    service = await make_service()
    service.store.failure = StorageUnavailable("the disk is full")
    with pytest.raises(StorageUnavailable):
        await service.acquire(request_key="k")
    service.store.failure = None

    await service.restart()

    assert service.store.disk.keys == {}
    (lease,) = await service.acquire(request_key="k")
    assert service.pools.lease("t", lease.lease_id).state == "held"


async def test_a_run_a_key_and_the_memory_of_what_ended_come_back(make_service):
    service = await make_service()
    (keyed,) = await service.acquire(request_key="k", run_id="r")
    (ended,) = await service.acquire()
    service.pools.release("t", [ended.lease_id])

    await service.restart()

    assert await service.acquire(request_key="k", run_id="r") == (keyed,)
    with pytest.raises(LeaseLost, match="released"):
        service.pools.lease("t", ended.lease_id)
    assert service.pools.release("t", None, "r") == ([keyed.lease_id], [])
    await service.clock.advance(3601)
    with pytest.raises(LeaseNotFound):
        service.pools.lease("t", ended.lease_id)


async def test_pools_made_over_the_api_come_back_and_deleted_ones_go_on_going(make_service):
    service = await make_service()
    await service.pools.put_pool("mine", SPEC)
    await service.pools.put_pool("going", SPEC)
    (kept,) = await service.acquire("mine")
    (ending,) = await service.acquire("going")
    await service.pools.delete_pool("going")

    await service.restart()

    assert [(view.name, view.origin) for view in service.pools.views()] == [("default", "file"), ("going", "api"), ("mine", "api")]
    assert service.pools.lease("t", kept.lease_id)
    assert service.pools.lease("t", ending.lease_id)
    assert [(view.state, (view.last_error or "")[:20]) for view in service.pools.views()] == [
        ("ready", ""),
        ("draining", "the pool was deleted"),
        ("ready", ""),
    ]
    service.pools.release("t", [ending.lease_id])
    await service.clock.advance(1)
    assert [view.name for view in service.pools.views()] == ["default", "mine"]
    await service.restart()
    assert [view.name for view in service.pools.views()] == ["default", "mine"]


async def test_what_the_settings_file_says_now_is_what_counts(make_service):
    service = await make_service()
    (lease,) = await service.acquire()
    service.specs = {"default": replace(service.specs["default"], env_vars={"A": "b"}), "new": SPEC}

    await service.restart()

    assert service.pools.lease("t", lease.lease_id)
    assert service.pools.view("default").sandboxes["draining"] == 1
    (fresh,) = await service.acquire()
    assert fresh.sandbox_id != lease.sandbox_id


async def test_a_pool_that_is_in_no_settings_file_any_more_ends_its_leases_in_peace(make_service):
    service = await make_service()
    (lease,) = await service.acquire()
    service.specs = {"other": SPEC}

    await service.restart()

    assert service.pools.lease("t", lease.lease_id)
    assert service.pools.view("default").state == "draining"
    assert service.pools.view("default").last_error.startswith("no settings file has the pool any more: it is gone when its lease has ended")
    service.pools.release("t", [lease.lease_id])
    await service.clock.advance(1)
    assert [view.name for view in service.pools.views()] == ["other"]
    assert len(service.backend.handles) == 1


async def test_a_slot_is_on_record_in_its_next_epoch_before_its_agent_hears_of_it(make_service):
    service = await make_service()
    (lease,) = await service.acquire()
    agent = service.backend.agents[lease.sandbox_id]
    seen = []
    reset = agent.reset
    agent.reset = lambda slot, meta: seen.append(service.store.disk.slots[lease.slot].epoch) or reset(slot, meta)

    service.pools.release("t", [lease.lease_id])
    await settle()

    assert seen == [2]


async def test_a_disk_that_is_full_stops_new_leases_and_no_held_one(make_service):
    service = await make_service()
    (lease,) = await service.acquire()
    service.store.failure = StorageUnavailable("the disk is full")

    with pytest.raises(StorageUnavailable):
        await service.acquire()
    with pytest.raises(StorageUnavailable):
        await service.acquire(cache="rw")
    await settle()

    assert service.pools.lease("t", lease.lease_id) == lease
    assert service.slots() == {"leased": 1, "ready": 1}
    service.store.failure = None
    assert await service.acquire()
