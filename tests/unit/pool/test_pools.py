"""Acquire, release, renew, routes: what the api and the dispatch ask of the pools."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from sandbox_server.core.errors import (
    BackendUnavailable,
    CallConflict,
    Draining,
    InvalidRequest,
    LeaseLost,
    LeaseNotFound,
    NoCapacity,
    NotImplementedHere,
    PoolNotFound,
    SandboxLost,
)
from sandbox_server.core.execution import Fault, ToolCall
from sandbox_server.core.types import AcquireRequest
from sandbox_server.dispatch.results import lease_error_result
from sandbox_server.link.agent_reports import read_slots_update
from sandbox_server.pool.leasing.no_capacity import none_free
from sandbox_server.testing import FakeAgent, FakeBackend, settle


async def test_acquire_of_a_ready_slot_asks_the_agent_nothing(make_world):
    world = await make_world(min_sandboxes=1)
    (agent,) = world.backend.agents.values()
    asked = len(agent.requests)

    acquired = await world.acquire(trajectory_ids=("t-1",), run_id="r-1", labels={"a": "b"})

    (lease,) = acquired.leases
    assert (lease.epoch, lease.pool, lease.tenant, lease.trajectory_id, lease.run_id) == (1, "default", "t", "t-1", "r-1")
    assert (lease.workspace, lease.isolation, lease.allow_network, lease.labels) == ("/workspace", "bwrap", True, {"a": "b"})
    assert lease.expires_at == world.clock.wall() + 300
    assert acquired.waited_s == 0
    assert len(agent.requests) == asked
    assert world.slots() == {"leased": 1, "ready": 1}


async def test_release_resets_with_the_next_epoch_before_the_next_lease(make_world):
    world = await make_world(max_sandboxes=1, slots_per_sandbox=1)
    (first,) = (await world.acquire()).leases

    assert world.pools.release("t", [first.lease_id]) == ([first.lease_id], [])
    assert world.slots() == {"resetting": 1}
    (second,) = (await world.acquire()).leases

    (agent,) = world.backend.agents.values()
    assert {"op": "reset", "slot": "0", "epoch": 2, "network": True, "keep": False} in agent.requests
    assert (second.slot, second.epoch) == (first.slot, 2)
    assert second.lease_id != first.lease_id


async def test_a_gang_is_all_or_nothing_and_makes_the_pool_grow(make_world):
    world = await make_world(min_sandboxes=1, slots_per_sandbox=2, max_sandboxes=2)

    gang = (await world.acquire(count=4, trajectory_ids=("a", "b", "c", "d"))).leases

    assert len({lease.slot for lease in gang}) == 4
    assert [lease.trajectory_id for lease in gang] == ["a", "b", "c", "d"]
    assert world.sandboxes() == {"ready": 2}


async def test_more_than_the_pool_can_ever_hold_is_refused_at_once(make_world):
    world = await make_world()

    with pytest.raises(InvalidRequest, match="never hold more than 4"):
        await world.acquire(count=5)


async def test_an_unknown_pool_is_named(make_world):
    world = await make_world()

    with pytest.raises(PoolNotFound, match="'nope'"):
        await world.pools.acquire(AcquireRequest(tenant="t", pool="nope"))


async def test_no_capacity_says_where_in_the_queue_and_for_how_long(make_world):
    world = await make_world(max_sandboxes=1)
    await world.acquire(count=2)
    first = await world.queue(wait_s=5)
    second = await world.queue(wait_s=4)

    await world.clock.advance(4)

    with pytest.raises(NoCapacity) as caught:
        await second
    assert caught.value.extra["queue_position"] == 2
    assert caught.value.extra["waited_s"] == pytest.approx(4)
    assert not first.done()
    first.cancel()


async def test_wait_s_zero_answers_at_once_and_still_makes_the_pool_grow(make_world):
    world = await make_world(min_sandboxes=0, max_sandboxes=1)

    with pytest.raises(NoCapacity):
        await world.acquire(wait_s=0)
    await settle()

    assert len((await world.acquire(wait_s=0)).leases) == 1


async def test_who_asks_again_and_again_without_waiting_makes_the_pool_grow_once_and_not_for_good(make_world):
    class Slow(FakeBackend):
        gate = asyncio.Event()

        async def before_agent(self, sandbox_id):
            await self.gate.wait()

    Slow.gate = asyncio.Event()
    world = await make_world(Slow(), min_sandboxes=0, max_sandboxes=5, idle_timeout_s=20)
    for _ in range(20):
        with pytest.raises(NoCapacity, match="pool 'default' has no slot free: a sandbox is being made, ask again in a moment"):
            await world.acquire(wait_s=0)
        await world.clock.advance(0.1)
    assert world.sandboxes() == {"starting": 1}

    Slow.gate.set()
    await world.clock.advance(19)
    assert world.sandboxes() == {"ready": 1}
    await world.clock.advance(2)

    assert world.sandboxes() == {}


@pytest.mark.parametrize(
    ("count", "waited_s", "making", "last_error", "said"),
    [
        (1, 0.000279, 0, None, "pool 'p' has no slot free: release leases, raise its max_sandboxes, or ask again"),
        (1, 4.0004, 0, "no disk", "pool 'p' had no slot free within 4 s (its last error: no disk): release leases, raise its max_sandboxes, or ask again"),
        (8, 59.9996, 2, None, "pool 'p' had no 8 slots free at once within 60 s: 2 sandboxes are being made, ask again in a moment"),
        (8, 0.5, 1, None, "pool 'p' had no 8 slots free at once within 0.5 s: a sandbox is being made, ask again in a moment"),
    ],
)
def test_who_waited_in_vain_hears_it_in_words_for_people(count, waited_s, making, last_error, said):
    assert none_free("p", count, waited_s, making=making, last_error=last_error) == said


async def test_the_place_in_the_queue_counts_the_own_tenants_and_as_many_of_each_other(make_world):
    world = await make_world(max_sandboxes=1)
    await world.acquire("x", count=2)
    early = [await world.queue(tenant, wait_s=50) for tenant in ("a", "a", "b", "b", "b", "b")]
    late = [await world.queue("a", wait_s=1), await world.queue("a", wait_s=1, priority=5), await world.queue("b", wait_s=1)]

    await world.clock.advance(1)

    refused = await asyncio.gather(*late, return_exceptions=True)
    assert [error.extra["queue_position"] for error in refused] == [4 + 3, 1, 5 + 4]
    for task in early:
        task.cancel()


async def test_wait_s_is_bounded_by_the_pools_own(make_world):
    world = await make_world(max_sandboxes=1, acquire_timeout_s=3)
    await world.acquire(count=2)
    late = await world.queue(wait_s=500)

    await world.clock.advance(3)

    with pytest.raises(NoCapacity):
        await late


async def test_a_cancelled_acquire_leaves_the_queue(make_world):
    world = await make_world(max_sandboxes=1)
    held = (await world.acquire(count=2)).leases
    gone = await world.queue()
    stays = await world.queue()

    gone.cancel()
    await settle()
    world.pools.release("t", [held[0].lease_id])

    assert len((await stays).leases) == 1
    assert world.pools.view("default").queue == 0


async def test_an_acquire_cancelled_after_its_grant_gives_the_slots_back(make_world):
    world = await make_world(max_sandboxes=1)
    held = (await world.acquire(count=2)).leases
    waiting = await world.queue(count=2)
    world.pools.release("t", [lease.lease_id for lease in held])
    while not world.pool.book.held:
        await asyncio.sleep(0)
    waiting.cancel()
    await settle()

    assert world.slots() == {"ready": 2}


async def test_what_could_not_be_delivered_is_released_and_kept_with_a_key(make_world):
    world = await make_world()
    plain = await world.acquire()
    keyed = await world.acquire(request_key="k")

    world.pools.release_undelivered_leases(plain, None)
    world.pools.release_undelivered_leases(keyed, "k")
    await settle()

    assert world.slots() == {"leased": 1, "ready": 1}
    assert (await world.acquire(request_key="k")).leases == keyed.leases


async def test_a_request_key_joins_conflicts_and_is_per_tenant(make_world):
    world = await make_world(max_sandboxes=1)
    held = (await world.acquire(count=2)).leases
    one = await world.queue(request_key="k")
    two = await world.queue(request_key="k")
    with pytest.raises(CallConflict):
        await world.acquire(request_key="k", ttl_s=5)
    other = await world.queue("u", request_key="k", ttl_s=5)

    world.pools.release("t", [lease.lease_id for lease in held])

    assert (await one).leases == (await two).leases
    assert (await other).leases[0].tenant == "u"


async def test_a_joined_attempt_lives_until_its_last_caller_has_gone(make_world):
    world = await make_world(max_sandboxes=1)
    held = (await world.acquire(count=2)).leases
    one = await world.queue(request_key="k")
    two = await world.queue(request_key="k")
    one.cancel()
    await settle()
    assert world.pools.view("default").queue == 1
    two.cancel()
    await settle()
    assert world.pools.view("default").queue == 0

    world.pools.release("t", [lease.lease_id for lease in held])
    assert len((await world.acquire(request_key="k")).leases) == 1


async def test_a_failed_attempt_is_not_remembered_and_an_ended_one_is_gone(make_world):
    world = await make_world(max_sandboxes=1)
    held = (await world.acquire(count=2)).leases
    with pytest.raises(NoCapacity):
        await world.acquire(request_key="k", wait_s=0)
    world.pools.release("t", [lease.lease_id for lease in held])
    await settle()
    keyed = await world.acquire(request_key="k", wait_s=0)
    world.pools.release("t", [keyed.leases[0].lease_id])

    with pytest.raises(LeaseLost):
        await world.acquire(request_key="k", wait_s=0)
    await world.clock.advance(3601)
    assert (await world.acquire(request_key="k", wait_s=0)).leases != keyed.leases


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
    world.pools.call_started(lease.lease_id)
    await world.clock.advance(500)
    assert world.pools.lease("t", lease.lease_id)
    world.pools.call_ended(lease.lease_id)
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


async def test_a_slot_is_narrowed_before_its_grant_counts(make_world):
    world = await make_world()

    (lease,) = (await world.acquire(allow_network=False)).leases

    (agent,) = world.backend.agents.values()
    assert lease.allow_network is False
    assert {"op": "narrow", "slot": lease.slot_id, "epoch": 1, "network": False, "cache": None} in agent.requests


async def test_what_cannot_be_narrowed_is_refused_and_given_back(make_world):
    class Wide(FakeAgent):
        def answer(self, meta):
            return {"code": "not_implemented", "detail": "not here"} if meta["op"] == "narrow" else super().answer(meta)

    class Backend(FakeBackend):
        def make_agent(self, pool, spec, sandbox_id):
            return Wide(sandbox_id)

    world = await make_world(Backend(), max_sandboxes=1)
    with pytest.raises(NotImplementedHere, match="not here"):
        await world.acquire(allow_network=False)
    await settle()

    assert world.slots() == {"ready": 2}


async def test_a_narrowing_that_failed_for_the_moment_is_tried_with_another_slot(make_world):
    class Backend(FakeBackend):
        failures = 1

        def make_agent(self, pool, spec, sandbox_id):
            backend = self

            class Flaky(FakeAgent):
                def answer(self, meta):
                    if meta["op"] == "narrow" and backend.failures:
                        backend.failures -= 1
                        return {"code": "internal", "detail": "once"}
                    return super().answer(meta)

            return Flaky(sandbox_id)

    world = await make_world(Backend(), max_sandboxes=1)

    (lease,) = (await world.acquire(allow_network=False)).leases
    await settle()

    assert lease.allow_network is False
    assert world.slots() == {"leased": 1, "ready": 1}


async def test_a_lease_may_not_widen_the_pools_network(make_world):
    world = await make_world(allow_network=False)

    with pytest.raises(InvalidRequest):
        await world.acquire(allow_network=True)
    assert (await world.acquire()).leases[0].allow_network is False


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


async def test_a_dead_sandbox_ends_its_leases_says_so_and_is_replaced(make_world):
    world = await make_world(max_sandboxes=1)
    (lease,) = (await world.acquire()).leases
    link = world.pools.locate_slot("t", lease.lease_id).agent.link

    world.backend.kill(lease.sandbox_id)
    await asyncio.wait([link.closed])

    assert isinstance(await world.pools.wait_for_reconnect_or_loss(lease.lease_id, 5), SandboxLost)
    await settle()
    with pytest.raises(SandboxLost, match=lease.sandbox_id):
        world.pools.locate_slot("t", lease.lease_id)
    assert world.pools.release("t", [lease.lease_id]) == ([lease.lease_id], [])
    await world.clock.advance(1)
    assert world.slots() == {"ready": 2}
    assert world.backend.destroyed == [lease.sandbox_id]


async def test_a_cut_link_is_made_anew_and_the_lease_stays(make_world):
    world = await make_world(max_sandboxes=1)
    (lease,) = (await world.acquire()).leases

    world.backend.agents[lease.sandbox_id].hang_up()
    old = world.pools.locate_slot("t", lease.lease_id).agent
    assert await world.pools.wait_for_reconnect_or_loss(lease.lease_id, 5) is None
    await settle()

    location = world.pools.locate_slot("t", lease.lease_id)
    assert location.agent is not old
    assert location.agent.is_connected
    assert (await world.acquire()).leases[0].slot != lease.slot


async def test_an_agent_that_cannot_be_reached_for_five_seconds_is_lost(make_world):
    class Deaf(FakeBackend):
        deaf = False

        async def connect(self, endpoint, timeout_s=10.0):
            return await super().connect(replace(endpoint, address="fake:nobody") if self.deaf else endpoint, timeout_s)

    world = await make_world(Deaf(), max_sandboxes=1)
    (lease,) = (await world.acquire()).leases
    world.backend.deaf = True
    world.backend.agents[lease.sandbox_id].hang_up()
    await settle()

    with pytest.raises(BackendUnavailable):
        world.pools.locate_slot("t", lease.lease_id)
    await world.clock.advance(4)
    with pytest.raises(BackendUnavailable):
        world.pools.locate_slot("t", lease.lease_id)
    await world.clock.advance(1.2)
    with pytest.raises(SandboxLost, match="could not be reached"):
        world.pools.locate_slot("t", lease.lease_id)


async def test_another_agent_under_the_same_name_is_not_taken_for_the_old_one(make_world):
    world = await make_world(max_sandboxes=1)
    (lease,) = (await world.acquire()).leases

    old = world.backend.agents[lease.sandbox_id]
    world.backend.agents[lease.sandbox_id] = FakeAgent(lease.sandbox_id)
    old.hang_up()
    await settle()

    with pytest.raises(SandboxLost, match="another agent"):
        world.pools.lease("t", lease.lease_id)


async def test_a_reset_that_was_cut_off_is_asked_again(make_world):
    class Slow(FakeAgent):
        say_nothing = True

        def respond(self, meta, say):
            if not self.say_nothing:
                super().respond(meta, say)

    class Backend(FakeBackend):
        def make_agent(self, pool, spec, sandbox_id):
            return Slow(sandbox_id)

    world = await make_world(Backend(), max_sandboxes=1)
    (lease,) = (await world.acquire()).leases
    world.pools.release("t", [lease.lease_id])
    await settle()
    assert world.slots() == {"resetting": 1, "ready": 1}

    agent = world.backend.agents[lease.sandbox_id]
    agent.say_nothing = False
    agent.hang_up()
    await settle()

    assert world.slots() == {"ready": 2}
    assert [request["epoch"] for request in agent.requests if request["op"] == "reset"] == [2, 2]


async def test_a_slot_that_cannot_be_proven_clean_is_never_leased_again(make_world):
    class Dirty(FakeAgent):
        def reset(self, slot, meta):
            return {"state": "quarantined", "detail": "a process would not die"} if slot.slot_id == "0" else super().reset(slot, meta)

    class Backend(FakeBackend):
        def make_agent(self, pool, spec, sandbox_id):
            return Dirty(sandbox_id, slots=8)

    world = await make_world(Backend(), max_sandboxes=1, slots_per_sandbox=8)
    gang = (await world.acquire(count=8)).leases
    world.pools.release("t", [lease.lease_id for lease in gang])
    await settle()

    assert world.slots() == {"ready": 7, "quarantined": 1}
    assert "0" not in {lease.slot_id for lease in (await world.acquire(count=7)).leases}
    with pytest.raises(NoCapacity):
        await world.acquire(wait_s=0)


async def test_a_slot_whose_init_died_ends_its_lease_and_is_reset(make_world):
    world = await make_world(max_sandboxes=1)
    (lease,) = (await world.acquire()).leases
    agent = world.backend.agents[lease.sandbox_id]

    agent.set_slot(lease.slot_id, "broken", "killed by signal 9")
    await settle()

    with pytest.raises(SandboxLost, match="killed by signal 9"):
        world.pools.lease("t", lease.lease_id)
    assert world.slots() == {"ready": 2}
    assert agent.slots[lease.slot_id].epoch == 2


@pytest.mark.parametrize(
    ("evidence", "fault"),
    [
        ({"own_work": True, "used_mb": 300}, Fault.POLICY),
        ({"ambiguous": True, "used_mb": 300, "share_mb": 100, "slot_ended": True}, Fault.AMBIGUOUS),
        ({"init": "it has ended"}, Fault.INFRA),
        ({}, Fault.INFRA),
    ],
)
async def test_calls_after_the_end_of_a_slot_have_its_blame_and_its_evidence(make_world, evidence, fault):
    world = await make_world(max_sandboxes=1)
    (lease,) = (await world.acquire()).leases

    world.backend.agents[lease.sandbox_id].set_slot(lease.slot_id, "broken", "out of memory", evidence)
    await settle()

    with pytest.raises(SandboxLost) as lost:
        world.pools.lease("t", lease.lease_id)
    assert lost.value.extra["evidence"] == {**evidence, "detail": "the slot's own init died: out of memory"}
    late = lease_error_result(ToolCall(call_id="c", lease_id=lease.lease_id, tool="bash", args={}), lost.value)
    assert late.fault is fault


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ({"own_work": True}, {"own_work": True}),  # of an agent that an older service has made
        ({"evidence": "own_work"}, {}),
        ({"evidence": {"own_work": True, "deep": {"a": 1}, "list": [1], "none": None}}, {"own_work": True}),
        ({"evidence": {"n": 1 << 70, "f": 1e400, "text": "x" * 10_000}}, {"n": 0, "f": 0, "text": "x" * 500}),
        ({"evidence": {str(n): n for n in range(1000)}}, {str(n): n for n in range(16)}),
    ],
)
def test_what_an_agent_says_of_a_broken_slot_is_kept_only_where_it_is_short_and_plain(said, kept):
    (seen,) = read_slots_update({"slots": [{"slot_id": "0", "epoch": 1, "state": "broken", **said}]}, "s-1").slots

    assert seen.evidence == kept


async def test_stopping_fails_who_waits_and_leaves_no_sandbox(make_world):
    world = await make_world(max_sandboxes=1)
    await world.acquire(count=2)
    waiting = await world.queue()

    await world.pools.stop()

    with pytest.raises(Draining):
        await waiting
    with pytest.raises(Draining):
        await world.acquire()
    assert world.backend.handles == {}


async def test_what_an_earlier_life_left_is_swept_at_the_start(make_world):
    backend = FakeBackend()
    world = await make_world(backend, max_sandboxes=1)
    (old,) = backend.handles.values()
    backend.handles["s-orphan"] = replace(old, sandbox_id="s-orphan")
    backend.handles["s-other"] = replace(old, sandbox_id="s-other", owner="somebody else")

    world.store.sandboxes.clear()
    await world.pools.stop()
    await make_world(backend, max_sandboxes=1)

    assert "s-orphan" not in backend.handles
    assert "s-other" in backend.handles


async def test_mode_none_serves_one_tenant_and_run_at_a_time(make_world):
    class Backend(FakeBackend):
        def make_agent(self, pool, spec, sandbox_id):
            return FakeAgent(sandbox_id, isolation="none")

    world = await make_world(Backend(), max_sandboxes=1, allow_none=True)
    (mine,) = (await world.acquire("a", run_id="r")).leases
    other = await world.queue("b")
    await settle()
    assert not other.done()

    world.pools.release("a", [mine.lease_id])

    assert (await other).leases[0].tenant == "b"
