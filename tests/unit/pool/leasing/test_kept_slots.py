"""Slots that are kept for a run, slots that are prepared for a lease, and the expiry of a lease as clients see it."""

from __future__ import annotations

import pytest

from sandbox_server.testing import FakeAgent, FakeBackend, settle


class DelayingAgent(FakeAgent):
    """Answers requests of one operation only when `answer_delayed` is called."""

    def __init__(self, sandbox_id, delayed_op):
        super().__init__(sandbox_id)
        self._delayed_op = delayed_op
        self._delayed = []

    def respond(self, meta, say):
        if meta["op"] == self._delayed_op:
            self._delayed.append((meta, say))
        else:
            super().respond(meta, say)

    def answer_delayed(self):
        delayed, self._delayed = self._delayed, []
        for meta, say in delayed:
            super().respond(meta, say)


class DelayingBackend(FakeBackend):
    """Creates sandboxes with a `DelayingAgent`."""

    def __init__(self, delayed_op):
        super().__init__()
        self._delayed_op = delayed_op

    def make_agent(self, pool, spec, sandbox_id):
        return DelayingAgent(sandbox_id, self._delayed_op)


async def test_kept_slots_go_to_their_run_first_and_after_a_minute_to_anyone(make_harness):
    harness = await make_harness(max_sandboxes=1)
    (lease,) = (await harness.acquire(run_id="r")).leases
    harness.pools.release("t", [lease.lease_id], None, False)
    await settle()
    assert harness.slots() == {"kept": 1, "ready": 1}

    (other,) = (await harness.acquire(run_id="other")).leases
    (again,) = (await harness.acquire(run_id="r")).leases

    assert (again.slot, again.epoch, again.workspace_kept) == (lease.slot, 2, True)
    assert other.slot != lease.slot
    assert not other.workspace_kept
    harness.pools.release("t", [again.lease_id], None, False)
    await harness.clock.advance(61)
    assert harness.slots() == {"leased": 1, "ready": 1}
    assert (await harness.acquire(run_id="r")).leases[0].workspace_kept is False


async def test_a_run_waits_a_moment_for_a_slot_that_is_about_to_be_kept_for_it(make_harness):
    harness = await make_harness(DelayingBackend("reset"), max_sandboxes=1)
    (agent,) = harness.backend.agents.values()
    (lease,) = (await harness.acquire(run_id="r")).leases
    harness.pools.release("t", [lease.lease_id], None, False)
    waiting = await harness.queue(run_id="r")
    assert not waiting.done()
    assert (await harness.acquire("u")).leases[0].slot != lease.slot, "others need not wait"

    agent.answer_delayed()

    (again,) = (await waiting).leases
    assert (again.slot, again.workspace_kept) == (lease.slot, True)


@pytest.mark.parametrize("wait_s", [0.0, 30.0])
async def test_a_run_does_not_wait_long_for_a_slot_that_may_be_kept(make_harness, wait_s):
    harness = await make_harness(DelayingBackend("reset"), max_sandboxes=1)
    (lease,) = (await harness.acquire(run_id="r")).leases
    harness.pools.release("t", [lease.lease_id], None, False)
    waiting = await harness.queue(run_id="r", wait_s=wait_s)
    await harness.clock.advance(3)

    assert (await waiting).leases[0].workspace_kept is False


async def test_the_end_that_is_shown_is_the_one_that_counts(make_harness):
    harness = await make_harness()
    (lease,) = (await harness.acquire(ttl_s=10)).leases
    assert harness.pools.lease("t", lease.lease_id).expires_at == lease.expires_at
    harness.pools.record_call_start(lease.lease_id)
    await harness.clock.advance(100)
    assert harness.pools.lease("t", lease.lease_id).expires_at == harness.clock.wall() + 60

    harness.pools.record_call_end(lease.lease_id)
    ends_at = harness.clock.wall() + 60
    await harness.clock.advance(20)

    assert harness.pools.lease("t", lease.lease_id).expires_at == pytest.approx(ends_at)
    assert [held.expires_at for held in harness.pools.leases("t")[0]] == [pytest.approx(ends_at)]


async def test_a_slot_that_is_being_prepared_is_released_only_once_it_is(make_harness):
    harness = await make_harness(DelayingBackend("narrow"), max_sandboxes=1)
    (agent,) = harness.backend.agents.values()
    waiting = await harness.queue(allow_network=False)
    waiting.cancel()
    await settle()
    assert harness.slots() == {"leased": 1, "ready": 1}
    assert [request["op"] for request in agent.requests].count("reset") == 0

    agent.answer_delayed()
    await settle()

    assert harness.slots() == {"ready": 2}


async def test_a_kept_slot_is_reclaimed_when_nothing_else_is_free(make_harness):
    harness = await make_harness(max_sandboxes=1, slots_per_sandbox=1)
    (lease,) = (await harness.acquire(run_id="r")).leases
    harness.pools.release("t", [lease.lease_id], None, False)
    await settle()

    (other,) = (await harness.acquire(run_id="s")).leases

    assert (other.epoch, other.workspace_kept) == (3, False)


async def test_without_a_run_there_is_nothing_to_keep_a_slot_for(make_harness):
    harness = await make_harness(max_sandboxes=1, slots_per_sandbox=1)
    (lease,) = (await harness.acquire()).leases
    harness.pools.release("t", [lease.lease_id], None, False)
    await settle()

    assert harness.slots() == {"ready": 1}


async def test_releasing_the_run_keeps_nothing_for_it(make_harness):
    harness = await make_harness(max_sandboxes=1, slots_per_sandbox=1)
    (lease,) = (await harness.acquire(run_id="r")).leases
    harness.pools.release("t", [lease.lease_id], None, False)
    await settle()
    harness.pools.release("t", run_id="r")
    await settle()

    assert harness.slots() == {"ready": 1}
