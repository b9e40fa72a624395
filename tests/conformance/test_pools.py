"""What the pools make of a backend: nothing is lost that runs, nothing is left that ended, and a failing control plane harms neither."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import replace

import pytest

from sandbox_server.core.errors import BackendUnavailable, Draining, SandboxLost
from sandbox_server.core.types import Handle, Lease, PoolSpec
from tests.conformance.pools_harness import PoolsHarness, one_slot
from tests.conformance.under_test import BackendUnderTest, create, wait_until

MakeHarness = Callable[..., Awaitable[PoolsHarness]]
Scenario = Callable[[BackendUnderTest, MakeHarness], Coroutine[None, None, None]]
AWAY_S = 60


@contextlib.asynccontextmanager
async def harnesses_on(under_test: BackendUnderTest) -> AsyncIterator[MakeHarness]:
    """Makes a harness and starts its pools: `await make_harness(spec)`. They are stopped, and their sandboxes destroyed, at the end."""
    harnesses: list[PoolsHarness] = []

    async def make(spec: PoolSpec) -> PoolsHarness:
        harness = PoolsHarness(under_test, spec)
        harnesses.append(harness)
        await harness.start()
        return harness

    try:
        yield make
    finally:
        for harness in harnesses:
            await harness.stop()


async def _run_on(name: str, under_test: BackendUnderTest, scenario: Scenario) -> None:
    try:
        async with harnesses_on(under_test) as make_harness:
            await scenario(under_test, make_harness)
    except BaseException as error:
        error.add_note(f"on the backend {name}")
        raise


def on_all_backends(scenario: Scenario) -> Callable[[dict[str, BackendUnderTest]], Awaitable[None]]:
    """Make a test of a scenario. It runs on all backends at the same time, because on each of them it mostly waits."""

    async def test(all_under_test: dict[str, BackendUnderTest]) -> None:
        async with asyncio.TaskGroup() as group:
            for name, under_test in all_under_test.items():
                group.create_task(_run_on(name, under_test, scenario))

    test.__name__, test.__doc__ = scenario.__name__, scenario.__doc__
    return test


async def handle_of(harness: PoolsHarness, sandbox_id: str) -> Handle:
    (handle,) = [handle for handle in await harness.under_test.make_backend().list_owned("first") if handle.sandbox_id == sandbox_id]
    return handle


@on_all_backends
async def test_a_sandbox_keeps_its_slot_through_interruptions_until_it_is_lost(under_test: BackendUnderTest, make_harness: MakeHarness) -> None:
    """One sandbox for all interruptions, because its start takes more processor time than all of them."""
    harness = await make_harness(one_slot(under_test))
    lease = await _wait_out_a_rate_limit(harness)
    created = list(harness.backend.created)

    lease = await _lease_again(harness, lease)
    lease = await _be_without_control_plane(harness, lease)
    lease = await _be_without_control_plane_and_network(harness, lease)
    assert harness.backend.created == created, "the sandbox has been replaced"
    await _be_lost(harness, lease)


async def _wait_out_a_rate_limit(harness: PoolsHarness) -> Lease:
    harness.backend.rate_limited_count = 2

    lease = await harness.acquire()

    assert harness.backend.rate_limited_count == 0
    assert harness.backend.created[-1] == lease.slot.sandbox_id
    assert harness.sandbox_counts() == {"ready": 1}
    return lease


async def _lease_again(harness: PoolsHarness, lease: Lease) -> Lease:
    """The slot is reset between two leases."""
    next_lease = await harness.replace_lease(lease)

    assert (next_lease.slot, next_lease.epoch) == (lease.slot, lease.epoch + 1)
    return next_lease


async def _be_without_control_plane(harness: PoolsHarness, lease: Lease) -> Lease:
    """A control plane that is away for a minute ends nothing that answers."""
    harness.backend.is_away = True
    await harness.clock.skip(AWAY_S)
    next_lease = await harness.replace_lease(lease)

    assert next_lease.slot == lease.slot
    assert harness.sandbox_counts() == {"ready": 1}
    harness.backend.is_away = False
    return next_lease


async def _be_without_control_plane_and_network(harness: PoolsHarness, lease: Lease) -> Lease:
    """A minute without both loses no lease: the agent cannot be reached, and nobody can say whether the sandbox still runs."""
    asked_before = harness.backend.observe_count

    harness.backend.is_away = True
    await harness.cut_network()
    await harness.wait_for_unreachable()
    await harness.clock.skip(AWAY_S)

    assert harness.pools.lease("t", lease.lease_id).slot == lease.slot
    assert 1 <= harness.backend.observe_count - asked_before <= AWAY_S, "it is asked again and again, and not all the time"
    harness.backend.is_away = harness.is_network_down = False
    next_lease = await harness.replace_lease(lease)
    assert next_lease.slot == lease.slot
    return next_lease


async def _be_lost(harness: PoolsHarness, lease: Lease) -> None:
    """A sandbox that runs and cannot be reached is lost once its silence lasts longer than the traits say."""
    await harness.cut_network()
    await harness.wait_for_unreachable()
    await harness.clock.skip(round(harness.backend.traits.lost_after_s) + 1)

    def is_lost() -> bool:
        try:
            harness.pools.lease("t", lease.lease_id)
        except SandboxLost:
            return True
        return False

    await wait_until(is_lost)


@on_all_backends
async def test_acquires_fail_at_once_where_no_sandbox_can_ever_start(under_test: BackendUnderTest, make_harness: MakeHarness) -> None:
    harness = await make_harness(replace(under_test.impossible_spec(), min_sandboxes=0))

    with pytest.raises(BackendUnavailable):
        await harness.acquire()

    assert await under_test.leftovers() == []


@on_all_backends
async def test_a_sandbox_that_is_killed_from_outside_is_lost_and_replaced(under_test: BackendUnderTest, make_harness: MakeHarness) -> None:
    harness = await make_harness(one_slot(under_test))
    lease = await harness.acquire()

    await under_test.kill(await handle_of(harness, lease.slot.sandbox_id))
    next_lease = await harness.acquire()

    with pytest.raises(SandboxLost):
        harness.pools.lease("t", lease.lease_id)
    assert next_lease.slot.sandbox_id != lease.slot.sandbox_id
    await wait_until(lambda: harness.sandbox_counts() == {"ready": 1})


@on_all_backends
async def test_the_next_service_adopts_what_a_killed_one_left(under_test: BackendUnderTest, make_harness: MakeHarness) -> None:
    harness = await make_harness(one_slot(under_test))
    lease = await harness.acquire()
    await harness.pools.flush()

    await harness.crash()
    await harness.start()

    await wait_until(lambda: harness.sandbox_counts() == {"ready": 1})
    assert harness.pools.lease("t", lease.lease_id).slot == lease.slot
    assert (await harness.replace_lease(lease)).slot == lease.slot
    assert harness.backend.created == []


@on_all_backends
async def test_what_a_service_created_and_never_recorded_is_destroyed_by_the_next_and_its_neighbours_is_not(
    under_test: BackendUnderTest, make_harness: MakeHarness
) -> None:
    orphan = (await create(under_test.make_bare_backend("first"), under_test.spec()))[-1]
    neighbours = (await create(under_test.make_bare_backend("second"), under_test.spec()))[-1]

    await make_harness(one_slot(under_test))

    backend = under_test.make_backend("second")
    assert await under_test.make_backend("first").list_owned("first") == []
    assert [handle.sandbox_id for handle in await backend.list_owned("second")] == [neighbours.sandbox_id]
    assert (await backend.observe([neighbours]))[neighbours.sandbox_id].state == "running"
    assert (await backend.observe([orphan]))[orphan.sandbox_id].state != "running"
    await backend.destroy(neighbours)


@on_all_backends
async def test_a_sandbox_that_is_to_go_while_the_control_plane_is_away_goes_later(under_test: BackendUnderTest, make_harness: MakeHarness) -> None:
    harness = await make_harness(one_slot(under_test))
    lease = await harness.acquire()
    await harness.pools.drain_sandbox(lease.slot.sandbox_id)

    harness.backend.is_away = True
    harness.pools.release("t", [lease.lease_id])
    await harness.clock.skip(AWAY_S)
    assert await under_test.leftovers() != []
    harness.backend.is_away = False

    remaining = await under_test.make_backend().list_owned("first")
    while remaining:
        await harness.clock.skip(1)
        remaining = await under_test.make_backend().list_owned("first")
    assert await under_test.leftovers() == []


@on_all_backends
async def test_a_stop_in_the_middle_of_a_creation_leaves_nothing(under_test: BackendUnderTest, make_harness: MakeHarness) -> None:
    harness = await make_harness(one_slot(under_test))
    harness.backend.holds_creations = True
    acquiring = asyncio.create_task(harness.acquire())
    await wait_until(lambda: harness.backend.held)

    await harness.pools.stop("destroy")

    with pytest.raises(Draining):
        await acquiring
    assert await under_test.leftovers() == []
