"""Slots whose rights are narrowed before their leases are granted."""

from __future__ import annotations

import pytest

from sandbox_server.core.errors import InvalidRequest, NotImplementedHere
from sandbox_server.testing import FakeAgent, FakeBackend, settle


async def test_a_slot_is_narrowed_before_its_grant_counts(make_harness):
    harness = await make_harness()

    (lease,) = (await harness.acquire(allow_network=False)).leases

    (agent,) = harness.backend.agents.values()
    assert lease.allow_network is False
    assert {"op": "narrow", "slot": lease.slot_id, "epoch": 1, "network": False, "cache": None} in agent.requests


async def test_what_cannot_be_narrowed_is_refused_and_given_back(make_harness):
    class Wide(FakeAgent):
        def answer(self, meta):
            return {"code": "not_implemented", "detail": "not here"} if meta["op"] == "narrow" else super().answer(meta)

    class Backend(FakeBackend):
        def make_agent(self, pool, spec, sandbox_id):
            return Wide(sandbox_id)

    harness = await make_harness(Backend(), max_sandboxes=1)
    with pytest.raises(NotImplementedHere, match="not here"):
        await harness.acquire(allow_network=False)
    await settle()

    assert harness.slots() == {"ready": 2}


async def test_a_narrowing_that_failed_for_the_moment_is_tried_with_another_slot(make_harness):
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

    harness = await make_harness(Backend(), max_sandboxes=1)

    (lease,) = (await harness.acquire(allow_network=False)).leases
    await settle()

    assert lease.allow_network is False
    assert harness.slots() == {"leased": 1, "ready": 1}


async def test_a_lease_may_not_widen_the_pools_network(make_harness):
    harness = await make_harness(allow_network=False)

    with pytest.raises(InvalidRequest):
        await harness.acquire(allow_network=True)
    assert (await harness.acquire()).leases[0].allow_network is False
