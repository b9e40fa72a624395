"""How a call ended: the agent's word checked and made a result, and the results that the service finds itself.

What the agent says is untrusted: types, sizes and closed sets are checked here, and nothing else is believed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import orjson

from sandbox_server.core.errors import LeaseLost, LeaseNotFound, PoolServiceError, SandboxLost
from sandbox_server.core.execution import FAULT_OF, Fault, Reason, Result, ToolCall

MAX_ERROR_CHARS = 4000
MAX_METADATA_BYTES = 64 << 10
MAX_METADATA_DEPTH = 16
PROOF_OF_OTHER_FAULT: Mapping[Reason, Mapping[str, Fault]] = {
    Reason.TIMEOUT: {"starved": Fault.AMBIGUOUS},
    Reason.NO_OUTPUT_TIMEOUT: {"starved": Fault.AMBIGUOUS},
    Reason.OOM: {"ambiguous": Fault.AMBIGUOUS},
    Reason.RESOURCE_LIMIT: {"ambiguous": Fault.AMBIGUOUS},
    Reason.SANDBOX_LOST: {"own_work": Fault.POLICY, "ambiguous": Fault.AMBIGUOUS},
}
"""The only faults that an agent may give instead of a reason's own: what its evidence must hold for one, `true` or an object with figures.
Of several the first counts.
"""
MAX_FETCHED_BYTES = 32 << 20
"""More output than this no result has: two of the most that a call may ask for, and the lines where they are cut."""


def identity_of(call: ToolCall) -> bytes:
    """What makes two calls of one id the same call: the tool and its arguments."""
    return hashlib.sha256(call.tool.encode() + b"\0" + orjson.dumps(call.args, option=orjson.OPT_SORT_KEYS)).digest()


def agents_encoding(meta: Mapping[str, Any]) -> str:
    """The encoding that the caller of a call wants its output in, as its agent was told; agents made by an older service were not."""
    return "base64" if meta.get("encoding") == "base64" else "utf-8"


def waiting_output(meta: Mapping[str, Any]) -> list[int] | None:
    """The sizes of the outputs that an agent's message says are to be fetched, in bytes; None if the message carries them, or what it says makes no sense."""
    lengths = meta.get("lens")
    if meta.get("output_waits") is not True or not isinstance(lengths, list) or not 1 <= len(lengths) <= 2:
        return None
    if not all(type(n) is int and n >= 0 for n in lengths) or sum(lengths) > MAX_FETCHED_BYTES:
        return None
    return lengths


def agent_result(call: ToolCall, meta: Mapping[str, Any], body: bytes) -> Result:
    """The result that an agent's message says; without the output, where that is to be fetched."""
    try:
        reason = Reason(str(meta.get("reason")))
        lengths = [] if waiting_output(meta) is not None else _lengths(meta.get("lens", []), body)
        error_text = str(meta.get("error") or "")[:MAX_ERROR_CHARS] if reason is not Reason.EXIT else ""
        metadata = _proven(reason, _metadata(meta.get("metadata")), error_text)
        exit_code = _exit_code(meta.get("exit_code"))
    except ValueError as error:
        return service_result(call, Reason.BACKEND_ERROR, f"the agent's answer makes no sense: {error}", may_have_run=True)
    separate = len(lengths) == 2
    return Result(
        call_id=call.call_id,
        lease_id=call.lease_id,
        reason=reason,
        fault=_fault(reason, metadata),
        exit_code=exit_code,
        output=b"" if separate else body,
        stdout=body[: lengths[0]] if separate else None,
        stderr=body[lengths[0] :] if separate else None,
        error=error_text,
        output_bytes=int(_number(meta.get("output_bytes"))),
        truncated=meta.get("truncated") is True,
        encoding=call.encoding,
        started_at=_number(meta.get("started_at")),
        duration_s=_number(meta.get("duration_s")),
        cpu_s=_number(meta.get("cpu_s")),
        max_rss_bytes=int(_number(meta.get("max_rss_bytes"))),
        metadata=metadata,
        tool_ok=meta.get("tool_ok") is True,
    )


def _proven(reason: Reason, metadata: dict[str, Any], error: str) -> dict[str, Any]:
    """Every verdict but `exit` says what it rests on, be it only the sentence."""
    if reason is Reason.EXIT or isinstance(metadata.get("evidence"), dict):
        return metadata
    return {**metadata, "evidence": {"detail": error}}


def _lengths(lengths: object, body: bytes) -> list[int]:
    if not isinstance(lengths, list) or len(lengths) > 2 or not all(type(n) is int and n >= 0 for n in lengths) or sum(lengths) != len(body):
        raise ValueError("the lengths of its output do not add up")
    return lengths


def _metadata(value: object) -> dict[str, Any]:
    """What the agent adds, if it is of a sane size: one answer that cannot be written must not cost the others of its batch."""
    if not isinstance(value, dict):
        return {}
    if _depth(value) > MAX_METADATA_DEPTH:
        raise ValueError(f"its metadata is nested more than {MAX_METADATA_DEPTH} deep")
    try:
        size = len(orjson.dumps(value))
    except TypeError as error:
        raise ValueError(f"its metadata is no JSON: {error}") from None
    if size > MAX_METADATA_BYTES:
        raise ValueError(f"its metadata has {size} bytes, and {MAX_METADATA_BYTES} are allowed")
    return value


def _depth(value: object) -> int:
    deepest, todo = 0, [(value, 1)]
    while todo and deepest <= MAX_METADATA_DEPTH:
        item, depth = todo.pop()
        inner = item.values() if isinstance(item, dict) else item if isinstance(item, list) else None
        if inner is not None:
            deepest = max(deepest, depth)
            todo.extend((below, depth + 1) for below in inner)
    return deepest


def _exit_code(value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 255:
        raise ValueError(f"its exit code is {str(value)[:40]}")
    return value


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not 0 <= value < 1 << 53:
        return 0.0
    return float(value)


def _fault(reason: Reason, metadata: Mapping[str, Any]) -> Fault:
    """Who is to blame. An agent says it by its evidence alone; a `fault` of its own is not looked at."""
    evidence = metadata.get("evidence")
    if isinstance(evidence, dict):
        for key, fault in PROOF_OF_OTHER_FAULT.get(reason, {}).items():
            proof = evidence.get(key)
            if proof is True or (isinstance(proof, dict) and proof):
                return fault
    return FAULT_OF[reason]


def invalid_field_result(call: ToolCall, field: str, error: str) -> Result:
    """The result of a call of which a field beside `tool` and `args` is wrong: no policy fills those in."""
    return replace(service_result(call, Reason.INVALID_ARGS, error, evidence={"field": field, "detail": error}), fault=Fault.INFRA)


def service_result(
    call: ToolCall, reason: Reason, error: str, *, may_have_run: bool | None = None, evidence: Mapping[str, Any] | None = None, started_at: float = 0.0
) -> Result:
    """A result that the service gives itself, without output."""
    metadata: dict[str, Any] = {}
    if may_have_run is not None:
        metadata["may_have_run"] = may_have_run
    metadata["evidence"] = dict(evidence or {"detail": error})
    return Result(
        call_id=call.call_id,
        lease_id=call.lease_id,
        reason=reason,
        fault=_fault(reason, metadata),
        error=error,
        encoding=call.encoding,
        started_at=started_at,
        metadata=metadata,
    )


def lease_error_result(call: ToolCall, error: PoolServiceError) -> Result:
    """The result of a call whose lease has no slot any more, or none that can be reached; it has not been sent."""
    if isinstance(error, SandboxLost):
        return service_result(call, Reason.SANDBOX_LOST, error.detail, evidence=_evidence(error))
    if isinstance(error, LeaseNotFound | LeaseLost):
        lease = "unknown" if isinstance(error, LeaseNotFound) else "ended"
        return service_result(call, Reason.LEASE_LOST, error.detail, evidence={"lease": lease, "detail": error.detail})
    return service_result(call, Reason.BACKEND_ERROR, error.detail, may_have_run=False)


def _evidence(error: SandboxLost) -> Mapping[str, Any]:
    evidence = error.extra.get("evidence")
    return evidence if isinstance(evidence, Mapping) else {"sandbox": error.detail}
