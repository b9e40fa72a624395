"""What every backend promises on its own."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from dataclasses import asdict

import pytest

from sandbox_server.backends.base import BackendTraits, CreateContext, CreateFailed, ObservedState
from sandbox_server.core.types import Handle, PoolId
from sandbox_server.link import LinkLost
from tests.conformance.under_test import TIMEOUT_S, BackendUnderTest, create, endpoint_of, new_sandbox_id

STORM_COUNT = 50


async def test_each_checkpoint_names_the_sandbox_and_the_last_one_its_agent(under_test: BackendUnderTest) -> None:
    backend, sandbox_id = under_test.make_backend(), new_sandbox_id()

    handles = await create(backend, under_test.spec(), sandbox_id=sandbox_id)

    assert {(handle.backend, handle.pool, handle.owner, handle.sandbox_id) for handle in handles} == {(backend.name, PoolId("p").key, "first", sandbox_id)}
    assert [handle.address is not None for handle in handles] == [False] * (len(handles) - 1) + [True]
    link = await under_test.connect(endpoint_of(handles[-1], backend))
    assert link.hello["sandbox_id"] == sandbox_id
    await link.close()
    await backend.destroy(handles[-1])


async def test_a_checkpoint_can_be_stored_as_json(under_test: BackendUnderTest) -> None:
    backend = under_test.make_bare_backend()
    for handle in await create(backend, under_test.spec()):
        assert Handle(**json.loads(json.dumps(asdict(handle)))) == handle
    await backend.destroy(handle)


async def test_a_running_sandbox_is_observed_and_listed_until_it_is_destroyed(under_test: BackendUnderTest) -> None:
    backend = under_test.make_bare_backend()
    handle = (await create(backend, under_test.spec()))[-1]

    before, listed_before = await backend.observe([handle]), await backend.list_owned("first")
    await backend.destroy(handle)
    after, listed_after = await backend.observe([handle]), await backend.list_owned("first")

    assert before[handle.sandbox_id].state is ObservedState.RUNNING
    assert after[handle.sandbox_id].state is ObservedState.GONE
    assert ([one.sandbox_id for one in listed_before], list(listed_after)) == ([handle.sandbox_id], [])
    assert await under_test.leftovers() == []


async def test_to_destroy_it_again_does_nothing(under_test: BackendUnderTest) -> None:
    backend = under_test.make_bare_backend()
    handle = (await create(backend, under_test.spec()))[-1]
    await backend.destroy(handle)

    await backend.destroy(handle)
    await under_test.make_bare_backend().destroy(handle)

    assert await under_test.leftovers() == []


async def test_a_sandbox_is_destroyed_whole_from_every_checkpoint(under_test: BackendUnderTest) -> None:
    """The creation is given up after each checkpoint in turn. What it left is listed, and is gone once that checkpoint was destroyed."""
    backend, steps = under_test.make_bare_backend(), 0
    while True:
        steps += 1
        handles = await create(backend, under_test.spec(), steps=steps)

        assert [handle.sandbox_id for handle in await backend.list_owned("first")] == [handles[-1].sandbox_id], f"after {steps} checkpoints"
        await backend.destroy(handles[-1])

        assert await under_test.leftovers() == [], f"after {steps} checkpoints"
        if handles[-1].address is not None:
            break


async def test_a_creation_that_is_cancelled_can_be_destroyed(under_test: BackendUnderTest) -> None:
    """A pool is removed while its sandbox is in creation: the task is cancelled wherever it waits."""
    backend = under_test.make_bare_backend()
    handles: list[Handle] = []
    begun = asyncio.Event()

    async def create_until_cancelled() -> None:
        context = CreateContext(pool_id=PoolId("p"), spec=under_test.spec(), sandbox_id=new_sandbox_id())
        async with aclosing(backend.create(context)) as checkpoints:
            async for handle in checkpoints:
                handles.append(handle)
                begun.set()

    creating = asyncio.create_task(create_until_cancelled())
    async with asyncio.timeout(TIMEOUT_S):
        await begun.wait()
    creating.cancel()
    await asyncio.gather(creating, return_exceptions=True)
    await backend.destroy(handles[-1])

    assert await under_test.leftovers() == []
    assert await backend.list_owned("first") == []


async def test_a_sandbox_that_is_killed_from_outside_is_gone_and_can_be_destroyed(under_test: BackendUnderTest) -> None:
    backend = under_test.make_backend()
    killed, other = [(await create(backend, under_test.spec()))[-1] for _ in range(2)]
    link = await under_test.connect(endpoint_of(killed, backend))

    await under_test.kill(killed)

    async with asyncio.timeout(TIMEOUT_S):
        await link.closed
    observations = await backend.observe([killed, other])
    assert {sandbox_id: observation.state for sandbox_id, observation in observations.items()} == {
        killed.sandbox_id: ObservedState.GONE,
        other.sandbox_id: ObservedState.RUNNING,
    }
    assert observations[killed.sandbox_id].detail, "a backend says what became of a sandbox that is gone"
    with pytest.raises(LinkLost):
        await under_test.connect(endpoint_of(killed, backend), 1.0)
    await backend.destroy(killed)
    await backend.destroy(other)


async def test_observations_keep_to_the_traits(under_test: BackendUnderTest) -> None:
    backend = under_test.make_bare_backend()
    traits: BackendTraits = backend.traits
    handle = (await create(backend, under_test.spec()))[-1]
    running = (await backend.observe([handle]))[handle.sandbox_id]
    await under_test.kill(handle)
    gone = (await backend.observe([handle]))[handle.sandbox_id]

    assert min(traits.lost_after_s, traits.observe_interval_s, traits.creations_at_once, traits.creations_per_s) > 0
    assert set(running.evidence) | set(gone.evidence) <= traits.evidence
    json.dumps([dict(running.evidence), dict(gone.evidence)])
    assert (running.ends_at is not None) <= traits.ends_sandboxes
    await backend.destroy(handle)


async def test_no_question_has_no_answer(under_test: BackendUnderTest) -> None:
    assert dict(await under_test.make_bare_backend().observe([])) == {}


async def test_a_sandbox_that_never_was_does_not_run_and_is_destroyed_by_doing_nothing(under_test: BackendUnderTest) -> None:
    backend = under_test.make_bare_backend()
    handle = Handle(backend=backend.name, pool="p", owner="first", sandbox_id=new_sandbox_id())

    observations = await backend.observe([handle])
    await backend.destroy(handle)

    assert handle.sandbox_id not in observations or observations[handle.sandbox_id].state is not ObservedState.RUNNING
    assert await under_test.leftovers() == []


async def test_an_impossible_start_is_a_permanent_error_and_leaves_nothing(under_test: BackendUnderTest) -> None:
    backend = under_test.make_bare_backend()

    with pytest.raises(CreateFailed) as raised:
        await create(backend, under_test.impossible_spec())

    assert raised.value.permanent
    assert raised.value.detail
    assert await under_test.leftovers() == []


async def test_another_process_of_the_service_finds_what_the_first_one_created(under_test: BackendUnderTest) -> None:
    """Adoption: the first process ends, and the next one knows the sandbox by its record or by `list_owned`."""
    first = under_test.make_backend()
    handle = (await create(first, under_test.spec()))[-1]
    await first.close()

    second = under_test.make_backend()
    (found,) = await second.list_owned("first")
    link = await under_test.connect(endpoint_of(handle, second))

    assert found.sandbox_id == handle.sandbox_id
    assert link.hello["sandbox_id"] == handle.sandbox_id
    assert (await second.observe([handle]))[handle.sandbox_id].state is ObservedState.RUNNING
    await link.close()
    await second.destroy(found)


async def test_a_second_owner_beside_sees_and_harms_nothing_of_the_first(under_test: BackendUnderTest) -> None:
    first, second = under_test.make_bare_backend("first"), under_test.make_bare_backend("second")
    ours, theirs = (await create(first, under_test.spec()))[-1], (await create(second, under_test.spec()))[-1]

    listed = [[handle.sandbox_id for handle in await backend.list_owned(owner)] for backend, owner in ((first, "first"), (second, "second"))]
    await second.destroy(theirs)

    assert listed == [[ours.sandbox_id], [theirs.sandbox_id]]
    assert (await first.observe([ours]))[ours.sandbox_id].state is ObservedState.RUNNING
    assert await first.list_owned("second") == []
    await first.destroy(ours)


@pytest.mark.timeout(120)
async def test_fifty_sandboxes_are_created_and_destroyed_at_once(under_test: BackendUnderTest) -> None:
    backend = under_test.make_bare_backend()
    created = await asyncio.gather(*(create(backend, under_test.spec()) for _ in range(STORM_COUNT)))
    handles = [handles[-1] for handles in created]

    observations = await backend.observe(handles)
    listed = {handle.sandbox_id for handle in await backend.list_owned("first")}
    await asyncio.gather(*(backend.destroy(handle) for handle in handles))

    assert len({handle.address for handle in handles}) == len({handle.token for handle in handles}) == STORM_COUNT
    assert {observation.state for observation in observations.values()} == {ObservedState.RUNNING}
    assert listed == observations.keys() == {handle.sandbox_id for handle in handles}
    assert await under_test.leftovers() == []
