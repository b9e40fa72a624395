"""Network and cache of a lease: set up before the grant, and taken away permanently; the self-test of resets; drains; events."""

from __future__ import annotations

import asyncio

import pytest

from sandbox_server.core.errors import (
    InvalidRequest,
    LeaseLost,
    LeaseNotFound,
    NoCapacity,
    NotImplementedHere,
    SandboxLost,
    SandboxNotFound,
)
from sandbox_server.pool.events import EventLog
from sandbox_server.testing import FakeAgent, FakeBackend, FakeClock, settle


async def test_narrow_takes_the_network_and_says_so(make_harness):
    harness = await make_harness()
    (lease,) = (await harness.acquire()).leases

    narrowed = await harness.pools.narrow("t", lease.lease_id, allow_network=False, cache=None)

    (agent,) = harness.backend.agents.values()
    assert (narrowed.allow_network, narrowed.lease_id) == (False, lease.lease_id)
    assert harness.pools.lease("t", lease.lease_id) == narrowed == harness.store.leases[lease.lease_id]
    assert agent.find_requests("narrow") == [{"op": "narrow", "slot": lease.slot_id, "epoch": 1, "network": False, "cache": None}]
    assert await harness.pools.narrow("t", lease.lease_id, allow_network=False, cache="none") == narrowed
    assert len(agent.find_requests("narrow")) == 1, "what is gone already is not taken again"


async def test_narrow_never_widens_and_is_the_tenants_own(make_harness):
    harness = await make_harness()
    (lease,) = (await harness.acquire(allow_network=False)).leases

    with pytest.raises(InvalidRequest, match="allow_network"):
        await harness.pools.narrow("t", lease.lease_id, allow_network=True, cache=None)
    with pytest.raises(InvalidRequest, match="cache"):
        await harness.pools.narrow("t", lease.lease_id, allow_network=None, cache="rw")
    with pytest.raises(LeaseNotFound):
        await harness.pools.narrow("u", lease.lease_id, allow_network=False, cache=None)
    harness.pools.release("t", [lease.lease_id])
    with pytest.raises(LeaseLost):
        await harness.pools.narrow("t", lease.lease_id, allow_network=False, cache=None)


async def test_a_narrow_whose_link_is_cut_is_asked_again(make_harness):
    class Deaf(FakeAgent):
        deaf = True

        def respond(self, meta, say):
            if self.deaf and meta["op"] == "narrow":
                self.deaf = False
                self.hang_up()
            else:
                super().respond(meta, say)

    class Backend(FakeBackend):
        def make_agent(self, pool, spec, sandbox_id):
            return Deaf(sandbox_id)

    harness = await make_harness(Backend())
    (lease,) = (await harness.acquire()).leases

    assert (await harness.pools.narrow("t", lease.lease_id, allow_network=False, cache=None)).allow_network is False


async def test_a_narrow_in_a_sandbox_that_dies_says_so(make_harness):
    class Dying(FakeAgent):
        def respond(self, meta, say):
            if meta["op"] == "narrow":
                backend.kill(self.sandbox_id)
            else:
                super().respond(meta, say)

    class Backend(FakeBackend):
        def make_agent(self, pool, spec, sandbox_id):
            return Dying(sandbox_id)

    backend = Backend()
    harness = await make_harness(backend)
    (lease,) = (await harness.acquire()).leases

    with pytest.raises(SandboxLost):
        await harness.pools.narrow("t", lease.lease_id, allow_network=False, cache=None)


async def test_what_a_mode_cannot_narrow_is_refused_and_the_lease_stays(make_harness):
    class Wide(FakeAgent):
        def narrow(self, slot, meta):
            return {"code": "not_implemented", "detail": "needs bwrap"}

    class Backend(FakeBackend):
        def make_agent(self, pool, spec, sandbox_id):
            return Wide(sandbox_id)

    harness = await make_harness(Backend())
    (lease,) = (await harness.acquire()).leases

    with pytest.raises(NotImplementedHere, match="needs bwrap"):
        await harness.pools.narrow("t", lease.lease_id, allow_network=False, cache=None)
    assert harness.pools.lease("t", lease.lease_id).allow_network


async def test_leases_of_one_run_share_a_cache_and_others_do_not(make_harness):
    harness = await make_harness(slots_per_sandbox=4)
    one, two = (await harness.acquire(count=2, run_id="r", cache="rw")).leases
    (other,) = (await harness.acquire("u", run_id="r", cache="rw")).leases
    (alone,) = (await harness.acquire(cache="rw", allow_network=False)).leases

    (agent,) = harness.backend.agents.values()
    slots = [agent.slots[lease.slot_id] for lease in (one, two, other, alone)]
    assert slots[0].cache == slots[1].cache
    assert len({slot.cache for slot in slots}) == 3
    assert [slot.has_network for slot in slots] == [True, True, True, False]
    assert one.cache == "rw"


async def test_a_cache_is_gone_with_its_run(make_harness):
    harness = await make_harness(slots_per_sandbox=4)
    (one,) = (await harness.acquire(run_id="r", cache="rw")).leases
    (two,) = (await harness.acquire(run_id="s", cache="rw")).leases
    (agent,) = harness.backend.agents.values()
    harness.pools.release("t", [one.lease_id])
    await harness.clock.advance(30)
    assert len(agent.caches) == 2, "its next lease may come any moment"

    harness.pools.release("t", run_id="s")
    await harness.clock.advance(1)
    assert agent.caches == {agent.slots[one.slot_id].cache or rest for rest in agent.caches}
    assert len(agent.caches) == 1
    await harness.clock.advance(32)

    assert agent.caches == set()
    assert [record.caches for record in harness.store.sandboxes.values()] == [()]
    assert two.cache == "rw"


async def test_without_a_run_a_cache_is_gone_with_its_lease(make_harness):
    harness = await make_harness()
    (lease,) = (await harness.acquire(cache="rw")).leases
    (agent,) = harness.backend.agents.values()
    harness.pools.release("t", [lease.lease_id])
    await harness.clock.advance(1)

    assert agent.caches == set()


async def test_a_cache_is_dropped_once_its_agent_can_be_asked(make_harness):
    harness = await make_harness()
    (lease,) = (await harness.acquire(cache="rw", run_id="r")).leases
    (agent,) = harness.backend.agents.values()
    agent.hang_up()
    harness.pools.release("t", run_id="r")
    await harness.clock.advance(2)

    assert agent.caches == set()
    assert lease.cache == "rw"


async def test_the_cache_is_taken_away_by_narrow(make_harness):
    harness = await make_harness()
    (lease,) = (await harness.acquire(cache="rw", run_id="r")).leases

    narrowed = await harness.pools.narrow("t", lease.lease_id, allow_network=None, cache="none")

    (agent,) = harness.backend.agents.values()
    assert (narrowed.cache, narrowed.allow_network) == ("none", True)
    assert (agent.slots[lease.slot_id].cache, agent.slots[lease.slot_id].has_network) == (None, True)


async def test_where_there_can_be_no_cache_it_is_refused_at_once(make_harness):
    class Bare(FakeAgent):
        def hello(self):
            hello = super().hello()
            hello["capabilities"]["cache"] = False
            return hello

    class Backend(FakeBackend):
        def make_agent(self, pool, spec, sandbox_id):
            return Bare(sandbox_id)

    harness = await make_harness(Backend())

    with pytest.raises(NotImplementedHere, match="cache"):
        await harness.acquire(cache="rw")


async def test_a_kept_slot_takes_its_cache_with_its_files(make_harness):
    harness = await make_harness(max_sandboxes=1, slots_per_sandbox=1)
    (first,) = (await harness.acquire(run_id="r", cache="rw")).leases
    harness.pools.release("t", [first.lease_id], None, False)

    (second,) = (await harness.acquire(run_id="r", cache="rw")).leases

    (agent,) = harness.backend.agents.values()
    assert second.workspace_kept
    assert agent.slots["0"].cache is not None
    assert [request["epoch"] for request in agent.find_requests("equip")] == [1, 2]


async def test_verify_uses_free_slots_only_and_reports_what_was_found(make_harness):
    harness = await make_harness(max_sandboxes=1, slots_per_sandbox=3)
    (lease,) = (await harness.acquire()).leases

    report = await harness.pools.verify("default")

    assert (report["pool"], report["clean"], len(report["slots"])) == ("default", True, 2)
    assert lease.slot_id not in {slot["slot_id"] for slot in report["slots"]}
    assert report["slots"][0]["found"] == ["file", "process"]
    assert report["slots"][0]["planted"][0] == {"kind": "file", "detail": "/workspace/left"}
    assert harness.slots() == {"leased": 1, "ready": 2}
    assert (await harness.acquire()).leases[0].epoch == 2


async def test_verify_needs_a_free_slot(make_harness):
    harness = await make_harness(max_sandboxes=1)
    await harness.acquire(count=2)

    with pytest.raises(NoCapacity, match="no free slot"):
        await harness.pools.verify("default")


async def test_a_reset_that_leaves_something_is_reported_and_its_slot_never_leased(make_harness):
    class Leaky(FakeAgent):
        def verify(self, slot, meta):
            report = super().verify(slot, meta)
            return report | {"left": ["process"], "clean": False, "state": "quarantined", "detail": "sleep service"} if slot.slot_id == "0" else report

    class Backend(FakeBackend):
        def make_agent(self, pool, spec, sandbox_id):
            return Leaky(sandbox_id, slots=8)

    harness = await make_harness(Backend(), max_sandboxes=1, slots_per_sandbox=8)

    report = await harness.pools.verify("default")

    assert report["clean"] is False
    assert [slot["left"] for slot in report["slots"] if not slot["clean"]] == [["process"]]
    assert harness.slots() == {"ready": 7, "quarantined": 1}


async def test_agents_that_cannot_verify_leave_the_slots_clean(make_harness):
    class Old(FakeAgent):
        def verify(self, slot, meta):
            return {"code": "not_implemented", "detail": "an older agent"}

    class Backend(FakeBackend):
        def make_agent(self, pool, spec, sandbox_id):
            return Old(sandbox_id)

    harness = await make_harness(Backend(), max_sandboxes=1)

    with pytest.raises(NotImplementedHere, match="an older agent"):
        await harness.pools.verify("default")
    await settle()
    assert harness.slots() == {"ready": 2}


async def test_verify_goes_on_when_nobody_waits_for_it(make_harness):
    harness = await make_harness(max_sandboxes=1)
    task = asyncio.create_task(harness.pools.verify("default"))
    await asyncio.sleep(0)
    task.cancel()
    await settle()

    assert harness.slots() == {"ready": 2}
    assert len(next(iter(harness.backend.agents.values())).find_requests("verify")) == 2


async def test_a_drained_sandbox_takes_no_new_leases_and_goes_with_its_last(make_harness):
    harness = await make_harness(min_sandboxes=1)
    (lease,) = (await harness.acquire()).leases

    view = await harness.pools.drain_sandbox(lease.sandbox_id)
    await settle()

    assert (view.sandbox_id, view.state, view.last_error) == (lease.sandbox_id, "draining", "an admin drained it")
    assert (await harness.acquire()).leases[0].sandbox_id != lease.sandbox_id
    assert (await harness.pools.drain_sandbox(lease.sandbox_id)).state == "draining"
    harness.pools.release("t", [lease.lease_id])
    await harness.clock.advance(1)
    with pytest.raises(SandboxNotFound):
        await harness.pools.drain_sandbox(lease.sandbox_id)


async def test_everything_that_changes_is_told_in_order(make_harness):
    harness = await make_harness(max_sandboxes=1)
    began = harness.pools.events.last_id
    (lease, other) = (await harness.acquire(count=2, run_id="r", ttl_s=50)).leases
    harness.pools.renew("t", [lease.lease_id], 60)
    await harness.pools.narrow("t", lease.lease_id, allow_network=False, cache=None)
    harness.pools.release("t", [lease.lease_id])
    await harness.clock.advance(51)
    (again,) = (await harness.acquire()).leases
    harness.backend.kill(again.sandbox_id)
    await harness.clock.advance(1)

    seen = []
    async for event in harness.pools.events.follow(began):
        seen.append(event)
        if event.id == harness.pools.events.last_id:
            break

    ours = [event for event in seen if event.tenant == "t"]
    assert [event.kind.removeprefix("lease.") for event in ours] == [
        "acquired", "acquired", "renewed", "narrowed", "released", "expired", "acquired", "lost",
    ]  # fmt: skip
    assert ours[0].data["lease_id"] == lease.lease_id
    assert ours[5].data["lease_id"] == other.lease_id
    assert [event.kind for event in seen if event.admin_only] == ["sandbox.failed", "sandbox.gone", "sandbox.starting", "sandbox.ready"]
    assert [event.id for event in seen] == sorted({event.id for event in seen})


async def test_a_follower_that_is_too_slow_is_told_and_goes_on():
    log = EventLog(kept=3, clock=FakeClock())
    follower = log.follow()
    for number in range(5):
        log.publish("pool.changed", pool=str(number))

    got = [await anext(follower) for _ in range(4)]

    assert got[0] is None
    assert [event.data["pool"] for event in got[1:]] == ["2", "3", "4"]


async def test_a_follower_waits_for_what_comes_and_one_of_another_life_misses_some():
    clock = FakeClock()
    log = EventLog(kept=3, clock=clock)
    log.publish("pool.changed", pool="a")
    waiting = asyncio.create_task(anext(log.follow()))
    await settle()
    assert not waiting.done()
    log.publish("pool.changed", pool="b")
    assert (await waiting).data["pool"] == "b"

    old = log.follow(7)
    assert await anext(old) is None
    assert (await anext(old)).data["pool"] == "a"
    clock.pass_time(10)
    assert EventLog(clock=clock).last_id > log.last_id
