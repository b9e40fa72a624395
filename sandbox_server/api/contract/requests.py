"""The pydantic models of request bodies: they check requests, and the OpenAPI document is made from them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from sandbox_server.agent.allowed_hosts import MAX_ENTRIES
from sandbox_server.api.limits import MAX_OUTPUT_LIMIT_BYTES
from sandbox_server.core.execution import DEFAULT_OUTPUT_LIMIT_BYTES
from sandbox_server.dispatch.run_batch.values import MAX_JSON_ITEMS

CALL_ID_PATTERN = r"^[A-Za-z0-9._:-]{1,128}$"


def _no_control_characters(text: str) -> str:
    if CONTROL.search(text):
        raise ValueError("must not hold NUL or other control characters")
    return text


def _entry_of_workspace(name: str) -> str:
    if name in (".", "..") or "/" in name or "\0" in name:
        raise ValueError("must be the name of an entry at the top of the workspace, without /")
    try:
        is_too_long = len(name.encode()) > MAX_ENTRY_NAME_BYTES
    except UnicodeEncodeError:
        raise ValueError("must be text that UTF-8 can represent") from None
    if is_too_long:
        raise ValueError(f"must have at most {MAX_ENTRY_NAME_BYTES} bytes in UTF-8")
    return name


def _empty_for_null(value: Any) -> Any:
    return {} if value is None else value


MAX_ENTRY_NAME_BYTES = 255
MAX_ARTIFACTS = 100
CONTROL = re.compile("[\x00-\x1f\x7f]")
Name = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_no_control_characters)]
EntryName = Annotated[str, Field(min_length=1, max_length=MAX_ENTRY_NAME_BYTES), AfterValidator(_entry_of_workspace)]
LabelValue = Annotated[str, Field(max_length=1024), AfterValidator(_no_control_characters)]
Arguments = Annotated[dict[str, Any], BeforeValidator(_empty_for_null)]
Seconds = Annotated[float, Field(gt=0, le=31_536_000)]
TtlSeconds = Annotated[float, Field(ge=1, le=86_400)]
LeaseId = Annotated[str, Field(min_length=1, max_length=256)]


class RequestModel(BaseModel):
    """A JSON object that a client sends. Unknown fields are refused, and no value is converted to another type."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class AcquireBody(RequestModel):
    """Acquire one slot, or a gang of slots."""

    pool: Name | None = Field(default=None, description="default: the service's default pool")
    count: int = Field(default=1, ge=1, le=1_000_000, description="more than one is a gang: all of its slots are granted at once, or none")
    trajectory_id: Name | None = None
    trajectory_ids: list[Name] | None = Field(default=None, description="one for each slot of a gang")
    run_id: Name | None = None
    ttl_s: TtlSeconds = 300.0
    wait_s: float | None = Field(default=None, ge=0, description="how long to queue; default and upper bound: the pool's acquire_timeout_s")
    allow_network: bool | None = Field(default=None, description="false: no network, even if the pool has one")
    allow_hosts: list[str] | None = Field(
        default=None, max_length=MAX_ENTRIES, description="the only hosts that the slots may reach, in pools with network: internet; may only narrow the pool's"
    )
    cache: Literal["none", "rw"] = "none"
    priority: int = Field(default=0, ge=-1_000_000, le=1_000_000)
    labels: dict[Name, LabelValue] = Field(default_factory=dict)
    request_key: Name | None = Field(default=None, description="the same key and body returns the same leases, for an hour")


class ReleaseBody(RequestModel):
    """End some leases, all leases of a run, or those of one acquire."""

    lease_ids: list[LeaseId] | None = None
    run_id: Name | None = None
    request_key: Name | None = Field(default=None, description="that of an acquire: it is refused if it still waits, is being granted, or arrives later")
    reset_workspace: bool = True


class RenewBody(RequestModel):
    """Extend leases."""

    lease_ids: list[LeaseId]
    ttl_s: TtlSeconds = 300.0


class CancelBody(RequestModel):
    """Cancel one call."""

    lease_id: LeaseId
    call_id: str = Field(pattern=CALL_ID_PATTERN)


class CallBody(RequestModel):
    """One tool call."""

    lease_id: str
    tool: str
    call_id: str | None = Field(default=None, pattern=CALL_ID_PATTERN, description="default: a generated id")
    args: Arguments = Field(default_factory=dict)
    timeout_s: Seconds | None = Field(default=None, description="default: the pool's default_timeout_s; at most its max_timeout_s")
    no_output_timeout_s: Seconds | None = None
    output_limit_bytes: int = Field(default=DEFAULT_OUTPUT_LIMIT_BYTES, ge=0, le=MAX_OUTPUT_LIMIT_BYTES)
    separate_streams: bool = False
    encoding: Literal["utf-8", "base64"] = "utf-8"


class ExecBody(CallBody):
    """One tool call of the lease in the path: its own fields, or the short form `{"command"}`."""

    lease_id: str = Field(default="", description="if given, the lease of the path")
    tool: str = "bash"
    command: str | None = Field(default=None, description='short for `{"tool": "bash", "args": {"command": …}}`')


class ExecBatchBody(RequestModel):
    """Tool calls over any number of leases. The calls of one lease run in the order given; those of different leases run in parallel.

    A call with another invalid field than `lease_id` or `tool` does not make the request fail: its result is `invalid_args`.
    """

    model_config = ConfigDict(extra="ignore")

    calls: list[CallBody] = Field(min_length=1, max_length=1000)


class Base64File(RequestModel):
    """The content of a file that is not text."""

    base64: str


class ProgramBody(RequestModel):
    """One item of a run-batch: a program that runs in a fresh slot of its own."""

    tool: str
    args: Any = Field(default=None, description="the arguments of the tool; wrong ones are the item's result `invalid_args`")
    files: dict[str, str | Base64File] = Field(default_factory=dict, description="what is written into the workspace first, by path")
    timeout_s: Seconds | None = Field(default=None, description="default: the pool's default_timeout_s; at most its max_timeout_s")
    output_limit_bytes: int = Field(default=DEFAULT_OUTPUT_LIMIT_BYTES, ge=0, le=MAX_OUTPUT_LIMIT_BYTES)
    artifacts: list[str] = Field(default_factory=list, max_length=MAX_ARTIFACTS, description="the files that are read at the end, by path")
    allow_network: bool | None = Field(default=None, description="false: no network, even if the pool has one")


class RunBatchHeader(RequestModel):
    """The fields of a run-batch besides its items; with NDJSON the first line."""

    pool: Name | None = Field(default=None, description="default: the service's default pool")
    run_id: Name | None = Field(default=None, description="default: one of the run-batch's own")
    request_key: Name | None = Field(default=None, description="the same key and body returns the same results, for an hour")
    max_parallel: int | None = Field(default=None, ge=1, le=1_000_000, description="default: half of the pool's slots")


class RunBatchBody(RunBatchHeader):
    """Run many programs, each in a fresh slot of its own."""

    items: list[ProgramBody] = Field(min_length=1, max_length=MAX_JSON_ITEMS)


class NarrowBody(RequestModel):
    """Take rights away from a held slot."""

    allow_network: Literal[False] | None = None
    cache: Literal["none"] | None = None
    read_only: list[EntryName] | None = Field(
        default=None, min_length=1, max_length=64, description="entries at the top of the workspace that the slot can no longer change"
    )


class LocalSpecBody(RequestModel):
    """The settings of a pool on the local backend."""

    expose: list[str] = Field(default_factory=list, description="absolute paths of this machine that slots see read-only")


class NomadSpecBody(RequestModel):
    """The settings of a pool on the Nomad backend."""

    address: str = "http://localhost:4646"
    job_id: str = "atropos-sandbox"
    datacenters: list[str] = Field(default=["dc1"])
    driver: str = "docker"
    singularity_image: str | None = None
    privileged: bool = False
    purge_job_on_start: bool = False
    mhz_per_core: int = Field(default=1000, ge=1)


class ModalSpecBody(RequestModel):
    """The settings of a pool on the Modal backend."""

    app_name: str = "atropos-sandbox"
    gpu: str | None = None
    secrets: list[str] = Field(default_factory=list)


class PoolSpecBody(RequestModel):
    """The spec of a pool. A field that is not given has its default."""

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
    allow_hosts: list[str] | None = Field(default=None, max_length=MAX_ENTRIES, description="with network: internet, the only hosts that slots may reach")
    allow_private: list[str] = Field(
        default_factory=list, max_length=MAX_ENTRIES, description="with network: internet, private networks that slots may reach; only admins set it"
    )
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
    shared: bool = Field(default=False, description="whether every tenant may use the pool; only admins set it")


def first_problem(error: ValidationError, allowed: Mapping[str, Any]) -> tuple[str, str]:
    """The first error in a body, as (field, sentence). The arguments are those of `all_problems`."""
    return next(all_problems(error, allowed))


def all_problems(error: ValidationError, allowed: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """All errors in a body, at least one, each as (field, sentence).

    Args:
        error: the error that pydantic raised.
        allowed: the fields of the body, which the sentence about an unknown field names.
    """
    return (_problem(found, allowed) for found in error.errors(include_url=False, include_input=False))


def _problem(found: ErrorDetails, allowed: Mapping[str, Any]) -> tuple[str, str]:
    field = ".".join(str(part) for part in found["loc"]) or "body"
    if found["type"] == "extra_forbidden":
        known = f"; there are {', '.join(allowed)}" if len(found["loc"]) == 1 else ""
        return field, f"{field}: unknown field{known}"
    if found["type"] == "missing":
        return field, f"{field}: missing"
    return field, f"{field}: {_rephrase(found['msg'])}"


WORDS = {
    "Value error, ": "",
    "Input should be": "should be",
    "String should": "should",
    "List should": "should",
    "a valid dictionary": "an object",
    "a valid string": "a text",
    "a valid boolean": "true or false",
    "be False": "be false",
    "be True": "be true",
}
"""Phrases in pydantic's messages, and the phrases for people who write JSON that replace them."""


def _rephrase(message: str) -> str:
    for phrase, replacement in WORDS.items():
        message = message.replace(phrase, replacement)
    return message
