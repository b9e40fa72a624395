"""Entries of the workspace that `narrow` makes read-only: what is recorded of them, and what of a failure."""

from __future__ import annotations

import pytest

from sandbox_server.core.errors import (
    BackendUnavailable,
    InvalidRequest,
    NotImplementedHere,
    StorageUnavailable,
)
from sandbox_server.testing import FakeAgent, FakeBackend, settle


async def test_entries_become_read_only_are_recorded_and_only_added_to(make_harness):
    harness = await make_harness()
    (lease,) = (await harness.acquire()).leases

    first = await harness.pools.narrow("t", lease.lease_id, read_only=("tests", "a"))
    second = await harness.pools.narrow("t", lease.lease_id, read_only=("b", "tests"))
    third = await harness.pools.narrow("t", lease.lease_id, allow_network=False)

    (agent,) = harness.backend.agents.values()
    assert [narrowed.read_only for narrowed in (lease, first, second, third)] == [(), ("tests", "a"), ("tests", "a", "b"), ("tests", "a", "b")]
    assert harness.pools.lease("t", lease.lease_id) == third == harness.store.leases[lease.lease_id]
    assert [request["read_only"] for request in agent.find_requests("narrow")] == [["tests", "a"], ["tests", "a", "b"], ["tests", "a", "b"]]
    assert await harness.pools.narrow("t", lease.lease_id, read_only=("a",)) == third
    assert len(agent.find_requests("narrow")) == 3, "what is read-only already is not asked for again"
    with pytest.raises(InvalidRequest, match="at most 64 read-only entries, and these would be 65"):
        await harness.pools.narrow("t", lease.lease_id, read_only=[str(number) for number in range(62)])


async def test_read_only_entries_are_those_of_the_lease_alone_and_survive_a_restart(make_service):
    service = await make_service(max_sandboxes=1, slots_per_sandbox=1)
    (lease,) = await service.acquire()
    await service.pools.narrow("t", lease.lease_id, read_only=("tests",))

    await service.restart()

    assert service.pools.lease("t", lease.lease_id).read_only == ("tests",)
    assert (await service.pools.narrow("t", lease.lease_id, read_only=("b",))).read_only == ("tests", "b")
    service.pools.release("t", [lease.lease_id])
    await settle()
    assert [held.read_only for held in await service.acquire()] == [()]


async def test_a_service_killed_before_its_record_claims_nothing_and_may_ask_again(make_service):
    service = await make_service()
    (lease,) = await service.acquire()
    (agent,) = service.backend.agents.values()
    service.store.failure = StorageUnavailable("the disk is full")
    with pytest.raises(StorageUnavailable):
        await service.pools.narrow("t", lease.lease_id, read_only=("tests",))

    await service.crash(lossy=True)
    service.store.failure = None
    await service.start()

    assert agent.slots[lease.slot_id].read_only == ["tests"]
    assert service.pools.lease("t", lease.lease_id).read_only == ()
    assert (await service.pools.narrow("t", lease.lease_id, read_only=("tests",))).read_only == ("tests",)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ({"code": "file_not_found", "detail": "there is no entry 'tests'"}, InvalidRequest),
        ({"code": "file_error", "detail": "the entry 'tests' is a symbolic link"}, InvalidRequest),
        ({"code": "internal", "detail": "'tests' failed"}, BackendUnavailable),
        ({}, BackendUnavailable),
    ],
)
async def test_what_was_not_made_read_only_is_not_recorded(make_harness, answer, error):
    class Refusing(FakeAgent):
        def narrow(self, slot, meta):
            return answer

    class Backend(FakeBackend):
        def make_agent(self, pool, spec, sandbox_id):
            return Refusing(sandbox_id)

    harness = await make_harness(Backend())
    (lease,) = (await harness.acquire()).leases

    with pytest.raises(error) as refused:
        await harness.pools.narrow("t", lease.lease_id, read_only=("tests",))
    assert str(answer.get("detail", "did not confirm")) in str(refused.value)
    assert harness.pools.lease("t", lease.lease_id) == lease == harness.store.leases[lease.lease_id]


async def test_an_agent_without_read_only_entries_is_not_asked_for_them(make_harness):
    class Without(FakeAgent):
        def __init__(self, sandbox_id):
            super().__init__(sandbox_id)
            self.can_make_read_only = False

    class Backend(FakeBackend):
        def make_agent(self, pool, spec, sandbox_id):
            return Without(sandbox_id)

    harness = await make_harness(Backend())
    (lease,) = (await harness.acquire()).leases

    with pytest.raises(NotImplementedHere, match="cannot make entries of its workspace read-only") as refused:
        await harness.pools.narrow("t", lease.lease_id, allow_network=False, read_only=("tests",))
    (agent,) = harness.backend.agents.values()
    assert refused.value.extra == {"field": "read_only"}
    assert agent.find_requests("narrow") == []
    assert harness.pools.lease("t", lease.lease_id).allow_network
