"""Leases that a service takes over from an earlier one: their slots, their expiry, and the calls that still run."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from sandbox_server.core.errors import BackendUnavailable, LeaseLost
from sandbox_server.core.types import AcquireRequest
from sandbox_server.testing import FakeAgent, FakeBackend, settle


async def test_leases_keep_their_ids_slots_and_epochs(make_service):
    service = await make_service()
    (lease,) = await service.acquire(run_id="r", labels={"a": "b"})
    agent = service.backend.agents[lease.sandbox_id]
    asked = len(agent.requests)

    await service.restart()

    assert service.pools.lease("t", lease.lease_id) == lease
    location = service.pools.locate_slot("t", lease.lease_id)
    assert (location.slot_id, location.epoch, location.spec) == (lease.slot_id, lease.epoch, service.specs["default"])
    assert service.slots() == {"leased": 1, "ready": 1}
    assert service.backend.created == [lease.sandbox_id]
    assert [request["op"] for request in agent.requests[asked:]] == ["watch", "quiet"]
    service.pools.release("t", [lease.lease_id])
    (second,) = await service.acquire(count=1)
    assert second.lease_id != lease.lease_id
    assert service.pools.readiness()["ready"]


@pytest.mark.parametrize(("ttl_s", "down_s", "left_s"), [(300, 10, 290), (300, 1000, 60), (20, 1000, 20)])
async def test_after_downtime_a_lease_that_held_gets_its_grace(make_service, ttl_s, down_s, left_s):
    service = await make_service()
    (lease,) = await service.acquire(ttl_s=ttl_s)

    await service.restart(down_s)

    assert service.pools.lease("t", lease.lease_id).expires_at == pytest.approx(service.clock.wall() + left_s)
    await service.clock.advance(left_s - 1)
    assert service.pools.lease("t", lease.lease_id)
    await service.clock.advance(2)
    with pytest.raises(LeaseLost, match="expired"):
        service.pools.lease("t", lease.lease_id)


@pytest.mark.parametrize(
    ("jump_s", "left_s"), [(-1_000_000, 300), (-200, 300), (200, 100), (1_000_000, 60)], ids=["far back", "back", "forward", "far forward"]
)
async def test_a_clock_that_was_set_while_the_service_was_down_makes_no_lease_immortal(make_service, jump_s, left_s):
    service = await make_service()
    (lease,) = await service.acquire(ttl_s=300)
    await service.crash()
    service.clock.jump_wall(jump_s)

    await service.start()
    again = service.pools.lease("t", lease.lease_id)
    await service.restart()

    assert again.expires_at == service.pools.lease("t", lease.lease_id).expires_at == pytest.approx(service.clock.wall() + left_s)
    await service.clock.advance(left_s - 1)
    assert service.pools.lease("t", lease.lease_id)
    await service.clock.advance(2)
    with pytest.raises(LeaseLost, match="expired"):
        service.pools.lease("t", lease.lease_id)


async def test_a_renewal_that_shortened_nothing_does_not_either_after_a_restart(make_service):
    service = await make_service()
    (lease,) = await service.acquire(ttl_s=300)
    service.pools.renew("t", [lease.lease_id], 1)

    await service.restart(10)

    assert service.pools.lease("t", lease.lease_id).expires_at == pytest.approx(service.clock.wall() + 290)


async def test_a_lease_does_not_expire_under_a_command_that_ran_on(make_service):
    class Busy(FakeAgent):
        running = None

        def respond(self, meta, say):
            if meta["op"] == "quiet":
                self.running = say
            else:
                super().respond(meta, say)

    class Backend(FakeBackend):
        def make_agent(self, pool, spec, sandbox_id):
            return Busy(sandbox_id)

    service = await make_service(Backend())
    (lease,) = await service.acquire(ttl_s=10)
    agent = service.backend.agents[lease.sandbox_id]
    await service.restart()
    await service.clock.advance(500)
    agent.hang_up()
    await service.clock.advance(500)
    assert service.pools.lease("t", lease.lease_id)

    agent.running({"ran": True})
    await service.clock.advance(59)
    assert service.pools.lease("t", lease.lease_id)
    await service.clock.advance(2)

    with pytest.raises(LeaseLost, match="expired"):
        service.pools.lease("t", lease.lease_id)


async def test_until_an_agent_is_found_again_its_leases_wait_and_the_service_is_not_ready(make_service):
    class Deaf(FakeBackend):
        deaf = False

        async def connect(self, endpoint, timeout_s=10.0):
            return await super().connect(replace(endpoint, address="fake:nobody") if self.deaf else endpoint, timeout_s)

    service = await make_service(Deaf(), min_sandboxes=0)
    (lease,) = await service.acquire()
    await service.crash()
    service.backend.deaf = True
    await service.start()
    assert not service.pools.readiness()["ready"]
    with pytest.raises(BackendUnavailable):
        service.pools.locate_slot("t", lease.lease_id)
    waiting = asyncio.create_task(service.pools.wait_for_reconnect_or_loss(lease.lease_id, 50))

    service.backend.deaf = False
    await service.clock.advance(1)

    assert await waiting is None
    assert service.pools.locate_slot("t", lease.lease_id).lease == lease
    assert service.pools.readiness()["ready"]


async def test_mode_none_serves_one_tenant_and_run_at_a_time_over_a_restart_too(make_service):
    class Backend(FakeBackend):
        def make_agent(self, pool, spec, sandbox_id):
            return FakeAgent(sandbox_id, isolation="none")

    service = await make_service(Backend(), allow_none=True, max_sandboxes=1)
    await service.acquire(run_id="r")
    await service.restart()

    other = asyncio.create_task(service.pools.acquire(AcquireRequest(tenant="u", pool="default")))
    await settle()
    assert not other.done()

    service.pools.release("t", None, "r")
    assert (await other).leases
