"""Leases: release, renewal, expiry, lists, and the location of their slots."""

from __future__ import annotations

import pytest

from sandbox_server.core.errors import LeaseLost, LeaseNotFound, NoCapacity


async def test_a_tenant_sees_and_touches_only_its_own(make_world):
    world = await make_world()
    (lease,) = (await world.acquire("a", run_id="r")).leases

    for forbidden in (world.pools.lease, world.pools.locate_slot):
        with pytest.raises(LeaseNotFound):
            forbidden("b", lease.lease_id)
    assert world.pools.release("b", [lease.lease_id]) == ([], [lease.lease_id])
    assert world.pools.release("b", run_id="r") == ([], [])
    assert world.pools.leases("b") == ([], None)
    assert [error.code for error in world.pools.renew("b", [lease.lease_id], 60)[1]] == ["lease_not_found"]
    assert world.pools.lease("a", lease.lease_id) == lease


async def test_release_of_a_run_gives_back_all_of_it_and_nothing_else(make_world):
    world = await make_world()
    mine = {lease.lease_id for lease in (await world.acquire(count=2, run_id="r")).leases}
    other = (await world.acquire(run_id="s")).leases[0]

    released, unknown = world.pools.release("t", run_id="r")

    assert (set(released), unknown) == (mine, [])
    assert world.pools.leases("t")[0] == [other]


async def test_an_ended_lease_counts_as_released_and_says_how_it_ended(make_world):
    world = await make_world()
    (lease,) = (await world.acquire()).leases
    world.pools.release("t", [lease.lease_id])

    assert world.pools.release("t", [lease.lease_id, "l-nope"]) == ([lease.lease_id], ["l-nope"])
    with pytest.raises(LeaseLost, match="released"):
        world.pools.lease("t", lease.lease_id)
    await world.clock.advance(3601)
    with pytest.raises(LeaseNotFound):
        world.pools.lease("t", lease.lease_id)


async def test_a_lease_expires_unless_it_is_renewed(make_world):
    world = await make_world()
    gone, stays = (await world.acquire(count=2, ttl_s=10)).leases
    await world.clock.advance(6)
    (renewed,), lost = world.pools.renew("t", [stays.lease_id], 10)
    assert lost == []
    assert renewed.expires_at == stays.expires_at + 6

    await world.clock.advance(5)

    with pytest.raises(LeaseLost, match="expired"):
        world.pools.lease("t", gone.lease_id)
    assert world.pools.lease("t", stays.lease_id) == renewed
    assert world.slots() == {"leased": 1, "ready": 1}


async def test_renew_never_shortens(make_world):
    world = await make_world()
    (lease,) = (await world.acquire(ttl_s=300)).leases

    (renewed,), _ = world.pools.renew("t", [lease.lease_id], 1)

    assert renewed.expires_at == lease.expires_at


async def test_a_running_call_holds_the_lease_and_sixty_seconds_beyond(make_world):
    world = await make_world()
    (lease,) = (await world.acquire(ttl_s=10)).leases
    world.pools.record_call_start(lease.lease_id)
    await world.clock.advance(500)
    assert world.pools.lease("t", lease.lease_id)
    world.pools.record_call_end(lease.lease_id)
    await world.clock.advance(59)
    assert world.pools.lease("t", lease.lease_id)

    await world.clock.advance(1.5)

    with pytest.raises(LeaseLost):
        world.pools.lease("t", lease.lease_id)


@pytest.mark.parametrize("jump_s", [1_000_000, -1_000_000])
async def test_a_jump_of_the_wall_clock_moves_no_deadline(make_world, jump_s):
    world = await make_world(max_sandboxes=1, min_sandboxes=0, idle_timeout_s=40)
    (lease, other) = (await world.acquire(ttl_s=100, count=2)).leases
    waiting = await world.queue(wait_s=30)
    world.clock.jump_wall(jump_s)
    world.pools.renew("t", [other.lease_id], 200)
    await world.clock.advance(29)
    assert not waiting.done()
    await world.clock.advance(2)
    with pytest.raises(NoCapacity):
        await waiting
    await world.clock.advance(68)
    assert world.pools.lease("t", lease.lease_id)
    await world.clock.advance(2)
    with pytest.raises(LeaseLost, match="expired"):
        world.pools.lease("t", lease.lease_id)
    assert world.pools.lease("t", other.lease_id).expires_at == pytest.approx(world.clock.wall() + 99)

    await world.clock.advance(100)
    assert world.sandboxes() == {"ready": 1}
    await world.clock.advance(45)

    assert world.sandboxes() == {}, "idle_timeout_s and max_lifetime_s are no matter of the wall clock either"


async def test_leases_are_listed_in_pages(make_world):
    world = await make_world()
    gang = (await world.acquire(count=4, run_id="r", trajectory_ids=("a", "b", "b", "b"))).leases

    first, cursor = world.pools.leases("t", "r", None, 3, None)
    second, end = world.pools.leases("t", "r", None, 3, cursor)

    assert {lease.lease_id for lease in first + second} == {lease.lease_id for lease in gang}
    assert (len(first), len(second), end) == (3, 1, None)
    assert len(world.pools.leases("t", None, "b")[0]) == 3


async def test_a_route_names_link_slot_and_epoch(make_world):
    world = await make_world()
    (lease,) = (await world.acquire()).leases

    location = world.pools.locate_slot("t", lease.lease_id)

    assert (location.lease, location.slot_id, location.epoch, location.spec) == (lease, lease.slot_id, 1, world.pool.spec)
    assert location.agent.link.hello["sandbox_id"] == lease.sandbox_id
