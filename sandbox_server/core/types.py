"""The nouns of the service: pool specs, sandboxes, slots, leases. Frozen values, no behaviour beyond reading themselves."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalSpec:
    """What only the local backend knows. `expose`: absolute paths of this machine that slots see read-only."""

    expose: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class NomadSpec:
    """What only the Nomad backend knows."""

    address: str = "http://localhost:4646"
    job_id: str = "atropos-sandbox"
    datacenters: tuple[str, ...] = ("dc1",)
    driver: str = "docker"
    singularity_image: str | None = None
    privileged: bool = False
    purge_job_on_start: bool = False
    mhz_per_core: int = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class ModalSpec:
    """What only the Modal backend knows."""

    app_name: str = "atropos-sandbox"
    gpu: str | None = None
    secrets: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolSpec:
    """What one pool is made of. Field names and defaults are those of the HTTP contract's pool spec."""

    backend: str = "local"
    image: str | None = None
    slots_per_sandbox: int = 10
    min_sandboxes: int = 1
    max_sandboxes: int = 5
    warm_slots: int = 0
    dedicated: bool = False
    idle_timeout_s: float = 120.0
    max_lifetime_s: float = 3600.0
    max_lease_s: float = 86400.0
    min_lease_life_s: float = 1800.0
    acquire_timeout_s: float = 60.0
    default_timeout_s: float = 30.0
    max_timeout_s: float = 3600.0
    allow_network: bool = True
    network: str = "shared"
    require_sandbox: bool = False
    require_stateful_sandbox: bool = False
    allow_none: bool = False
    root: str = "read-only"
    cpu: float | None = None
    memory_mb: int | None = None
    slot_memory_mb: int | None = None
    slot_processes: int = 512
    slot_disk_mb: int | None = None
    max_file_mb: int = 1024
    env_vars: Mapping[str, str] = field(default_factory=dict)
    workspace_base: str = "/data"
    on_shutdown: str = "keep"
    delete_after_idle_s: float | None = None
    local: LocalSpec = LocalSpec()
    nomad: NomadSpec = NomadSpec()
    modal: ModalSpec = ModalSpec()
    shared: bool = False

    @property
    def max_slots(self) -> int:
        """More than this many slots the pool can never hold."""
        return self.max_sandboxes * self.slots_per_sandbox

    @property
    def reserved_slots(self) -> int:
        """So many slots the pool has whether anybody asks for them or not: its minimum, and its warm slots, in whole sandboxes."""
        warm = -(-self.warm_slots // self.slots_per_sandbox)
        return min(max(self.min_sandboxes, warm), self.max_sandboxes) * self.slots_per_sandbox

    @property
    def slots_have_network(self) -> bool:
        """Whether a slot of this pool starts with the sandbox's network."""
        return self.allow_network and self.network != "none"


@dataclass(frozen=True, slots=True)
class PoolId:
    """Which pool: names are per tenant. `tenant`: who owns it; None: no tenant does, as with those of the settings file."""

    name: str
    tenant: str | None = None

    @property
    def key(self) -> str:
        """Both in one text, unlike that of any other pool: no name of a pool holds a slash."""
        return self.name if self.tenant is None else f"{self.tenant}/{self.name}"

    @property
    def fields(self) -> dict[str, Any]:
        """What log lines and events say of it."""
        return {"pool": self.name, "pool_tenant": self.tenant}

    @property
    def labels(self) -> dict[str, str]:
        """What metrics say of it."""
        return {"pool": self.name, "pool_tenant": self.tenant or ""}


class SandboxState(enum.StrEnum):
    """Where a sandbox is in its life. The allowed moves are in `lifecycle.py`."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"
    GONE = "gone"


class SlotState(enum.StrEnum):
    """Where a slot is in its life. The allowed moves are in `lifecycle.py`."""

    READY = "ready"
    LEASED = "leased"
    RESETTING = "resetting"
    KEPT = "kept"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotRef:
    """Which slot, of which sandbox."""

    sandbox_id: str
    slot_id: str

    @property
    def name(self) -> str:
        """What the slot is called outside of its sandbox, where each agent counts its own: `SANDBOX/SLOT`."""
        return f"{self.sandbox_id}/{self.slot_id}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Handle:
    """How a created sandbox is found again: what a backend's `create` yields, step by step.

    `pool` is the key of its pool's id. `address` is set once an agent can be reached: `unix:PATH`, `tls:HOST:PORT` or `stdio:ANYTHING`.
    `token` authenticates the service to the agent, `certificate` (PEM, for `tls:`) the agent to the service. `data` is the backend's own, JSON values only.
    """

    backend: str
    pool: str
    owner: str
    sandbox_id: str
    address: str | None = None
    token: str | None = field(default=None, repr=False)
    certificate: str | None = None
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class AcquireRequest:
    """One acquire, checked. `wait_s` None means the pool's `acquire_timeout_s`."""

    tenant: str
    pool: str
    count: int = 1
    trajectory_ids: tuple[str | None, ...] = (None,)
    run_id: str | None = None
    ttl_s: float = 300.0
    wait_s: float | None = None
    allow_network: bool | None = None
    cache: str = "none"
    priority: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)
    request_key: str | None = None


class LeaseState(enum.StrEnum):
    """Whether a lease holds, or how it ended."""

    HELD = "held"
    RELEASED = "released"
    EXPIRED = "expired"
    SANDBOX_LOST = "sandbox_lost"


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """The time-bounded right to use one slot. Times are wall-clock Unix seconds; deadlines are the book's, monotonic."""

    lease_id: str
    epoch: int
    pool: str
    sandbox_id: str
    slot_id: str
    tenant: str
    trajectory_id: str | None
    run_id: str | None
    state: LeaseState
    ttl_s: float
    acquired_at: float
    expires_at: float
    workspace: str
    isolation: str
    allow_network: bool
    cache: str = "none"
    workspace_kept: bool = False
    sandbox_ends_at: float | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    ended_at: float | None = None
    end_detail: str = ""
    end_evidence: Mapping[str, Any] = field(default_factory=dict)  # what its end rests on, where its slot's agent has said so
    pool_tenant: str | None = None  # who owns the pool; None: no tenant

    @property
    def pool_id(self) -> PoolId:
        """Which pool its slot is of."""
        return PoolId(self.pool, self.pool_tenant)

    @property
    def slot(self) -> SlotRef:
        """Where the lease's work runs."""
        return SlotRef(sandbox_id=self.sandbox_id, slot_id=self.slot_id)


@dataclass(frozen=True, kw_only=True, slots=True)
class Acquired:
    """What an acquire came to."""

    leases: tuple[Lease, ...]
    waited_s: float


class PoolState(enum.StrEnum):
    """Whether a pool takes acquires. Whether it can serve them now, its slots and its last error say."""

    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimantView:
    """The acquire for which a pool holds what comes free. `held_slots`: how many it holds now; `waited_s`: since the acquire came."""

    tenant: str
    run_id: str | None
    count: int
    held_slots: int
    waited_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolView:
    """What a caller may see of a pool.

    `tenant`: who owns it; None: no tenant does. `shared`: every tenant may use it.
    `effective`: the limits that hold for each slot, as the agent that spoke last said; empty before the first has.
    `last_error`: why it cannot make sandboxes, or, where it drains, why it does and when it is gone.
    """

    name: str
    tenant: str | None
    shared: bool
    state: PoolState
    spec: PoolSpec
    origin: str
    isolation: str | None
    capabilities: Mapping[str, Any]
    effective: Mapping[str, int | None]
    slots: Mapping[str, int]
    sandboxes: Mapping[str, int]
    queue: int
    claimant: ClaimantView | None
    last_error: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxView:
    """What a caller may see of a sandbox."""

    sandbox_id: str
    pool: str
    pool_tenant: str | None
    backend: str
    state: SandboxState
    isolation: str | None
    slots: Mapping[str, int]
    created_at: float
    ends_at: float | None
    last_error: str | None
