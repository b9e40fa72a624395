"""What the service answers as JSON, as the OpenAPI document is made from it. Fields may be added, never renamed."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Answer(BaseModel):
    """What the service sends. Fields may be added, never renamed."""

    model_config = ConfigDict(extra="allow")


class LeaseAnswer(Answer):
    """The time-bounded right to use one slot."""

    lease_id: str
    epoch: int
    pool: str
    sandbox_id: str
    slot_id: str
    trajectory_id: str | None
    run_id: str | None
    tenant: str
    state: Literal["held", "released", "expired", "sandbox_lost"]
    acquired_at: float
    expires_at: float
    sandbox_ends_at: float | None
    workspace: str
    workspace_kept: bool
    isolation: str
    allow_network: bool
    cache: str
    labels: dict[str, str]


class AcquireAnswer(Answer):
    """The leases, and how long they took."""

    leases: list[LeaseAnswer]
    waited_s: float


class ResultAnswer(Answer):
    """What a tool call came to."""

    call_id: str
    lease_id: str
    success: bool
    exit_code: int | None
    reason: Literal[
        "exit",
        "timeout",
        "no_output_timeout",
        "oom",
        "resource_limit",
        "invalid_args",
        "tool_error",
        "cancelled",
        "lease_lost",
        "sandbox_lost",
        "backend_error",
        "call_conflict",
        "not_implemented",
    ]
    fault: Literal["none", "policy", "infra", "ambiguous"]
    output: str = Field(description="empty with `separate_streams`: see metadata.stdout and metadata.stderr")
    error: str
    output_bytes: int
    truncated: bool
    encoding: Literal["utf-8", "base64"]
    started_at: float
    duration_s: float
    cpu_s: float
    max_rss_bytes: int
    metadata: dict[str, Any]


class ExecBatchAnswer(Answer):
    """The results, in the order of the calls."""

    results: list[ResultAnswer]


class ReleaseAnswer(Answer):
    """Which leases have ended, and which were never yours."""

    released: list[str]
    unknown: list[str]


class LostLease(Answer):
    """A lease that could not be renewed."""

    lease_id: str
    code: str
    detail: str


class RenewAnswer(Answer):
    """The leases that live on, and those that do not."""

    leases: list[LeaseAnswer]
    lost: list[LostLease]


class LeasesAnswer(Answer):
    """One page of leases."""

    leases: list[LeaseAnswer]
    next_cursor: str | None = None


class CallAnswer(Answer):
    """Where a call is."""

    state: Literal["running", "done"]
    output_bytes: int | None = None
    started_at: float | None = None
    result: ResultAnswer | None = None


class FileEntry(Answer):
    """One name in a folder of a slot."""

    path: str
    type: str
    size_bytes: int
    mode: Any
    mtime: float


class FilesAnswer(Answer):
    """What a folder of a slot holds."""

    entries: list[FileEntry]
    next_cursor: str | None = None


class ClaimantAnswer(Answer):
    """The acquire for which a pool holds every slot that comes free."""

    count: int
    held_slots: int = Field(description="how many slots are held for it now")
    waited_s: float
    tenant: str | None = Field(default=None, description="only for admins, and for the tenant whose it is; `run_id` too")
    run_id: str | None = None


class PoolAnswer(Answer):
    """A pool and what it holds now."""

    name: str
    tenant: str | None = Field(description="who owns it; null: no tenant does")
    shared: bool = Field(description="every tenant may use it")
    state: Literal["ready", "draining"] = Field(description="draining: it takes no acquires, and is gone when its last lease has ended")
    spec: dict[str, Any]
    origin: str
    isolation: str | None
    capabilities: dict[str, Any]
    effective: dict[str, int | None] = Field(description="the limits that hold for each slot now, in MiB; empty before the first sandbox has started")
    slots: dict[str, int]
    sandboxes: dict[str, int]
    queue: int
    claimant: ClaimantAnswer | None = Field(description="the acquire that has waited so long that what comes free is held for it; null: none")
    last_error: str | None = Field(description="why it cannot make sandboxes; of a pool that drains, why it does and when it is gone")


class PoolsAnswer(Answer):
    """One page of pools."""

    pools: list[PoolAnswer]
    next_cursor: str | None = None


class SlotCheck(Answer):
    """What became of the leftovers that were planted in one slot."""

    sandbox_id: str
    slot_id: str
    planted: list[Any] = Field(description="what was planted")
    found: list[Any] = Field(description="what the reset found and removed")
    left: list[Any] = Field(description="what survived it")
    clean: bool
    duration_s: float


class VerifyAnswer(Answer):
    """The self-test of a pool's reset."""

    pool: str
    slots: list[SlotCheck]
    clean: bool


class SandboxAnswer(Answer):
    """A sandbox and what its slots are doing."""

    sandbox_id: str
    pool: str
    pool_tenant: str | None = Field(description="who owns the pool; null: no tenant does")
    backend: str
    state: Literal["starting", "ready", "draining", "failed", "gone"]
    isolation: str | None
    slots: dict[str, int]
    created_at: float
    ends_at: float | None
    last_error: str | None


class SandboxesAnswer(Answer):
    """One page of sandboxes."""

    sandboxes: list[SandboxAnswer]
    next_cursor: str | None = None


class HealthAnswer(Answer):
    """The process answers."""

    status: Literal["ok"]


class ReadyAnswer(Answer):
    """Whether leases can be had, pool by pool."""

    ready: bool
    pools: dict[str, Any]
    storage: dict[str, Any] = Field(description="`ready`: whether the state can be recorded; `last_error`: why not, and what to do")
    warnings: list[str] = Field(description="what the service cannot protect where it runs now")


class ProblemAnswer(Answer):
    """An error (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    request_id: str
