"""The messages about tool calls: how a call is written for an agent, and what an agent sends back, checked.

Nothing that an agent sends is trusted: types, sizes and closed sets are checked here, and what does not fit is left out or refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

from sandbox_server.core.execution import Reason, Result, ToolCall
from sandbox_server.core.fault import fault_of_result
from sandbox_server.link.errors import AgentProtocolError

MAX_OUTPUT_BYTES = 32 << 20
"""No result has more output than this: twice the largest output that a call may ask for, and the marks where it is cut."""
MAX_ERROR_CHARS = 4000
MAX_METADATA_BYTES = 64 << 10
MAX_METADATA_DEPTH = 16
MAX_EXACT_NUMBER = 1 << 53
"""Every integer up to this one is exact in JSON, where a number may be read as a float."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningCall:
    """A call that has not ended.

    Args:
        output_bytes: how much output it has written so far.
        started_at: when it started, in seconds of the wall clock; None where the agent does not say.
        encoding: the encoding that the call asked for.
    """

    output_bytes: int
    started_at: float | None
    encoding: str


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputHeader:
    """How much output of a call there is.

    Args:
        total_bytes: how much the call has written.
        available_bytes: how much of that the agent still has.
        is_done: whether the call has ended.
    """

    total_bytes: int
    available_bytes: int
    is_done: bool


class ResultMessage(NamedTuple):
    """An agent's message that a call has ended. `to_result` checks it and makes it a result. A named tuple, because one is made for every call.

    Args:
        call_id: the call that the agent names; None where it names none.
        encoding: the encoding that the call asked for. Agents that an older service created do not know it and mean `utf-8`.
        waiting_sizes_bytes: the sizes of the outputs that the agent keeps until they are fetched: one, or standard output and standard error;
            None where the message carries the output.
        raw_meta: the message as the agent sent it, unchecked.
        raw_body: the output as the agent sent it, unchecked.
    """

    call_id: str | None
    encoding: str
    waiting_sizes_bytes: tuple[int, ...] | None
    raw_meta: Mapping[str, Any]
    raw_body: bytes

    def to_result(self, call: ToolCall) -> Result:
        """Make the result of a call; without output where the output is still to be fetched.

        Args:
            call: the call that the message is about. The ids and the encoding of the result are the call's.

        Raises:
            AgentProtocolError: a field of the message has a wrong value.
        """
        meta, body = self.raw_meta, self.raw_body
        try:
            reason = Reason(str(meta.get("reason")))
            lengths = [] if self.waiting_sizes_bytes is not None else _read_lengths(meta.get("lens", []), body)
            error = str(meta.get("error") or "")[:MAX_ERROR_CHARS] if reason is not Reason.EXIT else ""
            metadata = _with_evidence(reason, _read_metadata(meta.get("metadata")), error)
            exit_code = _read_exit_code(meta.get("exit_code"))
        except ValueError as problem:
            raise AgentProtocolError(f"the agent's result is not valid: {problem}") from None
        is_separate = len(lengths) == 2
        return Result(
            call_id=call.call_id,
            lease_id=call.lease_id,
            reason=reason,
            fault=fault_of_result(reason, metadata),
            exit_code=exit_code,
            output=b"" if is_separate else body,
            stdout=body[: lengths[0]] if is_separate else None,
            stderr=body[lengths[0] :] if is_separate else None,
            error=error,
            output_bytes=int(_read_number(meta.get("output_bytes"))),
            truncated=meta.get("truncated") is True,
            encoding=call.encoding,
            started_at=_read_number(meta.get("started_at")),
            duration_s=_read_number(meta.get("duration_s")),
            cpu_s=_read_number(meta.get("cpu_s")),
            max_rss_bytes=int(_read_number(meta.get("max_rss_bytes"))),
            metadata=metadata,
            tool_ok=meta.get("tool_ok") is True,
        )


def call_message(call: ToolCall, timeout_s: float) -> dict[str, object]:
    """Write a call for an agent.

    Args:
        call: the call.
        timeout_s: how long it may run, in seconds.
    """
    return {
        "call_id": call.call_id,
        "tool": call.tool,
        "args": call.args,
        "timeout_s": timeout_s,
        "no_output_timeout_s": call.no_output_timeout_s,
        "output_limit_bytes": call.output_limit_bytes,
        "separate_streams": call.separate_streams,
        "encoding": call.encoding,
    }


def read_result_message(meta: Mapping[str, Any], body: bytes) -> ResultMessage:
    """Read an agent's message that a call has ended."""
    call_id = meta.get("call_id")
    return ResultMessage(
        call_id=call_id if isinstance(call_id, str) else None,
        encoding=_read_encoding(meta),
        waiting_sizes_bytes=_read_waiting_sizes(meta),
        raw_meta=meta,
        raw_body=body,
    )


def read_running_call(meta: Mapping[str, Any]) -> RunningCall:
    """Read an agent's message about a call that has not ended."""
    return RunningCall(output_bytes=_read_count(meta.get("output_bytes")), started_at=_read_time(meta.get("started_at")), encoding=_read_encoding(meta))


def read_output_header(meta: Mapping[str, Any]) -> OutputHeader:
    """Read an agent's message that precedes the output of a call."""
    total_bytes, available_bytes = _read_count(meta.get("total_bytes")), _read_count(meta.get("available_bytes"))
    return OutputHeader(total_bytes=total_bytes, available_bytes=available_bytes, is_done=meta.get("state") == "done")


def read_content_size(meta: Mapping[str, Any]) -> int | None:
    """Read an agent's message that precedes the content of a file: its size in bytes, or None if that is no possible size."""
    size_bytes = meta.get("size_bytes")
    return size_bytes if type(size_bytes) is int and 0 <= size_bytes <= MAX_EXACT_NUMBER else None


def _read_encoding(meta: Mapping[str, Any]) -> str:
    return "base64" if meta.get("encoding") == "base64" else "utf-8"


def _read_waiting_sizes(meta: Mapping[str, Any]) -> tuple[int, ...] | None:
    sizes = meta.get("lens")
    if meta.get("output_waits") is not True or not isinstance(sizes, list) or not 1 <= len(sizes) <= 2:
        return None
    if not all(type(n) is int and n >= 0 for n in sizes) or sum(sizes) > MAX_OUTPUT_BYTES:
        return None
    return tuple(sizes)


def _with_evidence(reason: Reason, metadata: dict[str, Any], error: str) -> dict[str, Any]:
    """Every result but an `exit` has evidence: the agent's sentence where the agent gave nothing else."""
    if reason is Reason.EXIT or isinstance(metadata.get("evidence"), dict):
        return metadata
    return {**metadata, "evidence": {"detail": error}}


def _read_lengths(lengths: object, body: bytes) -> list[int]:
    if not isinstance(lengths, list) or len(lengths) > 2 or not all(type(n) is int and n >= 0 for n in lengths) or sum(lengths) != len(body):
        raise ValueError("the lengths of its output do not add up")
    return lengths


def _read_metadata(value: object) -> dict[str, Any]:
    """Check the size and depth of the metadata: one result that cannot be serialised must not take the others of its batch with it."""
    if not isinstance(value, dict) or not value:
        return {}
    if _depth(value) > MAX_METADATA_DEPTH:
        raise ValueError(f"its metadata is nested more than {MAX_METADATA_DEPTH} deep")
    try:
        size_bytes = len(orjson.dumps(value))
    except TypeError as error:
        raise ValueError(f"its metadata is not JSON: {error}") from None
    if size_bytes > MAX_METADATA_BYTES:
        raise ValueError(f"its metadata has {size_bytes} bytes, and {MAX_METADATA_BYTES} are allowed")
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


def _read_exit_code(value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 255:
        raise ValueError(f"its exit code is {str(value)[:40]}")
    return value


def _read_number(value: Any) -> float:
    return float(value) if type(value) in (int, float) and 0 <= value < MAX_EXACT_NUMBER else 0.0


def _read_count(value: object) -> int:
    return value if type(value) is int and 0 <= value < MAX_EXACT_NUMBER else 0


def _read_time(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and 0 <= value < MAX_EXACT_NUMBER else None
