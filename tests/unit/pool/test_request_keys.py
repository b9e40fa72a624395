"""Acquires with a request key, answers to acquires that could not be delivered, and the release of a key."""

from __future__ import annotations

import asyncio

import pytest

from sandbox_server.core.errors import CallConflict, LeaseLost, NoCapacity
from sandbox_server.pool.leasing.request_keys import MAX_RELEASED_KEYS_PER_TENANT, REQUEST_KEY_REMEMBERED_S, ReleasedKeys
from sandbox_server.testing import settle


async def test_what_could_not_be_delivered_is_released_and_kept_with_a_key(make_harness):
    harness = await make_harness()
    plain = await harness.acquire()
    keyed = await harness.acquire(request_key="k")

    harness.pools.release_undelivered_leases(plain, None)
    harness.pools.release_undelivered_leases(keyed, "k")
    await settle()

    assert harness.slots() == {"leased": 1, "ready": 1}
    assert (await harness.acquire(request_key="k")).leases == keyed.leases


async def test_a_request_key_joins_conflicts_and_is_per_tenant(make_harness):
    harness = await make_harness(max_sandboxes=1)
    held = (await harness.acquire(count=2)).leases
    one = await harness.queue(request_key="k")
    two = await harness.queue(request_key="k")
    with pytest.raises(CallConflict):
        await harness.acquire(request_key="k", ttl_s=5)
    other = await harness.queue("u", request_key="k", ttl_s=5)

    harness.pools.release("t", [lease.lease_id for lease in held])

    assert (await one).leases == (await two).leases
    assert (await other).leases[0].tenant == "u"


async def test_a_joined_attempt_lives_until_its_last_caller_has_gone(make_harness):
    harness = await make_harness(max_sandboxes=1)
    held = (await harness.acquire(count=2)).leases
    one = await harness.queue(request_key="k")
    two = await harness.queue(request_key="k")
    one.cancel()
    await settle()
    assert harness.pools.view("default").queue == 1
    two.cancel()
    await settle()
    assert harness.pools.view("default").queue == 0

    harness.pools.release("t", [lease.lease_id for lease in held])
    assert len((await harness.acquire(request_key="k")).leases) == 1


async def test_a_failed_attempt_is_not_remembered_and_an_ended_one_is_gone(make_harness):
    harness = await make_harness(max_sandboxes=1)
    held = (await harness.acquire(count=2)).leases
    with pytest.raises(NoCapacity):
        await harness.acquire(request_key="k", wait_s=0)
    harness.pools.release("t", [lease.lease_id for lease in held])
    await settle()
    keyed = await harness.acquire(request_key="k", wait_s=0)
    harness.pools.release("t", [keyed.leases[0].lease_id])

    with pytest.raises(LeaseLost):
        await harness.acquire(request_key="k", wait_s=0)
    await harness.clock.advance(3601)
    assert (await harness.acquire(request_key="k", wait_s=0)).leases != keyed.leases


def held_count(harness) -> int:
    return len(harness.pools.leases("t")[0])


async def test_the_release_of_a_key_ends_what_was_granted_under_it(make_harness):
    harness = await make_harness()
    leases = (await harness.acquire(count=2, request_key="k")).leases
    (other,) = (await harness.acquire("u", request_key="k")).leases
    lease_ids = [lease.lease_id for lease in leases]

    assert harness.pools.release("t", request_key="k") == (lease_ids, [])
    assert harness.pools.release("t", request_key="k") == (lease_ids, [])
    assert held_count(harness) == 0
    assert harness.pools.lease("u", other.lease_id).lease_id == other.lease_id
    with pytest.raises(LeaseLost):
        await harness.acquire(count=2, request_key="k")


async def test_a_key_that_is_released_before_its_acquire_arrives_refuses_it_for_an_hour(make_harness):
    harness = await make_harness()
    assert harness.pools.release("t", request_key="k") == ([], [])

    with pytest.raises(LeaseLost, match="'k' was released, so nothing is leased under it: acquire with another request_key"):
        await harness.acquire(request_key="k")
    assert held_count(harness) == 0
    assert len((await harness.acquire("u", request_key="k")).leases) == 1
    await harness.clock.advance(REQUEST_KEY_REMEMBERED_S)
    assert len((await harness.acquire(request_key="k")).leases) == 1


async def test_the_release_of_a_key_ends_the_acquire_that_waits_or_is_just_arriving(make_harness):
    harness = await make_harness(max_sandboxes=1)
    held = await harness.acquire()
    waiting, joined = await harness.queue(count=2, request_key="w"), await harness.queue(count=2, request_key="w")
    arriving = asyncio.create_task(harness.acquire(request_key="a"))

    harness.pools.release("t", request_key="w")
    harness.pools.release("t", request_key="a")
    for refused in (waiting, joined, arriving):
        with pytest.raises(LeaseLost, match="was released"):
            await refused
    assert (held_count(harness), harness.pools.view("default").queue) == (1, 0)
    harness.pools.release("t", [held.leases[0].lease_id])
    await settle()
    assert harness.slots() == {"ready": 2}


@pytest.mark.parametrize("rights", [{}, {"cache": "rw"}])
@pytest.mark.parametrize("disconnects", [False, True])
async def test_the_release_of_a_key_ends_the_acquire_at_every_moment_of_its_grant(make_harness, rights, disconnects):
    harness = await make_harness(max_sandboxes=1)
    harness.store.flush_turns = 3
    ends = set()
    for turns in range(20):
        key = f"k-{turns}"
        acquiring = asyncio.create_task(harness.acquire(count=2, request_key=key, run_id="r", **rights))
        for _ in range(turns):
            await asyncio.sleep(0)
        if disconnects:
            acquiring.cancel()
            await asyncio.sleep(0)
        harness.pools.release("t", request_key=key)
        assert held_count(harness) == 0
        await asyncio.wait((acquiring,))
        ends.add("cancelled" if acquiring.cancelled() else type(acquiring.exception()).__name__)
        await settle()
        assert (held_count(harness), harness.slots()) == (0, {"ready": 2})
        assert harness.store.keys.keys() == harness.pools._keys._granted.keys()
    assert ends == {"cancelled" if disconnects else "LeaseLost", "NoneType"}


async def test_a_released_key_refuses_after_a_restart_if_it_was_granted(make_service):
    service = await make_service()
    await service.acquire(request_key="k")
    service.pools.release("t", request_key="k")

    await service.restart()

    with pytest.raises(LeaseLost):
        await service.acquire(request_key="k")


def test_released_keys_are_remembered_for_an_hour_and_in_a_limited_number_for_each_tenant():
    keys = ReleasedKeys()
    keys.add_key(("u", "k"), 0.0)
    for number in range(MAX_RELEASED_KEYS_PER_TENANT):
        keys.add_key(("t", f"k-{number}"), 1.0)
    keys.add_key(("t", "k-0"), 2.0)
    keys.add_key(("t", "new"), 3.0)

    assert [keys.holds(("t", key), 3.0) for key in ("k-0", "k-1", "k-2", "new", "other")] == [True, False, True, True, False]
    assert keys.holds(("u", "k"), 3599.0)
    assert not keys.holds(("u", "k"), 3600.0)
    keys.add_key(("t", "last"), 3602.0)
    assert [keys.holds(("t", key), 3602.0) for key in ("k-0", "new", "last")] == [False, True, True]
