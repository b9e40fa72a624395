"""The frozen values that the client hands out. Fields that only a newer service knows are ignored."""

from __future__ import annotations

import base64
import dataclasses
import enum
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypedDict, TypeVar, cast

from env_client.checks import check_type
from env_client.errors import BadAnswer, ServiceError

V = TypeVar("V")


class Reason(enum.StrEnum):
    """How a call ended. `Result.reason` is a plain string, so that a newer service may know more."""

    EXIT = "exit"
    TIMEOUT = "timeout"
    NO_OUTPUT_TIMEOUT = "no_output_timeout"
    OOM = "oom"
    RESOURCE_LIMIT = "resource_limit"
    INVALID_ARGS = "invalid_args"
    TOOL_ERROR = "tool_error"
    CANCELLED = "cancelled"
    LEASE_LOST = "lease_lost"
    SANDBOX_LOST = "sandbox_lost"
    BACKEND_ERROR = "backend_error"
    CALL_CONFLICT = "call_conflict"
    NOT_IMPLEMENTED = "not_implemented"


class Fault(enum.StrEnum):
    """Who is to blame: `policy` is the model, `infra` is us."""

    NONE = "none"
    POLICY = "policy"
    INFRA = "infra"
    AMBIGUOUS = "ambiguous"


class AcquireOptions(TypedDict, total=False):
    """What an acquire may ask for beside pool and count; what is missing or None has the service's default."""

    #: For one lease: the rollout that holds it.
    trajectory_id: str | None
    #: For a gang: one a lease.
    trajectory_ids: list[str] | None
    #: The job that owns the leases; releasing the run releases them all.
    run_id: str | None
    #: How long the lease holds without being renewed, in seconds (1 to 86,400; default 300).
    ttl_s: float | None
    #: How long to queue, in seconds; 0 answers at once. Default and upper bound: the pool's `acquire_timeout_s`.
    wait_s: float | None
    #: May only narrow the pool's.
    allow_network: bool | None
    #: `none`, or `rw` for the set-up cache.
    cache: str | None
    #: Higher is served first, within a tenant.
    priority: int | None
    labels: dict[str, str] | None
    #: Names the attempt, so that a repeated one gets the same leases. Default: a new one.
    request_key: str | None


class CallOptions(TypedDict, total=False):
    """What a tool call may ask for beside tool and args; what is missing or None has the service's default."""

    #: Names the call: the same one again is never run twice. Default: a new one.
    call_id: str | None
    #: When the call's whole process tree is killed, in seconds. Default: the pool's `default_timeout_s`.
    timeout_s: float | None
    #: How long it may be silent, in seconds.
    no_output_timeout_s: float | None
    #: How much output comes back; the middle is cut. Default 50,000.
    output_limit_bytes: int | None
    #: Stdout and stderr apart, in `metadata`.
    separate_streams: bool | None
    #: `utf-8`, or `base64` for exact bytes.
    encoding: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One tool call to be sent in a batch; the fields are those of `CallOptions`.

    `args` may be whatever a model has said: the service looks at it, and what is wrong with it is the call's own result.

    Raises:
        InvalidRequest: another field is not of its type, which is a mistake of the program that makes the call.
    """

    lease_id: str
    tool: str
    args: Mapping[str, Any] = field(default_factory=dict)
    call_id: str | None = None
    timeout_s: float | None = None
    no_output_timeout_s: float | None = None
    output_limit_bytes: int | None = None
    separate_streams: bool | None = None
    encoding: str | None = None

    def __post_init__(self) -> None:
        for name in ("lease_id", "tool"):
            check_type(name, getattr(self, name), str)
        for name, kinds in _OPTION_KINDS.items():
            check_type(name, getattr(self, name), *kinds, type(None))


_OPTION_KINDS: Mapping[str, tuple[type, ...]] = {
    "call_id": (str,),
    "timeout_s": (int, float),
    "no_output_timeout_s": (int, float),
    "output_limit_bytes": (int,),
    "separate_streams": (bool,),
    "encoding": (str,),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What a tool call came to. A command that fails is a result, never an error."""

    call_id: str
    lease_id: str
    success: bool
    reason: str
    fault: str
    exit_code: int | None = None
    output: str = ""
    error: str = ""
    output_bytes: int = 0
    truncated: bool = False
    encoding: str = "utf-8"
    started_at: float = 0.0
    duration_s: float = 0.0
    cpu_s: float = 0.0
    max_rss_bytes: int = 0
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def unfinished(self) -> bool:
        """Whether the service was told to stop while the call was under way: the same call sent again is joined, or run if it never was."""
        return self.reason == Reason.BACKEND_ERROR and self.metadata.get("stopping") is True

    def raw_output(self) -> bytes:
        """The output as bytes: exactly those written if the call asked for `base64`, else the text's."""
        if self.encoding != "base64":
            return self.output.encode()
        try:
            return base64.b64decode(self.output, validate=True)
        except ValueError as error:
            raise BadAnswer(f"the output of call {self.call_id} is not the base64 it should be") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseInfo:
    """A lease as the service last described it."""

    lease_id: str
    pool: str = ""
    epoch: int = 0
    sandbox_id: str = ""
    slot_id: str = ""
    trajectory_id: str | None = None
    run_id: str | None = None
    tenant: str = ""
    state: str = "held"
    acquired_at: float = 0.0
    expires_at: float = 0.0
    sandbox_ends_at: float | None = None
    workspace: str = "/workspace"
    workspace_kept: bool = False
    isolation: str = ""
    allow_network: bool = True
    cache: str = "none"
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Acquired:
    """The leases of one acquire, and how long it queued, in seconds."""

    leases: tuple[LeaseInfo, ...]
    waited_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Released:
    """Ids of leases that are released now (or had ended before), and ids that the service does not know."""

    released: tuple[str, ...]
    unknown: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Renewed:
    """The leases that hold on, and for each other one by id the error that says how it ended."""

    leases: tuple[LeaseInfo, ...]
    lost: Mapping[str, ServiceError]


@dataclass(frozen=True, kw_only=True, slots=True)
class LeasePage:
    """Some of the leases; `next_cursor` leads to the next page, None is the end."""

    leases: tuple[LeaseInfo, ...]
    next_cursor: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolInfo:
    """A pool: its spec, what it can do, how many slots and sandboxes are in which state; `state` is empty where an older service does not say it.

    `tenant`: who owns it, None where no tenant does; `shared`: every tenant may use it.
    """

    name: str
    tenant: str | None = None
    shared: bool = False
    state: str = ""
    spec: Mapping[str, Any] = field(default_factory=dict)
    origin: str = ""
    isolation: str | None = None
    capabilities: Mapping[str, Any] = field(default_factory=dict)
    effective: Mapping[str, int | None] = field(default_factory=dict)
    slots: Mapping[str, int] = field(default_factory=dict)
    sandboxes: Mapping[str, int] = field(default_factory=dict)
    queue: int = 0
    #: the acquire for which it holds every slot that comes free: `count`, `held_slots`, `waited_s`, and whose it is where that may be seen
    claimant: Mapping[str, Any] | None = None
    last_error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """One entry of a listing; `mtime` in Unix seconds."""

    path: str
    type: str = "file"
    size_bytes: int = 0
    mode: str | int = 0
    mtime: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Readiness:
    """Whether the service is ready, and what it reports about its pools."""

    ready: bool
    report: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Page(Generic[V]):
    """Some of a list; `next_cursor` leads to the next page, None is the end."""

    items: tuple[V, ...]
    next_cursor: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CallStatus:
    """Where a call is: `running` with what it has written so far, or `done` with its result."""

    state: str
    output_bytes: int = 0
    started_at: float = 0.0
    result: Result | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """A piece of a call's output as it comes; `offset` is how many bytes of output there are up to its end."""

    data: bytes
    offset: int

    @property
    def text(self) -> str:
        """The piece as text; a character that is cut in two is not one."""
        return self.data.decode("utf-8", "replace")


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something that changed in the service, such as `lease.acquired`; `id` is where to go on after it."""

    kind: str
    id: str = ""
    at: float = 0.0
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolChange:
    """A pool as it is after a `pool_put`, and whether there was none of that name before."""

    pool: PoolInfo
    created: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxInfo:
    """A sandbox as the service last described it. `pool_tenant`: who owns its pool, None where no tenant does."""

    sandbox_id: str
    pool: str = ""
    pool_tenant: str | None = None
    backend: str = ""
    state: str = ""
    isolation: str | None = None
    slots: Mapping[str, int] = field(default_factory=dict)
    created_at: float = 0.0
    ends_at: float | None = None
    last_error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotCheck:
    """What a verify planted in one slot, which kinds of trace its reset took away, which are left, and where it could not be done, why."""

    slot_id: str
    clean: bool
    sandbox_id: str = ""
    planted: list[Mapping[str, Any]] = field(default_factory=list)
    found: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    detail: str = ""
    duration_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyReport:
    """Whether the slots of a pool are clean after a reset, one by one."""

    pool: str
    clean: bool
    slots: tuple[SlotCheck, ...] = ()


@functools.cache
def _names(cls: Any) -> tuple[tuple[str, ...], frozenset[str]]:
    """All field names of a value, and those without a default."""
    fields = dataclasses.fields(cls)
    required = frozenset(f.name for f in fields if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING)
    return tuple(f.name for f in fields), required


def read_value(cls: type[V], document: Any) -> V:
    """Make a value of a JSON object.

    Args:
        cls: one of the frozen classes above.
        document: the decoded JSON.

    Raises:
        BadAnswer: it is not an object, or lacks a field without a default.
    """
    if not isinstance(document, dict):
        raise BadAnswer(f"the service sent {type(document).__name__} where {cls.__name__} was due")
    names, required = _names(cast(Any, cls))
    known = {name: document[name] for name in names if name in document}
    if not required <= known.keys():
        raise BadAnswer(f"the service sent {cls.__name__} without {', '.join(sorted(required - known.keys()))}")
    return cls(**known)
