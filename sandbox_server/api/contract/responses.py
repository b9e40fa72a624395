"""The pydantic models of response bodies, from which the OpenAPI document is made. `render` makes the responses."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class ResponseModel(BaseModel):
    """A JSON object that the service sends. Fields may be added in later versions; none is renamed."""

    model_config = ConfigDict(extra="allow")


class LeaseAnswer(ResponseModel):
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
    read_only: list[str] = Field(default_factory=list, description="only if entries of the workspace are read-only")
    allow_hosts: list[str] | None = Field(default=None, description="only if the acquire had it: the only hosts that the slot may reach")


class AcquireAnswer(ResponseModel):
    """The leases that were granted, and how long the request waited for them."""

    leases: list[LeaseAnswer]
    waited_s: float


class ResultAnswer(ResponseModel):
    """The result of a tool call."""

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
    output: str = Field(description="the output; with `separate_streams` it is empty, and metadata.stdout and metadata.stderr hold the output")
    error: str
    output_bytes: int
    truncated: bool
    encoding: Literal["utf-8", "base64"]
    started_at: float
    duration_s: float
    cpu_s: float
    max_rss_bytes: int
    metadata: dict[str, Any]


class ExecBatchAnswer(ResponseModel):
    """The results, in the order of the calls."""

    results: list[ResultAnswer]


class ArtifactAnswer(ResponseModel):
    """A file that was read at the end of an item: its content, or why it could not be read."""

    base64: str | None = None
    error: str | None = None
    code: str | None = Field(default=None, description="the error code that belongs to `error`")


class ItemAnswer(ResultAnswer):
    """The result of an item of a run-batch."""

    index: int = Field(description="the place of the item in the request")
    artifacts: dict[str, ArtifactAnswer]


class RunBatchAnswer(ResponseModel):
    """The results, in the order of the items."""

    results: list[ItemAnswer]


class ReleaseAnswer(ResponseModel):
    """The ids of the leases that have ended, and the ids that are not ids of leases of this tenant."""

    released: list[str]
    unknown: list[str]


class LostLease(ResponseModel):
    """A lease that could not be renewed."""

    lease_id: str
    code: str
    detail: str


class RenewAnswer(ResponseModel):
    """The leases that were extended, and those that could not be."""

    leases: list[LeaseAnswer]
    lost: list[LostLease]


class LeasesAnswer(ResponseModel):
    """One page of leases."""

    leases: list[LeaseAnswer]
    next_cursor: str | None = None


class CallAnswer(ResponseModel):
    """The state of a call."""

    state: Literal["running", "done"]
    output_bytes: int | None = None
    started_at: float | None = None
    result: ResultAnswer | None = None


class FileEntry(ResponseModel):
    """One entry of a folder of a slot."""

    path: str
    type: str
    size_bytes: int
    mode: Any
    mtime: float


class FilesAnswer(ResponseModel):
    """The entries of a folder of a slot."""

    entries: list[FileEntry]
    next_cursor: str | None = None


class ClaimantAnswer(ResponseModel):
    """The waiting acquire for which a pool holds every slot that comes free."""

    count: int
    held_slots: int = Field(description="how many free slots are held for it now")
    waited_s: float
    tenant: str | None = Field(default=None, description="the tenant that waits; like `run_id` shown only to it and to admins")
    run_id: str | None = None


class PoolAnswer(ResponseModel):
    """A pool and its current state."""

    name: str
    tenant: str | None = Field(description="the tenant that owns the pool; null: none")
    shared: bool = Field(description="whether every tenant may use the pool")
    state: Literal["ready", "draining"] = Field(description="draining: the pool gives no new leases, and is gone when its last lease has ended")
    spec: dict[str, Any]
    origin: str
    isolation: str | None
    capabilities: dict[str, Any]
    effective: dict[str, int | None] = Field(description="the limits in force for each slot, in MiB; empty before the first sandbox has started")
    slots: dict[str, int]
    sandboxes: dict[str, int]
    queue: int
    claimant: ClaimantAnswer | None = Field(description="the acquire for which slots that come free are held, because it has waited long; null: none")
    last_error: str | None = Field(description="why the pool cannot create sandboxes; of a draining pool, why it drains and when it is gone")


class PoolsAnswer(ResponseModel):
    """One page of pools."""

    pools: list[PoolAnswer]
    next_cursor: str | None = None


class SlotCheck(ResponseModel):
    """What the reset of one slot did with the files and processes that were left in it for the test."""

    sandbox_id: str
    slot_id: str
    planted: list[Any] = Field(description="what was left in the slot for the test")
    found: list[Any] = Field(description="what the reset found and removed")
    left: list[Any] = Field(description="what the reset did not remove")
    clean: bool
    duration_s: float


class VerifyAnswer(ResponseModel):
    """The report of a test of the reset of a pool's slots."""

    pool: str
    slots: list[SlotCheck]
    clean: bool


class SandboxAnswer(ResponseModel):
    """A sandbox and the states of its slots."""

    sandbox_id: str
    pool: str
    pool_tenant: str | None = Field(description="the tenant that owns the pool; null: none")
    backend: str
    state: Literal["starting", "ready", "draining", "failed", "gone"]
    isolation: str | None
    slots: dict[str, int]
    created_at: float
    ends_at: float | None
    last_error: str | None


class SandboxesAnswer(ResponseModel):
    """One page of sandboxes."""

    sandboxes: list[SandboxAnswer]
    next_cursor: str | None = None


class HealthAnswer(ResponseModel):
    """The process responds."""

    status: Literal["ok"]


class ReadyAnswer(ResponseModel):
    """Whether leases can be acquired, for each pool."""

    ready: bool
    pools: dict[str, Any]
    storage: dict[str, Any] = Field(description="`ready`: whether the service can write its state; `last_error`: why not, and what to do")
    warnings: list[str] = Field(description="what the service cannot protect in the environment that it runs in")


class ProblemAnswer(ResponseModel):
    """A problem document (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    request_id: str
