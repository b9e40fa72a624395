"""Acquires with a request key, and answers to acquires that could not be delivered."""

from __future__ import annotations

import pytest

from sandbox_server.core.errors import CallConflict, LeaseLost, NoCapacity
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
