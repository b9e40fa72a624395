"""The values of the service: pool specs, sandboxes, slots and leases. They are frozen and have no behaviour except properties."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalSpec:
    """The settings of the local backend. `expose`: absolute paths of this machine that slots can read."""

    expose: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class NomadSpec:
    """The settings of the Nomad backend."""

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
    """The settings of the Modal backend."""

    app_name: str = "atropos-sandbox"
    gpu: str | None = None
    secrets: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolSpec:
    """The specification of a pool. The names and defaults of the fields are those of the pool spec in the HTTP contract."""

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
    allow_hosts: tuple[str, ...] | None = None
    allow_private: tuple[str, ...] = ()
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
        """The largest number of slots that the pool can have."""
        return self.max_sandboxes * self.slots_per_sandbox

    @property
    def reserved_slots(self) -> int:
        """The number of slots that the pool has even without any acquire: those of `min_sandboxes` and `warm_slots`, in whole sandboxes."""
        warm = -(-self.warm_slots // self.slots_per_sandbox)
        return min(max(self.min_sandboxes, warm), self.max_sandboxes) * self.slots_per_sandbox

    @property
    def slots_have_network(self) -> bool:
        """Whether a slot of this pool has network access when it is granted without restrictions."""
        return self.allow_network and self.network != "none"


@dataclass(frozen=True, slots=True)
class PoolId:
    """Identifies a pool. Names are unique for each tenant.

    `tenant`: the owner; None for a pool that belongs to no tenant, such as those of the settings file.
    """

    name: str
    tenant: str | None = None

    @property
    def key(self) -> str:
        """The owner and the name in one string. It is unique, because the name of a pool cannot contain a slash."""
        return self.name if self.tenant is None else f"{self.tenant}/{self.name}"

    @property
    def fields(self) -> dict[str, Any]:
        """The fields that identify the pool in log lines and events."""
        return {"pool": self.name, "pool_tenant": self.tenant}

    @property
    def labels(self) -> dict[str, str]:
        """The labels that identify the pool in metrics."""
        return {"pool": self.name, "pool_tenant": self.tenant or ""}


class SandboxState(enum.StrEnum):
    """The state of a sandbox. `lifecycle.py` lists the transitions."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"
    GONE = "gone"


class SlotState(enum.StrEnum):
    """The state of a slot. `lifecycle.py` lists the transitions."""

    READY = "ready"
    LEASED = "leased"
    RESETTING = "resetting"
    KEPT = "kept"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotRef:
    """Identifies a slot: its sandbox, and its id within the sandbox."""

    sandbox_id: str
    slot_id: str

    @property
    def name(self) -> str:
        """A name that is unique among all sandboxes: `SANDBOX/SLOT`. The slot id alone is unique only within its sandbox."""
        return f"{self.sandbox_id}/{self.slot_id}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Handle:
    """Everything that is needed to find a sandbox again. A backend's `create` yields a handle after each step of the creation.

    Attributes:
        backend: the name of the backend.
        pool: the `PoolId.key` of the pool.
        owner: the id of the service that created the sandbox.
        sandbox_id: the id of the sandbox.
        address: the address of the agent once it can be reached: `unix:PATH`, `tls:HOST:PORT` or `stdio:ANYTHING`.
        token: authenticates the service to the agent.
        certificate: authenticates the agent to the service, in PEM; only for `tls:`.
        data: JSON values that only the backend uses.
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
    """A validated acquire. `wait_s`: None for the pool's `acquire_timeout_s`."""

    tenant: str
    pool: str
    count: int = 1
    trajectory_ids: tuple[str | None, ...] = (None,)
    run_id: str | None = None
    ttl_s: float = 300.0
    wait_s: float | None = None
    allow_network: bool | None = None
    allow_hosts: tuple[str, ...] | None = None
    cache: str = "none"
    priority: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)
    request_key: str | None = None


class LeaseState(enum.StrEnum):
    """Whether a lease is held, or how it ended."""

    HELD = "held"
    RELEASED = "released"
    EXPIRED = "expired"
    SANDBOX_LOST = "sandbox_lost"


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """The time-bounded right to use one slot. Times are wall-clock times in Unix seconds; the monotonic deadlines are in the lease book."""

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
    end_evidence: Mapping[str, Any] = field(default_factory=dict)  # what the agent reported about why it ended
    pool_tenant: str | None = None  # the owner of the pool; None if it belongs to no tenant
    read_only: tuple[str, ...] = ()  # the entries at the top of the workspace that the slot can no longer change
    allow_hosts: tuple[str, ...] | None = None  # the only hosts that the slot may reach; None: all that its pool permits

    @property
    def pool_id(self) -> PoolId:
        """The id of the pool that the slot belongs to."""
        return PoolId(self.pool, self.pool_tenant)

    @property
    def slot(self) -> SlotRef:
        """The slot that the lease holds."""
        return SlotRef(sandbox_id=self.sandbox_id, slot_id=self.slot_id)


@dataclass(frozen=True, kw_only=True, slots=True)
class Acquired:
    """The result of an acquire: the leases, and how long it waited for them in seconds."""

    leases: tuple[Lease, ...]
    waited_s: float


class PoolState(enum.StrEnum):
    """Whether a pool accepts acquires. Its slot counts and its last error show whether it can serve them now."""

    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimantView:
    """What a client can see of the claimant: the acquire for which a pool holds the slots that come free.

    `held_slots`: how many slots are held now. `waited_s`: how long the acquire has waited, in seconds.
    """

    tenant: str
    run_id: str | None
    count: int
    held_slots: int
    waited_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolView:
    """What a client can see of a pool.

    Some of its attributes:
        tenant: the owner; None for a pool that belongs to no tenant.
        shared: whether every tenant may use it.
        effective: the limits in effect for each slot, as the agent that reported last says; empty before the first report.
        last_error: why it cannot create sandboxes; of a draining pool, why it drains and when it is removed.
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
    """What a client can see of a sandbox."""

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
