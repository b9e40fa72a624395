"""One sandbox as its pool knows it, and what the pool demands of its agent."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from sandbox_server.backends.base import CreateFailed
from sandbox_server.core.clock import Clock, monotonic_at, wall_at
from sandbox_server.core.lifecycle import SandboxEvent, next_sandbox_state
from sandbox_server.core.types import Handle, PoolId, PoolSpec, SandboxState
from sandbox_server.link import AgentClient
from sandbox_server.link.agent_reports import AgentReport
from sandbox_server.store.base import CacheRecord, SandboxRecord

#: What a sandbox that is found again has left at least, in seconds.
GRACE_S = 60.0


@dataclass(slots=True, eq=False)
class Cache:
    """A shared cache in a sandbox. `idle_since`: nobody of its run holds a lease; `dropping`: the agent has been told to delete it."""

    record: CacheRecord
    idle_since: float | None = None
    dropping: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class Sandbox:
    """One sandbox. `state` is moved by `happen` alone; times without a clock in their name are monotonic."""

    sandbox_id: str
    pool: str
    spec: PoolSpec
    created_wall: float
    state: SandboxState = SandboxState.STARTING
    handle: Handle | None = None
    agent: AgentClient | None = None
    boot: str | None = None
    isolation: str = ""
    ready_at: float | None = None
    idle_since: float | None = None
    destroying: bool = False
    why: str = ""
    caches: dict[str, Cache] = field(default_factory=dict)
    pool_tenant: str | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def happen(self, event: SandboxEvent) -> None:
        """Let something happen to it.

        Raises:
            UnlistedMove: it cannot happen in this state.
        """
        self.state = next_sandbox_state(self.state, event)
        self.wake()

    def wake(self) -> None:
        """Let those look again who wait for something to change."""
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    @property
    def pool_id(self) -> PoolId:
        """Which pool it is of."""
        return PoolId(self.pool, self.pool_tenant)

    @property
    def fields(self) -> dict[str, Any]:
        """What log lines say of it."""
        return {"sandbox_id": self.sandbox_id, **self.pool_id.fields}

    @property
    def reachable(self) -> bool:
        """Whether its agent can be spoken to now."""
        return self.agent is not None and self.agent.is_connected

    def ready_wall(self, clock: Clock) -> float | None:
        """When it first was ready, as the wall clock tells it now."""
        return None if self.ready_at is None else wall_at(clock, self.ready_at)

    def record(self, clock: Clock) -> SandboxRecord:
        """What must be known of it after a crash."""
        return SandboxRecord(
            sandbox_id=self.sandbox_id,
            pool=self.pool,
            state=self.state,
            handle=self.handle,
            created_at=self.created_wall,
            boot=self.boot,
            spec=self.spec,
            ready_at=self.ready_wall(clock),
            caches=tuple(cache.record for cache in self.caches.values()),
            why=self.why,
            pool_tenant=self.pool_tenant,
        )

    @classmethod
    def restored(cls, record: SandboxRecord, spec: PoolSpec, clock: Clock) -> Sandbox:
        """The sandbox of a record. Times of the wall clock become monotonic ones, as far as both can be believed."""
        made_with = record.spec or spec
        # Its agent ends itself by a clock of its own: one that still runs has some time left, whatever the wall clock says.
        oldest_s = max(0.0, made_with.max_lifetime_s + made_with.max_lease_s - GRACE_S)
        return cls(
            sandbox_id=record.sandbox_id,
            pool=record.pool,
            spec=made_with,
            created_wall=record.created_at,
            state=record.state,
            handle=record.handle,
            boot=record.boot,
            ready_at=None if record.ready_at is None else max(monotonic_at(clock, record.ready_at), clock.monotonic() - oldest_s),
            why=record.why,
            pool_tenant=record.pool_tenant,
            caches={cache.key: Cache(cache) for cache in record.caches},
        )


def check_agent_report(report: AgentReport, spec: PoolSpec) -> None:
    """Check that an agent can give its pool what the spec asks for.

    Raises:
        CreateFailed: permanent, because this machine or image cannot.
    """
    if not report.isolation:
        raise CreateFailed(f"no isolation mode works here: {report.error}", permanent=True)
    if report.isolation == "none" and spec.require_sandbox:
        raise CreateFailed("the pool asks for require_sandbox, and no mode of at least 'uid' works here", permanent=True)
    if report.isolation == "none" and not spec.allow_none:
        raise CreateFailed("only mode 'none' works here, and the pool does not set allow_none", permanent=True)
    if not spec.slots_have_network and "none" not in report.capability_names("network"):
        raise CreateFailed(f"the pool's slots shall have no network, which mode {report.isolation!r} cannot enforce here", permanent=True)
    missing = {"bash_stateful", "tmux"} - report.capability_names("tools") if spec.require_stateful_sandbox else set()
    if missing:
        raise CreateFailed(f"the pool asks for require_stateful_sandbox, and this agent lacks {', '.join(sorted(missing))}", permanent=True)
