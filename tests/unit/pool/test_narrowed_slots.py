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


class Filtered(FakeBackend):
    """A backend whose slots have networks of their own."""

    def make_agent(self, pool, spec, sandbox_id):
        agent = FakeAgent(sandbox_id)
        agent.networks = ["none", "internet"]
        return agent


@pytest.mark.parametrize("cache", ["none", "rw"])
async def test_the_hosts_of_a_lease_are_sent_before_its_grant_and_recorded(make_harness, cache):
    harness = await make_harness(Filtered(), network="internet", allow_hosts=("*.pypi.org", "203.0.113.0/24"))

    (lease,) = (await harness.acquire(allow_hosts=("files.pypi.org", "203.0.113.7"), cache=cache)).leases

    (agent,) = harness.backend.agents.values()
    (sent,) = agent.find_requests("narrow" if cache == "none" else "equip")
    assert (sent["allow_hosts"], sent["network"]) == (["files.pypi.org", "203.0.113.7"], True)
    assert harness.store.leases[lease.lease_id].allow_hosts == ("files.pypi.org", "203.0.113.7")


async def test_hosts_that_the_pool_does_not_permit_are_refused(make_harness):
    harness = await make_harness(Filtered(), network="internet", allow_hosts=("pypi.org",))

    with pytest.raises(InvalidRequest, match=r"does not permit '\*\.pypi\.org'"):
        await harness.acquire(allow_hosts=("pypi.org", "*.pypi.org"))


async def test_hosts_need_slots_with_networks_of_their_own(make_harness):
    harness = await make_harness()

    with pytest.raises(InvalidRequest, match="needs network: internet"):
        await harness.acquire(allow_hosts=("pypi.org",))
