"""Leases: release, renewal, expiry, lists, and the location of their slots."""

from __future__ import annotations

import pytest

from sandbox_server.core.errors import LeaseLost, LeaseNotFound, NoCapacity


async def test_a_tenant_sees_and_touches_only_its_own(make_harness):
    harness = await make_harness()
    (lease,) = (await harness.acquire("a", run_id="r")).leases

    for forbidden in (harness.pools.lease, harness.pools.locate_slot):
        with pytest.raises(LeaseNotFound):
            forbidden("b", lease.lease_id)
    assert harness.pools.release("b", [lease.lease_id]) == ([], [lease.lease_id])
    assert harness.pools.release("b", run_id="r") == ([], [])
    assert harness.pools.leases("b") == ([], None)
    assert [error.code for error in harness.pools.renew("b", [lease.lease_id], 60)[1]] == ["lease_not_found"]
    assert harness.pools.lease("a", lease.lease_id) == lease


async def test_release_of_a_run_gives_back_all_of_it_and_nothing_else(make_harness):
    harness = await make_harness()
    mine = {lease.lease_id for lease in (await harness.acquire(count=2, run_id="r")).leases}
    other = (await harness.acquire(run_id="s")).leases[0]

    released, unknown = harness.pools.release("t", run_id="r")

    assert (set(released), unknown) == (mine, [])
    assert harness.pools.leases("t")[0] == [other]


async def test_an_ended_lease_counts_as_released_and_says_how_it_ended(make_harness):
    harness = await make_harness()
    (lease,) = (await harness.acquire()).leases
    harness.pools.release("t", [lease.lease_id])

    assert harness.pools.release("t", [lease.lease_id, "l-nope"]) == ([lease.lease_id], ["l-nope"])
    with pytest.raises(LeaseLost, match="released"):
        harness.pools.lease("t", lease.lease_id)
    await harness.clock.advance(3601)
    with pytest.raises(LeaseNotFound):
        harness.pools.lease("t", lease.lease_id)


async def test_a_lease_expires_unless_it_is_renewed(make_harness):
    harness = await make_harness()
    gone, stays = (await harness.acquire(count=2, ttl_s=10)).leases
    await harness.clock.advance(6)
    (renewed,), lost = harness.pools.renew("t", [stays.lease_id], 10)
    assert lost == []
    assert renewed.expires_at == stays.expires_at + 6

    await harness.clock.advance(5)

    with pytest.raises(LeaseLost, match="expired"):
        harness.pools.lease("t", gone.lease_id)
    assert harness.pools.lease("t", stays.lease_id) == renewed
    assert harness.slots() == {"leased": 1, "ready": 1}


async def test_renew_never_shortens(make_harness):
    harness = await make_harness()
    (lease,) = (await harness.acquire(ttl_s=300)).leases

    (renewed,), _ = harness.pools.renew("t", [lease.lease_id], 1)

    assert renewed.expires_at == lease.expires_at


async def test_a_running_call_holds_the_lease_and_sixty_seconds_beyond(make_harness):
    harness = await make_harness()
    (lease,) = (await harness.acquire(ttl_s=10)).leases
    harness.pools.record_call_start(lease.lease_id)
    await harness.clock.advance(500)
    assert harness.pools.lease("t", lease.lease_id)
    harness.pools.record_call_end(lease.lease_id)
    await harness.clock.advance(59)
    assert harness.pools.lease("t", lease.lease_id)

    await harness.clock.advance(1.5)

    with pytest.raises(LeaseLost):
        harness.pools.lease("t", lease.lease_id)


@pytest.mark.parametrize("jump_s", [1_000_000, -1_000_000])
async def test_a_jump_of_the_wall_clock_moves_no_deadline(make_harness, jump_s):
    harness = await make_harness(max_sandboxes=1, min_sandboxes=0, idle_timeout_s=40)
    (lease, other) = (await harness.acquire(ttl_s=100, count=2)).leases
    waiting = await harness.queue(wait_s=30)
    harness.clock.jump_wall(jump_s)
    harness.pools.renew("t", [other.lease_id], 200)
    await harness.clock.advance(29)
    assert not waiting.done()
    await harness.clock.advance(2)
    with pytest.raises(NoCapacity):
        await waiting
    await harness.clock.advance(68)
    assert harness.pools.lease("t", lease.lease_id)
    await harness.clock.advance(2)
    with pytest.raises(LeaseLost, match="expired"):
        harness.pools.lease("t", lease.lease_id)
    assert harness.pools.lease("t", other.lease_id).expires_at == pytest.approx(harness.clock.wall() + 99)

    await harness.clock.advance(100)
    assert harness.sandboxes() == {"ready": 1}
    await harness.clock.advance(45)

    assert harness.sandboxes() == {}, "idle_timeout_s and max_lifetime_s are no matter of the wall clock either"


async def test_leases_are_listed_in_pages(make_harness):
    harness = await make_harness()
    gang = (await harness.acquire(count=4, run_id="r", trajectory_ids=("a", "b", "b", "b"))).leases

    first, cursor = harness.pools.leases("t", "r", None, 3, None)
    second, end = harness.pools.leases("t", "r", None, 3, cursor)

    assert {lease.lease_id for lease in first + second} == {lease.lease_id for lease in gang}
    assert (len(first), len(second), end) == (3, 1, None)
    assert len(harness.pools.leases("t", None, "b")[0]) == 3


async def test_a_route_names_link_slot_and_epoch(make_harness):
    harness = await make_harness()
    (lease,) = (await harness.acquire()).leases

    location = harness.pools.locate_slot("t", lease.lease_id)

    assert (location.lease, location.slot_id, location.epoch, location.spec) == (lease, lease.slot_id, 1, harness.pool.spec)
    assert location.agent.link.hello["sandbox_id"] == lease.sandbox_id
