"""What goes over HTTP as JSON, as pydantic sees it: requests are checked with these, the OpenAPI document is made from all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sandbox_server.api.limits import DEFAULT_OUTPUT_LIMIT_BYTES, MAX_OUTPUT_LIMIT_BYTES

CALL_ID_PATTERN = r"^[A-Za-z0-9._:-]{1,128}$"

Name = Annotated[str, Field(min_length=1, max_length=256)]
Seconds = Annotated[float, Field(gt=0, le=31_536_000)]
TtlSeconds = Annotated[float, Field(ge=1, le=86_400)]
LeaseId = Annotated[str, Field(min_length=1, max_length=256)]


class Body(BaseModel):
    """What a caller sends: unknown fields are refused by name, nothing is converted."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class AcquireBody(Body):
    """Ask for one slot, or for a gang of them."""

    pool: Name | None = Field(default=None, description="default: the service's default pool")
    count: int = Field(default=1, ge=1, le=1_000_000, description="more than one is a gang: all or nothing")
    trajectory_id: Name | None = None
    trajectory_ids: list[Name] | None = Field(default=None, description="one for each slot of a gang")
    run_id: Name | None = None
    ttl_s: TtlSeconds = 300.0
    wait_s: float | None = Field(default=None, ge=0, description="how long to queue; default and upper bound: the pool's acquire_timeout_s")
    allow_network: bool | None = Field(default=None, description="may only narrow the pool's")
    cache: Literal["none", "rw"] = "none"
    priority: int = Field(default=0, ge=-1_000_000, le=1_000_000)
    labels: dict[Name, Annotated[str, Field(max_length=1024)]] = Field(default_factory=dict)
    request_key: Name | None = Field(default=None, description="the same key and body returns the same leases, for an hour")


class ReleaseBody(Body):
    """Give slots back: by lease, or all of a run."""

    lease_ids: list[LeaseId] | None = None
    run_id: Name | None = None
    reset_workspace: bool = True


class RenewBody(Body):
    """Let leases live on."""

    lease_ids: list[LeaseId]
    ttl_s: TtlSeconds = 300.0


class CancelBody(Body):
    """End one call."""

    lease_id: LeaseId
    call_id: str = Field(pattern=CALL_ID_PATTERN)


class CallBody(Body):
    """One tool call."""

    lease_id: str
    tool: str
    call_id: str | None = Field(default=None, pattern=CALL_ID_PATTERN, description="default: a new one")
    args: dict[str, Any] = Field(default_factory=dict)
    timeout_s: Seconds | None = Field(default=None, description="default: the pool's default_timeout_s; at most its max_timeout_s")
    no_output_timeout_s: Seconds | None = None
    output_limit_bytes: int = Field(default=DEFAULT_OUTPUT_LIMIT_BYTES, ge=0, le=MAX_OUTPUT_LIMIT_BYTES)
    separate_streams: bool = False
    encoding: Literal["utf-8", "base64"] = "utf-8"


class ExecBody(CallBody):
    """One tool call of the lease in the path: its own fields, or the short form `{"command"}`."""

    lease_id: str = Field(default="", description="if given, the one of the path")
    tool: str = "bash"
    command: str | None = Field(default=None, description='short for `{"tool": "bash", "args": {"command": …}}`')


class ExecBatchBody(Body):
    """Tool calls over any number of leases. Calls of one lease run in the order given, leases side by side.

    What is wrong with one call beyond its `lease_id` and `tool` is that call's own result, `invalid_args`.
    """

    model_config = ConfigDict(extra="ignore")

    calls: list[CallBody] = Field(min_length=1, max_length=1000)


class NarrowBody(Body):
    """Take rights away from a held slot."""

    allow_network: Literal[False] | None = None
    cache: Literal["none"] | None = None


class LocalSpecBody(Body):
    """What only the local backend knows."""

    expose: list[str] = Field(default_factory=list, description="absolute paths of this machine that slots see read-only")


class NomadSpecBody(Body):
    """What only the Nomad backend knows."""

    address: str = "http://localhost:4646"
    job_id: str = "atropos-sandbox"
    datacenters: list[str] = Field(default_factory=lambda: ["dc1"])
    driver: str = "docker"
    singularity_image: str | None = None
    privileged: bool = False
    purge_job_on_start: bool = False
    mhz_per_core: int = Field(default=1000, ge=1)


class ModalSpecBody(Body):
    """What only the Modal backend knows."""

    app_name: str = "atropos-sandbox"
    gpu: str | None = None
    secrets: list[str] = Field(default_factory=list)


class PoolSpecBody(Body):
    """What one pool is made of; a missing field has its default."""

    backend: Literal["local", "docker", "nomad", "modal"] = "local"
    image: str | None = None
    slots_per_sandbox: int = Field(default=10, ge=1, le=1000)
    min_sandboxes: int = Field(default=1, ge=0, le=10_000)
    max_sandboxes: int = Field(default=5, ge=1, le=10_000)
    warm_slots: int = Field(default=0, ge=0, le=100_000)
    dedicated: bool = False
    idle_timeout_s: Seconds = 120.0
    max_lifetime_s: Seconds = 3600.0
    max_lease_s: Seconds = 86400.0
    min_lease_life_s: float = Field(default=1800.0, ge=0)
    acquire_timeout_s: float = Field(default=60.0, ge=0, le=86_400)
    default_timeout_s: Seconds = 30.0
    max_timeout_s: Seconds = 3600.0
    allow_network: bool = True
    network: Literal["shared", "none", "internet"] = "shared"
    require_sandbox: bool = False
    require_stateful_sandbox: bool = False
    allow_none: bool = False
    root: Literal["read-only", "overlay"] = "read-only"
    cpu: float | None = Field(default=None, gt=0, le=4096)
    memory_mb: int | None = Field(default=None, ge=16)
    slot_memory_mb: int | None = Field(default=None, ge=16)
    slot_processes: int = Field(default=512, ge=4, le=1_000_000)
    slot_disk_mb: int | None = Field(default=None, ge=1)
    max_file_mb: int = Field(default=1024, ge=1)
    env_vars: dict[str, str] = Field(default_factory=dict)
    workspace_base: str = "/data"
    on_shutdown: Literal["keep", "destroy"] = "keep"
    delete_after_idle_s: Seconds | None = None
    local: LocalSpecBody = Field(default_factory=LocalSpecBody)
    nomad: NomadSpecBody = Field(default_factory=NomadSpecBody)
    modal: ModalSpecBody = Field(default_factory=ModalSpecBody)


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


class PoolAnswer(Answer):
    """A pool and what it holds now."""

    name: str
    spec: dict[str, Any]
    origin: str
    isolation: str | None
    capabilities: dict[str, Any]
    slots: dict[str, int]
    sandboxes: dict[str, int]
    queue: int
    last_error: str | None


class PoolsAnswer(Answer):
    """All pools."""

    pools: list[PoolAnswer]


class HealthAnswer(Answer):
    """The process answers."""

    status: Literal["ok"]


class ReadyAnswer(Answer):
    """Whether leases can be had, pool by pool."""

    ready: bool
    pools: dict[str, Any]


class ProblemAnswer(Answer):
    """An error (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    request_id: str


def first_problem(error: ValidationError, allowed: Mapping[str, Any]) -> tuple[str, str]:
    """The first thing that is wrong with a body, as (field, sentence).

    Args:
        error: what pydantic found.
        allowed: the fields of the body, to name them where one is unknown.
    """
    first = error.errors(include_url=False, include_input=False)[0]
    field = ".".join(str(part) for part in first["loc"]) or "body"
    if first["type"] == "extra_forbidden":
        known = f"; there are {', '.join(allowed)}" if len(first["loc"]) == 1 else ""
        return field, f"{field}: unknown field{known}"
    if first["type"] == "missing":
        return field, f"{field}: missing"
    return field, f"{field}: {_lower(first['msg'])}"


def _lower(message: str) -> str:
    return message.replace("Input should be", "should be").replace("String should", "should")
