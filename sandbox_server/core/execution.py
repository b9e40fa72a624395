"""Tool calls and what they come to."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class Reason(enum.StrEnum):
    """How a call ended; the closed set of the HTTP contract."""

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
    """Who is to blame."""

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
    Reason.SANDBOX_LOST: (Fault.INFRA, Fault.POLICY),
    Reason.BACKEND_ERROR: (Fault.INFRA,),
    Reason.CALL_CONFLICT: (Fault.INFRA,),
    Reason.NOT_IMPLEMENTED: (Fault.INFRA,),
}
"""Every fault that a result with this reason may have; the first is the one that needs no further proof."""
FAULT_OF: Mapping[Reason, Fault] = {reason: faults[0] for reason, faults in FAULTS_OF.items()}

NOT_RECORDED = frozenset({Reason.BACKEND_ERROR, Reason.LEASE_LOST, Reason.CALL_CONFLICT, Reason.NOT_IMPLEMENTED})


LARGE_OUTPUT_BYTES = 64 << 10
"""A result with more output than this keeps it in a file."""


@dataclass(frozen=True, kw_only=True, slots=True, weakref_slot=True)
class OutputFile:
    """The output of a result, in a file of the service.

    Args:
        path: the file. It is there as long as this value is.
        size_bytes: how much it holds.
        stdout_bytes: where standard error is apart: so much from the start is standard output, the rest is standard error.
    """

    path: str
    size_bytes: int
    stdout_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """One unit of work in a slot, checked and with every default filled in but the pool's.

    `timeout_s` None means the pool's `default_timeout_s`.
    """

    call_id: str
    lease_id: str
    tool: str
    args: Mapping[str, Any]
    timeout_s: float | None = None
    no_output_timeout_s: float | None = None
    output_limit_bytes: int = 50_000
    separate_streams: bool = False
    encoding: str = "utf-8"


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What a tool call came to. `output` is what the process wrote, bounded, as bytes; the api decodes it. Where it is in `output_file`, it is nowhere else."""

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
        """Whether standard output and standard error are apart."""
        if self.output_file is not None:
            return self.output_file.stdout_bytes is not None
        return self.stdout is not None or self.stderr is not None

    @property
    def held_bytes(self) -> int:
        """How much output it holds in memory."""
        return len(self.output) + len(self.stdout or b"") + len(self.stderr or b"")

    @property
    def success(self) -> bool:
        """`exit` with code 0, or a file tool that did its work."""
        return self.reason is Reason.EXIT and (self.exit_code == 0 or self.tool_ok)
