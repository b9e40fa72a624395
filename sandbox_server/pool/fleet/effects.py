"""The actions that a pool must carry out after a change of its state. `Fleet` and `GrantService` return them; `EffectRunner` carries them out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sandbox_server.core.types import Lease
from sandbox_server.pool.fleet.sandbox import Cache
from sandbox_server.store.base import SandboxRecord


@dataclass(frozen=True, slots=True)
class RecordSandbox:
    """Write the state of a sandbox to the store."""

    record: SandboxRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishEvent:
    """Publish an event that only admins see."""

    kind: str
    data: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class CountMetric:
    """Add one to a counter."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AnnounceLeaseBegin:
    """Publish that a lease has begun, and make it known to the lease directory."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class AnnounceLeaseEnd:
    """Publish that a lease has ended, and make it known to the lease directory."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class DestroySandbox:
    """Have the supervisor of a sandbox destroy it."""

    sandbox_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DropCache:
    """Have the agent of a sandbox delete a shared cache."""

    sandbox_id: str
    cache: Cache


@dataclass(frozen=True, slots=True)
class WaitForAdoptedCalls:
    """Have the agent report when no call runs any more in the slot of an adopted lease."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class RefuseUnservableWaiters:
    """Refuse the acquires that could only be served by a sandbox which cannot be created."""


Effect = (
    RecordSandbox
    | PublishEvent
    | CountMetric
    | AnnounceLeaseBegin
    | AnnounceLeaseEnd
    | DestroySandbox
    | DropCache
    | WaitForAdoptedCalls
    | RefuseUnservableWaiters
)
