"""The description of a tool call as the service sends it."""

from __future__ import annotations

import dataclasses
from typing import Any, Mapping

from sandbox_server.agent.errors import InvalidArgs

MAX_OUTPUT_LIMIT_BYTES = 10 << 20
DEFAULT_OUTPUT_LIMIT_BYTES = 50_000
MAX_TIMEOUT_S = 365 * 86400.0  # the service accepts as much, so a call that it has accepted is not refused here
_MAX_CALL_ID_CHARS = 128


@dataclasses.dataclass(frozen=True)
class CallSpec:
    """One tool call.

    Args:
        call_id: names the call within its lease.
        tool: the name of the tool.
        args: the arguments of the tool, not checked yet.
        timeout_s: how long the call may take, in seconds.
        no_output_timeout_s: how long the call may write nothing, in seconds; None: as long as it takes.
        output_limit_bytes: how much output the result carries at most.
        separate_streams: whether standard error is kept apart from standard output.
        encoding: the encoding in which the caller of the service wants the output. The agent only repeats it in its answers.
    """

    call_id: str
    tool: str
    args: Mapping[str, Any]
    timeout_s: float
    no_output_timeout_s: float | None
    output_limit_bytes: int
    separate_streams: bool
    encoding: str = "utf-8"


def parse_call_spec(meta: Mapping[str, Any]) -> CallSpec:
    """Read the description of a call. The arguments of the tool are left for the tool to check.

    Raises:
        InvalidArgs: a field is missing or not valid; the text names it.
    """
    call_id, tool, args = meta.get("call_id"), meta.get("tool"), meta.get("args", {})
    if not isinstance(call_id, str) or not 0 < len(call_id) <= _MAX_CALL_ID_CHARS:
        raise InvalidArgs("call_id must be a string of 1 to %d characters" % _MAX_CALL_ID_CHARS)
    if not isinstance(tool, str):
        raise InvalidArgs("tool must be a string")
    if not isinstance(args, dict):
        raise InvalidArgs("args must be an object")
    limit_bytes = meta.get("output_limit_bytes", DEFAULT_OUTPUT_LIMIT_BYTES)
    if isinstance(limit_bytes, bool) or not isinstance(limit_bytes, int) or not 0 <= limit_bytes <= MAX_OUTPUT_LIMIT_BYTES:
        raise InvalidArgs("output_limit_bytes must be an integer from 0 to %d" % MAX_OUTPUT_LIMIT_BYTES)
    timeout_s = _parse_seconds("timeout_s", meta.get("timeout_s"))
    if timeout_s is None:
        raise InvalidArgs("timeout_s is missing")
    return CallSpec(
        call_id=call_id,
        tool=tool,
        args=args,
        timeout_s=timeout_s,
        no_output_timeout_s=_parse_seconds("no_output_timeout_s", meta.get("no_output_timeout_s")),
        output_limit_bytes=limit_bytes,
        separate_streams=bool(meta.get("separate_streams", False)),
        encoding="base64" if meta.get("encoding") == "base64" else "utf-8",
    )


def _parse_seconds(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= MAX_TIMEOUT_S:
        raise InvalidArgs("%s must be a number of seconds above 0, at most %d" % (name, MAX_TIMEOUT_S))
    return float(value)
