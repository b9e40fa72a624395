"""Resets that are cut off or not proven clean, and slots that end under their leases."""

from __future__ import annotations

import pytest

from sandbox_server.core.errors import NoCapacity, SandboxLost
from sandbox_server.core.execution import Fault, ToolCall
from sandbox_server.dispatch.results import lease_error_result
from sandbox_server.link.agent_reports import read_slots_update
from sandbox_server.testing import FakeAgent, FakeBackend, settle


async def test_a_reset_that_was_cut_off_is_asked_again(make_harness):
    class Slow(FakeAgent):
        say_nothing = True

        def respond(self, meta, say):
            if not self.say_nothing:
                super().respond(meta, say)

    class Backend(FakeBackend):
        def make_agent(self, pool, spec, sandbox_id):
            return Slow(sandbox_id)

    harness = await make_harness(Backend(), max_sandboxes=1)
    (lease,) = (await harness.acquire()).leases
    harness.pools.release("t", [lease.lease_id])
    await settle()
    assert harness.slots() == {"resetting": 1, "ready": 1}

    agent = harness.backend.agents[lease.sandbox_id]
    agent.say_nothing = False
    agent.hang_up()
    await settle()

    assert harness.slots() == {"ready": 2}
    assert [request["epoch"] for request in agent.requests if request["op"] == "reset"] == [2, 2]


async def test_a_slot_that_cannot_be_proven_clean_is_never_leased_again(make_harness):
    class Dirty(FakeAgent):
        def reset(self, slot, meta):
            return {"state": "quarantined", "detail": "a process would not die"} if slot.slot_id == "0" else super().reset(slot, meta)

    class Backend(FakeBackend):
        def make_agent(self, pool, spec, sandbox_id):
            return Dirty(sandbox_id, slots=8)

    harness = await make_harness(Backend(), max_sandboxes=1, slots_per_sandbox=8)
    gang = (await harness.acquire(count=8)).leases
    harness.pools.release("t", [lease.lease_id for lease in gang])
    await settle()

    assert harness.slots() == {"ready": 7, "quarantined": 1}
    assert "0" not in {lease.slot_id for lease in (await harness.acquire(count=7)).leases}
    with pytest.raises(NoCapacity):
        await harness.acquire(wait_s=0)


async def test_a_slot_whose_init_died_ends_its_lease_and_is_reset(make_harness):
    harness = await make_harness(max_sandboxes=1)
    (lease,) = (await harness.acquire()).leases
    agent = harness.backend.agents[lease.sandbox_id]

    agent.set_slot(lease.slot_id, "broken", "killed by signal 9")
    await settle()

    with pytest.raises(SandboxLost, match="killed by signal 9"):
        harness.pools.lease("t", lease.lease_id)
    assert harness.slots() == {"ready": 2}
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
async def test_calls_after_the_end_of_a_slot_have_its_blame_and_its_evidence(make_harness, evidence, fault):
    harness = await make_harness(max_sandboxes=1)
    (lease,) = (await harness.acquire()).leases

    harness.backend.agents[lease.sandbox_id].set_slot(lease.slot_id, "broken", "out of memory", evidence)
    await settle()

    with pytest.raises(SandboxLost) as lost:
        harness.pools.lease("t", lease.lease_id)
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
