"""Tool calls and their results."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class Reason(enum.StrEnum):
    """How a call ended. The HTTP contract defines this closed set."""

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
    """What caused the end of a call that did not succeed: nothing, the policy (the model), the infrastructure (this service), or unknown."""

    NONE = "none"
    POLICY = "policy"
    INFRA = "infra"
    AMBIGUOUS = "ambiguous"


FAULTS_OF: Mapping[Reason, tuple[Fault, ...]] = {
    Reason.EXIT: (Fault.NONE,),
    Reason.TIMEOUT: (Fault.POLICY, Fault.AMBIGUOUS),
    Reason.NO_OUTPUT_TIMEOUT: (Fault.POLICY, Fault.AMBIGUOUS),
    Reason.OOM: (Fault.POLICY, Fault.AMBIGUOUS),
    Reason.RESOURCE_LIMIT: (Fault.POLICY, Fault.AMBIGUOUS),
    Reason.INVALID_ARGS: (Fault.POLICY, Fault.INFRA),
    Reason.TOOL_ERROR: (Fault.POLICY,),
    Reason.CANCELLED: (Fault.NONE,),
    Reason.LEASE_LOST: (Fault.AMBIGUOUS,),
    Reason.SANDBOX_LOST: (Fault.INFRA, Fault.POLICY, Fault.AMBIGUOUS),
    Reason.BACKEND_ERROR: (Fault.INFRA,),
    Reason.CALL_CONFLICT: (Fault.INFRA,),
    Reason.NOT_IMPLEMENTED: (Fault.INFRA,),
}
"""The faults that a result with each reason may have. The first is the fault of a result without evidence for another one."""
FAULT_OF: Mapping[Reason, Fault] = {reason: faults[0] for reason, faults in FAULTS_OF.items()}
"""The fault of a result without evidence for another one."""

NOT_RECORDED = frozenset({Reason.BACKEND_ERROR, Reason.LEASE_LOST, Reason.CALL_CONFLICT, Reason.NOT_IMPLEMENTED})
"""A result with one of these reasons is not recorded: a repeated call with the same id is executed."""

DEFAULT_OUTPUT_LIMIT_BYTES = 50_000
"""The `output_limit_bytes` of a call that names none."""

LARGE_OUTPUT_BYTES = 64 << 10
"""The output of a result is kept in a file if it is larger than this."""


@dataclass(frozen=True, kw_only=True, slots=True, weakref_slot=True)
class OutputFile:
    """The output of a result in a file of the service.

    Attributes:
        path: the path of the file. The file exists at least as long as this object.
        size_bytes: the size of the file.
        stdout_bytes: where the file holds standard output and then standard error: the size of standard output. None otherwise.
    """

    path: str
    size_bytes: int
    stdout_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """One unit of work in a slot. It is validated and has every default, except those that the pool decides.

    `timeout_s`: None for the pool's `default_timeout_s`.
    """

    call_id: str
    lease_id: str
    tool: str
    args: Mapping[str, Any]
    timeout_s: float | None = None
    no_output_timeout_s: float | None = None
    output_limit_bytes: int = DEFAULT_OUTPUT_LIMIT_BYTES
    separate_streams: bool = False
    encoding: str = "utf-8"


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The result of a tool call.

    `output` is the bounded output of the process as bytes, which the api package decodes. An output in `output_file` is not in memory too.
    """

    call_id: str
    lease_id: str
    reason: Reason
    fault: Fault
    exit_code: int | None = None
    output: bytes = b""
    stdout: bytes | None = None
    stderr: bytes | None = None
    error: str = ""
    output_bytes: int = 0
    truncated: bool = False
    encoding: str = "utf-8"
    started_at: float = 0.0
    duration_s: float = 0.0
    cpu_s: float = 0.0
    max_rss_bytes: int = 0
    metadata: Mapping[str, Any] = field(default_factory=dict)
    tool_ok: bool = False
    output_file: OutputFile | None = None

    @property
    def is_separate(self) -> bool:
        """Whether the result has standard output and standard error separately."""
        if self.output_file is not None:
            return self.output_file.stdout_bytes is not None
        return self.stdout is not None or self.stderr is not None

    @property
    def held_bytes(self) -> int:
        """The size of the outputs in memory, in bytes."""
        return len(self.output) + len(self.stdout or b"") + len(self.stderr or b"")

    @property
    def success(self) -> bool:
        """Whether the process exited with code 0, or a file tool succeeded."""
        return self.reason is Reason.EXIT and (self.exit_code == 0 or self.tool_ok)
