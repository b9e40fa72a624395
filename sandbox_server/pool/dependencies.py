"""The dependencies of every pool: the clock, the store, the functions that connect to agents and make ids, and limits. No logic."""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from sandbox_server.core.clock import Clock
from sandbox_server.core.types import AcquireRequest
from sandbox_server.link import AgentEndpoint, AgentLink
from sandbox_server.link.agent_link import RESPONSE_TIMEOUT_S
from sandbox_server.pool.events import EventLog
from sandbox_server.pool.leasing.serving_rules import CLAIM_AFTER_S
from sandbox_server.pool.timers import LoopTimers, Timers
from sandbox_server.store.base import Store


class Connect(Protocol):
    """The function that connects to an agent: `link.connect`, or that of a fake."""

    async def __call__(self, endpoint: AgentEndpoint, timeout_s: float) -> AgentLink:
        """Connect and exchange hellos.

        Raises:
            LinkLost: no agent answers there.
        """
        ...


class Meter(Protocol):
    """Takes measurements. `telemetry.Telemetry` exports them as metrics."""

    def count(self, name: str, **labels: str) -> None:
        """Add one to a counter."""
        ...

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Add one measured value."""
        ...


class NoMeter:
    """A meter that discards every measurement."""

    def count(self, name: str, **labels: str) -> None:
        """Do nothing."""

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Do nothing."""


def new_lease_id() -> str:
    """Make an id that cannot be guessed."""
    return "l-" + secrets.token_urlsafe(16)


def new_sandbox_id() -> str:
    """Make an id that every backend accepts as a name."""
    return "s-" + secrets.token_hex(8)


def same_weight(tenant: str) -> float:
    """Give every tenant the same weight."""
    return 1.0


def no_maximum(tenant: str) -> int | None:
    """Limit no tenant."""
    return None


def admit_all(request: AcquireRequest) -> bool:
    """Let every acquire be served."""
    return True


@dataclass(frozen=True, kw_only=True)
class PoolLimits:
    """The limits of all pools together.

    Attributes:
        max_waiters: how many acquires may wait in one pool.
        max_pools: how many pools there may be.
        creations_at_once: how many sandboxes may be in creation on one backend at the same time; None: as many as the backend's traits say.
        creations_per_s: how many creations may begin on one backend in one second; None: as many as the backend's traits say.
    """

    max_waiters: int = 10_000
    max_pools: int = 1000
    creations_at_once: int | None = None
    creations_per_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class PoolDependencies:
    """The dependencies of every pool.

    Attributes:
        store: keeps the records that must survive a crash.
        clock: monotonic and wall time.
        connect: connects to an agent.
        response_timeout_s: for how long an agent may be silent while it owes a response that it can give at once, in seconds.
        timers: waits, and calls functions later.
        meter: takes measurements.
        events: the log of events of all pools.
        weight: returns a tenant's weight in the queue, more than 0.
        max_leases: returns how many leases a tenant may hold, wait for and have slots reserved for; None if there is no limit.
        max_slots: returns how many slots all pools of a tenant may have together; None if there is no limit.
        max_waiters: returns how many acquires of a tenant may wait; None if there is no limit.
        admits: returns whether the limits of its tenant let a waiting acquire be served now.
        claim_after_s: how long a tenant's first acquire waits before its pool holds free slots for it, in seconds.
        jitter: returns a random number from 0 to 1.
        lease_id: makes the id of a lease.
        sandbox_id: makes the id of a sandbox.
        limits: the limits of all pools together.
    """

    store: Store
    clock: Clock
    connect: Connect
    response_timeout_s: float = RESPONSE_TIMEOUT_S
    timers: Timers = field(default_factory=LoopTimers)
    meter: Meter = field(default_factory=NoMeter)
    events: EventLog = field(default_factory=EventLog)
    weight: Callable[[str], float] = same_weight
    max_leases: Callable[[str], int | None] = no_maximum
    max_slots: Callable[[str], int | None] = no_maximum
    max_waiters: Callable[[str], int | None] = no_maximum
    admits: Callable[[AcquireRequest], bool] = admit_all
    claim_after_s: float = CLAIM_AFTER_S
    jitter: Callable[[], float] = random.random
    lease_id: Callable[[], str] = new_lease_id
    sandbox_id: Callable[[], str] = new_sandbox_id
    limits: PoolLimits = PoolLimits()
