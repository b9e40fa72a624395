"""What every pool is given: the clock, the store, how to connect, how to make ids. Values and functions to inject, no logic."""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from sandbox_server.core.clock import Clock
from sandbox_server.core.types import AcquireRequest
from sandbox_server.link import AgentLink, Endpoint
from sandbox_server.pool.events import EventLog
from sandbox_server.pool.fleet.ticker import LoopTimers, Timers
from sandbox_server.pool.leasing.serving_rules import CLAIM_AFTER_S
from sandbox_server.store.base import Store


class Connect(Protocol):
    """How a link to an agent is made: `link.connect`, or a fake's."""

    async def __call__(self, endpoint: Endpoint, timeout_s: float) -> AgentLink:
        """Connect and exchange hellos.

        Raises:
            LinkLost: nobody answers there as an agent should.
        """
        ...


class Meter(Protocol):
    """Takes figures; `telemetry` makes metrics of them."""

    def count(self, name: str, **labels: str) -> None:
        """One more of these."""
        ...

    def observe(self, name: str, value: float, **labels: str) -> None:
        """One measured value."""
        ...


class NoMeter:
    """Takes figures and keeps none."""

    def count(self, name: str, **labels: str) -> None:
        """Nothing."""

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Nothing."""


def new_lease_id() -> str:
    """An id that nobody can guess."""
    return "l-" + secrets.token_urlsafe(16)


def new_sandbox_id() -> str:
    """An id that is good as a name on any backend."""
    return "s-" + secrets.token_hex(8)


def same_weight(tenant: str) -> float:
    """All tenants weigh the same."""
    return 1.0


def no_maximum(tenant: str) -> int | None:
    """No tenant is limited."""
    return None


def admit_all(request: AcquireRequest) -> bool:
    """No acquire is held up."""
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
    """What every pool is given.

    Attributes:
        weight: a tenant's weight in the queue, more than 0.
        max_leases: how many leases a tenant may hold, wait for and have slots reserved for; None: no limit.
        max_slots: how many slots a tenant's pools may have at most, together; None: no limit.
        max_waiters: how many acquires of a tenant may queue; None: no limit.
        admits: whether its tenant's limits let an acquire that waits be served now.
        claim_after_s: how long a tenant's first waits before its pool holds slots for it, in seconds.
        jitter: a random number from 0 to 1.
    """

    store: Store
    clock: Clock
    connect: Connect
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
