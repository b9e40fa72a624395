"""What the pools make of a backend: nothing is lost that runs, nothing is left that ended, and a failing control plane harms neither."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import pytest

from sandbox_server.core.errors import BackendUnavailable, Draining, SandboxLost
from sandbox_server.core.types import Handle, PoolSpec
from tests.conformance.under_test import BackendUnderTest, create, wait_until
from tests.conformance.world import World, one_slot

MakeWorld = Callable[..., Awaitable[World]]
AWAY_S = 60


@pytest.fixture
async def make_world(under_test: BackendUnderTest) -> AsyncIterator[MakeWorld]:
    """Makes a world and starts its pools: `await make_world(spec)`. They are stopped, and their sandboxes destroyed, at the end of the test."""
    worlds: list[World] = []

    async def make(spec: PoolSpec) -> World:
        world = World(under_test, spec)
        worlds.append(world)
        await world.start()
        return world

    yield make
    for world in worlds:
        await world.stop()


async def handle_of(world: World, sandbox_id: str) -> Handle:
    (handle,) = [handle for handle in await world.under_test.make_backend().list_owned("first") if handle.sandbox_id == sandbox_id]
    return handle


async def test_a_slot_is_leased_reset_and_leased_again(under_test: BackendUnderTest, make_world: MakeWorld) -> None:
    world = await make_world(one_slot(under_test))

    first = await world.acquire()
    second = await world.replace_lease(first)

    assert (second.slot, second.epoch) == (first.slot, first.epoch + 1)
    assert world.backend.created == [second.slot.sandbox_id]


async def test_acquires_fail_at_once_where_no_sandbox_can_ever_start(under_test: BackendUnderTest, make_world: MakeWorld) -> None:
    world = await make_world(replace(under_test.impossible_spec(), min_sandboxes=0))

    with pytest.raises(BackendUnavailable):
        await world.acquire()

    assert await under_test.leftovers() == []


async def test_a_rate_limit_is_waited_out(under_test: BackendUnderTest, make_world: MakeWorld) -> None:
    world = await make_world(one_slot(under_test))
    world.backend.rate_limited_count = 2

    lease = await world.acquire()

    assert world.backend.rate_limited_count == 0
    assert world.backend.created[-1] == lease.slot.sandbox_id
    assert world.sandbox_counts() == {"ready": 1}


async def test_a_sandbox_that_is_killed_from_outside_is_lost_and_replaced(under_test: BackendUnderTest, make_world: MakeWorld) -> None:
    world = await make_world(one_slot(under_test))
    lease = await world.acquire()

    await under_test.kill(await handle_of(world, lease.slot.sandbox_id))
    next_lease = await world.acquire()

    with pytest.raises(SandboxLost):
        world.pools.lease("t", lease.lease_id)
    assert next_lease.slot.sandbox_id != lease.slot.sandbox_id
    await wait_until(lambda: world.sandbox_counts() == {"ready": 1})


async def test_the_next_service_adopts_what_a_killed_one_left(under_test: BackendUnderTest, make_world: MakeWorld) -> None:
    world = await make_world(one_slot(under_test))
    lease = await world.acquire()
    await world.pools.flush()

    await world.crash()
    await world.start()

    await wait_until(lambda: world.sandbox_counts() == {"ready": 1})
    assert world.pools.lease("t", lease.lease_id).slot == lease.slot
    assert (await world.replace_lease(lease)).slot == lease.slot
    assert world.backend.created == []


async def test_what_a_service_created_and_never_recorded_is_destroyed_by_the_next_and_its_neighbours_is_not(
    under_test: BackendUnderTest, make_world: MakeWorld
) -> None:
    orphan = (await create(under_test.make_bare_backend("first"), under_test.spec()))[-1]
    neighbours = (await create(under_test.make_bare_backend("second"), under_test.spec()))[-1]

    await make_world(one_slot(under_test))

    backend = under_test.make_backend("second")
    assert await under_test.make_backend("first").list_owned("first") == []
    assert [handle.sandbox_id for handle in await backend.list_owned("second")] == [neighbours.sandbox_id]
    assert (await backend.observe([neighbours]))[neighbours.sandbox_id].state == "running"
    assert (await backend.observe([orphan]))[orphan.sandbox_id].state != "running"
    await backend.destroy(neighbours)


async def test_a_control_plane_that_is_away_for_a_minute_ends_nothing_that_answers(under_test: BackendUnderTest, make_world: MakeWorld) -> None:
    world = await make_world(one_slot(under_test))
    lease = await world.acquire()

    world.backend.is_away = True
    await world.clock.skip(AWAY_S)
    next_lease = await world.replace_lease(lease)

    assert next_lease.slot == lease.slot
    assert world.sandbox_counts() == {"ready": 1}


async def test_a_minute_without_control_plane_and_network_loses_no_lease(under_test: BackendUnderTest, make_world: MakeWorld) -> None:
    """Both together: the agent cannot be reached, and nobody can say whether the sandbox still runs."""
    world = await make_world(one_slot(under_test))
    lease = await world.acquire()
    asked_before = world.backend.observe_count

    world.backend.is_away = True
    await world.cut_network()
    await world.wait_for_unreachable()
    await world.clock.skip(AWAY_S)

    assert world.pools.lease("t", lease.lease_id).slot == lease.slot
    assert 1 <= world.backend.observe_count - asked_before <= AWAY_S, "it is asked again and again, and not all the time"
    world.backend.is_away = world.is_network_down = False
    assert (await world.replace_lease(lease)).slot == lease.slot
    assert world.backend.created == [lease.slot.sandbox_id]


async def test_a_sandbox_that_runs_and_cannot_be_reached_is_lost_in_time(under_test: BackendUnderTest, make_world: MakeWorld) -> None:
    """The other side of it: once the control plane says that the sandbox runs, its silence is not waited for longer than the traits say."""
    world = await make_world(one_slot(under_test))
    lease = await world.acquire()

    await world.cut_network()
    await world.wait_for_unreachable()
    await world.clock.skip(round(world.backend.traits.lost_after_s) + 1)

    def is_lost() -> bool:
        try:
            world.pools.lease("t", lease.lease_id)
        except SandboxLost:
            return True
        return False

    await wait_until(is_lost)


async def test_a_sandbox_that_is_to_go_while_the_control_plane_is_away_goes_later(under_test: BackendUnderTest, make_world: MakeWorld) -> None:
    world = await make_world(one_slot(under_test))
    lease = await world.acquire()
    await world.pools.drain_sandbox(lease.slot.sandbox_id)

    world.backend.is_away = True
    world.pools.release("t", [lease.lease_id])
    await world.clock.skip(AWAY_S)
    assert await under_test.leftovers() != []
    world.backend.is_away = False

    remaining = await under_test.make_backend().list_owned("first")
    while remaining:
        await world.clock.skip(1)
        remaining = await under_test.make_backend().list_owned("first")
    assert await under_test.leftovers() == []


async def test_a_stop_in_the_middle_of_a_creation_leaves_nothing(under_test: BackendUnderTest, make_world: MakeWorld) -> None:
    world = await make_world(one_slot(under_test))
    world.backend.holds_creations = True
    acquiring = asyncio.create_task(world.acquire())
    await wait_until(lambda: world.backend.held)

    await world.pools.stop("destroy")

    with pytest.raises(Draining):
        await acquiring
    assert await under_test.leftovers() == []
