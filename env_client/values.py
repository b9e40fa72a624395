"""The frozen values that the client returns and accepts. Fields of a response that only a newer service knows are ignored."""

from __future__ import annotations

import base64
import dataclasses
import enum
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypedDict, TypeVar, cast

from env_client.errors import BadAnswer, ServiceError
from env_client.type_checks import check_type

V = TypeVar("V")


class Reason(enum.StrEnum):
    """How a call ended. `Result.reason` is a plain string, because a newer service may send further reasons."""

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
    """Who is to blame for the end of a call: `policy` is the model, `infra` is the service or its machines."""

    NONE = "none"
    POLICY = "policy"
    INFRA = "infra"
    AMBIGUOUS = "ambiguous"


class AcquireOptions(TypedDict, total=False):
    """The options of an acquire besides pool and count. The service uses its default for an option that is missing or None."""

    #: For an acquire of one slot: the trajectory that holds the lease.
    trajectory_id: str | None
    #: For a gang: the trajectory of each lease.
    trajectory_ids: list[str] | None
    #: The run that owns the leases; releasing the run releases all of them.
    run_id: str | None
    #: How long the lease lasts without a renewal, in seconds (1 to 86,400; default 300).
    ttl_s: float | None
    #: How long the acquire may be queued, in seconds; 0 for not at all. Default and upper bound: the pool's `acquire_timeout_s`.
    wait_s: float | None
    #: False takes the network away; True cannot give a network that the pool denies.
    allow_network: bool | None
    #: The only hosts that the slots may reach, in pools with `network: internet`: names, `*.name`, IPv4 networks. It may only narrow the pool's.
    allow_hosts: list[str] | None
    #: `none`, or `rw` for the set-up cache.
    cache: str | None
    #: Acquires with a higher priority are served first, among those of the same tenant.
    priority: int | None
    #: Labels of the lease, for finding it in lists.
    labels: dict[str, str] | None
    #: Identifies the acquire: a repeated request with the same key gets the same leases. Default: a new key, which is released if the acquire is cancelled.
    request_key: str | None


class CallOptions(TypedDict, total=False):
    """The options of a tool call besides tool and args. The service uses its default for an option that is missing or None."""

    #: Identifies the call: a repeated request with the same id never runs the call twice. Default: a new id.
    call_id: str | None
    #: How long the call may take until its whole process tree is killed, in seconds. Default: the pool's `default_timeout_s`.
    timeout_s: float | None
    #: How long the call may write nothing until it is killed, in seconds. Default: unlimited.
    no_output_timeout_s: float | None
    #: How many bytes of output the result contains; more is cut out of the middle. Default 50,000.
    output_limit_bytes: int | None
    #: Return stdout and stderr separately, in `metadata`.
    separate_streams: bool | None
    #: The encoding of the output: `utf-8`, or `base64` for exact bytes.
    encoding: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One tool call of a batch. The fields other than the first three are those of `CallOptions`.

    `args` may be anything that a model has written: the service checks it, and a mistake in it is reported in the result of the call.

    Raises:
        InvalidRequest: another field has the wrong type, which is a mistake of the program that creates the call.
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
        for name, types in _OPTION_TYPES.items():
            check_type(name, getattr(self, name), *types, type(None))


_OPTION_TYPES: Mapping[str, tuple[type, ...]] = {
    "call_id": (str,),
    "timeout_s": (int, float),
    "no_output_timeout_s": (int, float),
    "output_limit_bytes": (int,),
    "separate_streams": (bool,),
    "encoding": (str,),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The result of a tool call. A command that fails gives a result, never an error."""

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
        """Whether the service stopped while the call ran. Sending the same call again joins it, or runs it if it never started."""
        return self.reason == Reason.BACKEND_ERROR and self.metadata.get("stopping") is True

    def raw_output(self) -> bytes:
        """Return the output as bytes: the exact bytes if the call asked for `base64`, else the text in UTF-8.

        Raises:
            BadAnswer: the output is not valid base64.
        """
        if self.encoding != "base64":
            return self.output.encode()
        try:
            return base64.b64decode(self.output, validate=True)
        except ValueError as error:
            raise BadAnswer(f"the output of call {self.call_id} is not valid base64") from error


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
    read_only: Sequence[str] = ()  # the entries at the top of the workspace that the slot can no longer change
    allow_hosts: Sequence[str] | None = None  # the only hosts that the slot may reach; None: all that its pool permits


@dataclass(frozen=True, kw_only=True, slots=True)
class Acquired:
    """The leases of one acquire, and how long it was queued, in seconds."""

    leases: tuple[LeaseInfo, ...]
    waited_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Released:
    """The leases that are released (now, or because they had ended before), and the ids that the service does not know."""

    released: tuple[str, ...]
    unknown: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Renewed:
    """The renewed leases, and for each lease that was not renewed, by its id, the error that says how it ended."""

    leases: tuple[LeaseInfo, ...]
    lost: Mapping[str, ServiceError]


@dataclass(frozen=True, kw_only=True, slots=True)
class LeasePage:
    """One page of leases. `next_cursor` asks for the next page; None on the last page."""

    leases: tuple[LeaseInfo, ...]
    next_cursor: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolInfo:
    """A pool: its spec, its capabilities, and the numbers of its slots and sandboxes in each state.

    `state` is empty if the service is of an older version that does not send it. `tenant` is the owner, None if the pool has none. `shared` says
    whether every tenant may use the pool.
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
    #: The acquire for which the pool holds every slot that becomes free: `count`, `held_slots`, `waited_s`, and its tenant if this tenant may see it.
    claimant: Mapping[str, Any] | None = None
    last_error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """One entry of a folder; `mtime` is in Unix seconds."""

    path: str
    type: str = "file"
    size_bytes: int = 0
    mode: str | int = 0
    mtime: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Readiness:
    """Whether the service is ready, and its report about its pools."""

    ready: bool
    report: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Page(Generic[V]):
    """One page of a list. `next_cursor` asks for the next page; None on the last page."""

    items: tuple[V, ...]
    next_cursor: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CallStatus:
    """The state of a call: `running` with the number of bytes that it has written, or `done` with its result."""

    state: str
    output_bytes: int = 0
    started_at: float = 0.0
    result: Result | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """A piece of a call's output; `offset` is the position of its end in the whole output, in bytes."""

    data: bytes
    offset: int

    @property
    def text(self) -> str:
        """The piece as text. A character that is cut at an end of the piece is replaced by U+FFFD."""
        return self.data.decode("utf-8", "replace")


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """A change in the service, such as `lease.acquired`. `id` resumes the stream of events after it; `at` is in Unix seconds."""

    kind: str
    id: str = ""
    at: float = 0.0
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolChange:
    """A pool after a `pool_put`, and whether the pool was created."""

    pool: PoolInfo
    created: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxInfo:
    """A sandbox as the service last described it. `pool_tenant` is the owner of its pool, None if the pool has none."""

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
    """The verification of one slot.

    `planted` are the leftovers that were planted, `found` the kinds of trace that were there before the reset and not after it, `left` the kinds that
    survived the reset. `detail` says why the slot could not be verified, if that is so.
    """

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
    """Whether the slots of a pool are clean after a reset, for the pool and for each slot."""

    pool: str
    clean: bool
    slots: tuple[SlotCheck, ...] = ()


@functools.cache
def _field_names(cls: Any) -> tuple[tuple[str, ...], frozenset[str]]:
    """Return the names of all fields of a value class, and of those without a default."""
    fields = dataclasses.fields(cls)
    required = frozenset(f.name for f in fields if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING)
    return tuple(f.name for f in fields), required


def read_value(cls: type[V], document: Any) -> V:
    """Create a value from a JSON object.

    Args:
        cls: one of the frozen classes above.
        document: the decoded JSON.

    Raises:
        BadAnswer: the document is not an object, or lacks a field without a default.
    """
    if not isinstance(document, dict):
        raise BadAnswer(f"the service sent {type(document).__name__} instead of {cls.__name__}")
    names, required = _field_names(cast(Any, cls))
    known = {name: document[name] for name in names if name in document}
    if not required <= known.keys():
        raise BadAnswer(f"the service sent {cls.__name__} without {', '.join(sorted(required - known.keys()))}")
    return cls(**known)
