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

#: How long an adopted sandbox is kept at least, whatever its recorded age, in seconds.
ADOPTED_SANDBOX_GRACE_S = 60.0


@dataclass(slots=True, eq=False)
class Cache:
    """A shared cache in a sandbox.

    Attributes:
        record: its key, tenant and run.
        idle_since: since when no lease of its run is held, monotonic; None while one is.
        dropping: whether the agent has been asked to delete it.
    """

    record: CacheRecord
    idle_since: float | None = None
    dropping: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class Sandbox:
    """One sandbox as its pool knows it.

    Attributes:
        created_wall: when its creation began, in Unix seconds.
        state: its state, which `apply_event` alone changes.
        handle: the last checkpoint of its creation; None before the first.
        agent: the client of its agent; None before the first connection.
        boot: the boot nonce of its agent. Another agent that answers in its place has another one.
        ready_at: when its agent answered for the first time, monotonic.
        idle_since: since when none of its slots is leased or kept, monotonic, provided that none is now.
        ends_at: when the backend ends it by itself, monotonic; None if the backend does not.
        end_is_known: whether `ends_at` has been learned from the backend, or need not be.
        destroying: whether its supervisor destroys it.
        reason: why it drains, or how it failed.
        caches: the shared caches in it, by key.
        changed: set, and replaced by a new event, whenever the tasks that wait for the sandbox have to check again.
    """

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
    ends_at: float | None = None
    end_is_known: bool = True
    destroying: bool = False
    reason: str = ""
    caches: dict[str, Cache] = field(default_factory=dict)
    pool_tenant: str | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def apply_event(self, event: SandboxEvent) -> None:
        """Move the sandbox into the state that an event leads to.

        Raises:
            IllegalTransition: the event cannot happen in the present state.
        """
        self.state = next_sandbox_state(self.state, event)
        self.notify_waiters()

    def notify_waiters(self) -> None:
        """Let the tasks that wait for a change of the sandbox check again."""
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    @property
    def pool_id(self) -> PoolId:
        """The pool of the sandbox."""
        return PoolId(self.pool, self.pool_tenant)

    @property
    def fields(self) -> dict[str, Any]:
        """The fields that identify it in log lines and events."""
        return {"sandbox_id": self.sandbox_id, **self.pool_id.fields}

    @property
    def reachable(self) -> bool:
        """Whether there is a link to its agent now."""
        return self.agent is not None and self.agent.is_connected

    def ready_wall(self, clock: Clock) -> float | None:
        """When its agent answered for the first time, in Unix seconds by the present wall clock."""
        return None if self.ready_at is None else wall_at(clock, self.ready_at)

    def record(self, clock: Clock) -> SandboxRecord:
        """The record from which another service adopts it."""
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
            why=self.reason,
            pool_tenant=self.pool_tenant,
        )

    @classmethod
    def restored(cls, record: SandboxRecord, spec: PoolSpec, clock: Clock) -> Sandbox:
        """Restore the sandbox of a record. Wall-clock times become monotonic ones.

        Args:
            record: the record.
            spec: the pool's spec, for a record that has none.
            clock: monotonic and wall time.
        """
        made_with = record.spec or spec
        # The agent ends itself by a clock of its own, so an agent that still runs has some time left, whatever the wall clock shows.
        oldest_s = max(0.0, made_with.max_lifetime_s + made_with.max_lease_s - ADOPTED_SANDBOX_GRACE_S)
        return cls(
            sandbox_id=record.sandbox_id,
            pool=record.pool,
            spec=made_with,
            created_wall=record.created_at,
            state=record.state,
            handle=record.handle,
            boot=record.boot,
            ready_at=None if record.ready_at is None else max(monotonic_at(clock, record.ready_at), clock.monotonic() - oldest_s),
            reason=record.why,
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
    if spec.slots_have_network and spec.network == "internet" and "internet" not in report.capability_names("network"):
        raise CreateFailed(f"mode {report.isolation!r} cannot give slots networks of their own here, and the pool asks for network: internet", permanent=True)
    missing = {"bash_stateful", "tmux"} - report.capability_names("tools") if spec.require_stateful_sandbox else set()
    if missing:
        problems = {tool: report.tool_problem(tool) for tool in sorted(missing)}
        lacking = ", ".join(f"{tool} ({problem})" if problem else tool for tool, problem in problems.items())
        raise CreateFailed(f"the pool asks for require_stateful_sandbox, and this agent lacks {lacking}", permanent=True)
