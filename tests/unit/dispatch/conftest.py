"""A dispatcher over one scripted agent. The tests play the pool."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from sandbox_server.core.errors import LeaseNotFound, PoolServiceError, SandboxLost
from sandbox_server.core.execution import ToolCall
from sandbox_server.core.types import Lease, LeaseState, PoolSpec
from sandbox_server.dispatch.call_admission import CallLimits
from sandbox_server.dispatch.dispatcher import Dispatcher
from sandbox_server.dispatch.runner.decisions import CallTimings
from sandbox_server.link import AgentClient, AgentLink
from sandbox_server.link.agent_link import RESPONSE_TIMEOUT_S
from sandbox_server.pool.operations.slot_lookup import PoolSlotLocation
from sandbox_server.store.memory import MemoryStore
from sandbox_server.telemetry import Telemetry
from sandbox_server.testing import FakeClock, FakeLink
from tests.support.scripted_agent import ScriptedAgent

SPEC = PoolSpec(default_timeout_s=30.0, max_timeout_s=600.0)


@dataclass
class FakeSlotLocator:
    """A pool that is one table of leases."""

    locations: dict[str, PoolSlotLocation] = field(default_factory=dict)
    errors: dict[str, PoolServiceError] = field(default_factory=dict)
    running: dict[str, int] = field(default_factory=dict)
    most_running: int = 0
    lost: SandboxLost | None = None
    reconnect: AgentLink | None = None
    while_waiting: Callable[[], object] = object

    def locate_slot(self, tenant: str, lease_id: str) -> PoolSlotLocation:
        if lease_id in self.errors:
            raise self.errors[lease_id]
        if lease_id not in self.locations or self.locations[lease_id].lease.tenant != tenant:
            raise LeaseNotFound(f"there is no lease {lease_id!r}, or it is not yours")
        return self.locations[lease_id]

    def record_call_start(self, lease_id: str) -> None:
        self.running[lease_id] = self.running.get(lease_id, 0) + 1
        self.most_running = max(self.most_running, sum(self.running.values()))

    def record_call_end(self, lease_id: str) -> None:
        self.running[lease_id] -= 1

    async def wait_for_reconnect_or_loss(self, lease_id: str, wait_s: float) -> SandboxLost | None:
        self.while_waiting()
        if self.lost is None and self.reconnect is not None:
            self.locations = {name: replace(location, agent=AgentClient(self.reconnect)) for name, location in self.locations.items()}
        return self.lost


@dataclass
class DispatchHarness:
    """Everything a dispatcher talks to."""

    agent: ScriptedAgent
    slot_locator: FakeSlotLocator
    store: MemoryStore
    telemetry: Telemetry
    dispatcher: Dispatcher
    clock: FakeClock

    async def link(self) -> AgentLink:
        """Another connection to the agent."""
        return await FakeLink.to(self.agent, self.agent.token)

    async def until_running(self, count: int = 1) -> None:
        """Wait until the agent runs so many calls."""
        while len(self.agent.ran) < count:
            await asyncio.sleep(0)


def call(lease_id: str, command: str, call_id: str = "c", **fields: object) -> ToolCall:
    """One bash call."""
    return ToolCall(call_id=call_id, lease_id=lease_id, tool="bash", args={"command": command}, **fields)  # type: ignore[arg-type]


def lease(lease_id: str, slot_id: str) -> Lease:
    """A lease of alice's on a slot of the agent."""
    return Lease(
        lease_id=lease_id, epoch=1, pool="default", sandbox_id="s-1", slot_id=slot_id, tenant="alice", trajectory_id=None, run_id=None,
        state=LeaseState.HELD, ttl_s=300.0, acquired_at=0.0, expires_at=300.0, workspace="/workspace", isolation="bwrap", allow_network=True,
    )  # fmt: skip


@pytest.fixture
async def harness() -> DispatchHarness:
    """Leases `a`, `b` and `c` of alice's, on one agent."""
    return await make_harness(ScriptedAgent("s-1", slots=3))


async def make_harness(agent: ScriptedAgent, timings: CallTimings | None = None, response_timeout_s: float = RESPONSE_TIMEOUT_S) -> DispatchHarness:
    """Leases `a`, `b` and `c` of alice's, on this agent of three slots."""
    client = AgentClient(await FakeLink.to(agent, agent.token), response_timeout_s)
    locations = {name: PoolSlotLocation(lease=lease(name, str(n)), spec=SPEC, agent=client, slot_id=str(n), epoch=1) for n, name in enumerate("abc")}
    slot_locator = FakeSlotLocator(locations)
    store, telemetry, clock = MemoryStore(), Telemetry(), FakeClock()
    dispatcher = Dispatcher(slot_locator, store, clock, telemetry, CallLimits(in_flight=200), timings=timings)
    return DispatchHarness(agent, slot_locator, store, telemetry, dispatcher, clock)
