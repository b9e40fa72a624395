"""A connection to a port ends with its lease, also where the agent does not end it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from sandbox_server.core.errors import LeaseLost, PortClosed, SandboxLost
from sandbox_server.dispatch.ports import SlotPorts
from tests.support.service_harness import ALICE, ServiceHarness


def ports_of(harness: ServiceHarness) -> SlotPorts:
    service = harness.application._edge.service
    assert service is not None
    return service.ports


async def read_during(harness: ServiceHarness, lease_id: str, action: Callable[[], Awaitable[object]]) -> None:
    """Connect to a port, do something, and then wait for what the program sends, which is nothing."""
    async with ports_of(harness).connect(ALICE.name, lease_id, 8000) as connection:
        await action()
        await connection.read()


async def test_a_release_ends_the_connections_of_its_lease_and_no_others(harness: ServiceHarness) -> None:
    released, held = await harness.acquire(2)
    async with ports_of(harness).connect(ALICE.name, held, 8000) as other:
        with pytest.raises(LeaseLost, match="released"):
            await read_during(harness, released, lambda: harness.http.post("/v1/release", json={"lease_ids": [released]}))
        await other.write(b"GET / HTTP/1.1\r\n\r\n")
        assert (await other.read()).startswith(b"HTTP/1.1 200 OK")


async def test_a_lost_sandbox_ends_the_connections_of_its_leases(harness: ServiceHarness) -> None:
    (lease_id,) = await harness.acquire()

    async def kill_agent() -> None:
        harness.backend.kill(harness.agent.sandbox_id)

    with pytest.raises(SandboxLost):
        await read_during(harness, lease_id, kill_agent)


async def test_what_ends_by_itself_leaves_no_trace_of_the_connection(harness: ServiceHarness) -> None:
    (lease_id,) = await harness.acquire()
    ports = ports_of(harness)
    with pytest.raises(PortClosed):
        async with ports.connect(ALICE.name, lease_id, 1):
            pass
    async with ports.connect(ALICE.name, lease_id, 8000):
        pass

    assert ports._open_of_tenant.total() == 0
    assert ports._ends_of_lease == {}
