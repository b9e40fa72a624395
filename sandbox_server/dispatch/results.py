"""The results of calls: those that agents report, and those that the service gives itself because a lease, a link or a call fails."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sandbox_server.core.clock import Clock
from sandbox_server.core.errors import LeaseLost, LeaseNotFound, PoolServiceError, SandboxLost
from sandbox_server.core.execution import Fault, Reason, Result, ToolCall
from sandbox_server.core.fault import fault_of_result
from sandbox_server.link.call_messages import ResultMessage
from sandbox_server.link.errors import AgentProtocolError


def agent_result(call: ToolCall, message: ResultMessage) -> Result:
    """The result that an agent reports for a call, or a `backend_error` where the report is not valid.

    Args:
        call: the call that was sent.
        message: the agent's message.

    Returns:
        The result; without output where the output is still to be fetched.
    """
    try:
        return message.to_result(call)
    except AgentProtocolError as error:
        return service_result(call, Reason.BACKEND_ERROR, str(error), may_have_run=True)


def service_result(
    call: ToolCall, reason: Reason, error: str, *, may_have_run: bool | None = None, evidence: Mapping[str, Any] | None = None, started_at: float = 0.0
) -> Result:
    """Make a result that the service gives itself, without output.

    Args:
        call: the call.
        reason: how it ended.
        error: the explanation for the client.
        may_have_run: whether the call may have run; None where the reason already says so.
        evidence: what the reason rests on; None for the explanation alone.
        started_at: when it started, in seconds of the wall clock; 0 where it did not.
    """
    metadata: dict[str, Any] = {}
    if may_have_run is not None:
        metadata["may_have_run"] = may_have_run
    metadata["evidence"] = dict(evidence or {"detail": error})
    return Result(
        call_id=call.call_id,
        lease_id=call.lease_id,
        reason=reason,
        fault=fault_of_result(reason, metadata),
        error=error,
        encoding=call.encoding,
        started_at=started_at,
        metadata=metadata,
    )


def invalid_field_result(call: ToolCall, field: str, error: str) -> Result:
    """Make the result of a call with a wrong field other than `tool` and `args`. The fault is not the policy's, because no policy fills such a field in."""
    return replace(service_result(call, Reason.INVALID_ARGS, error, evidence={"field": field, "detail": error}), fault=Fault.INFRA)


def lease_error_result(call: ToolCall, error: PoolServiceError) -> Result:
    """Make the result of a call whose lease has no slot any more, or none that can be reached.

    Args:
        call: the call.
        error: why there is no slot.
    """
    if isinstance(error, SandboxLost):
        return service_result(call, Reason.SANDBOX_LOST, error.detail, evidence=_sandbox_evidence(error))
    if isinstance(error, LeaseNotFound | LeaseLost):
        lease = "unknown" if isinstance(error, LeaseNotFound) else "ended"
        return service_result(call, Reason.LEASE_LOST, error.detail, evidence={"lease": lease, "detail": error.detail})
    return service_result(call, Reason.BACKEND_ERROR, error.detail, may_have_run=False)


def with_refusal_time(result: Result, clock: Clock) -> Result:
    """The result with the current time as its start, if it has none because its call never started."""
    return result if result.started_at else replace(result, started_at=clock.wall())


def call_reference(lease_id: str, call_id: str, encoding: str) -> ToolCall:
    """A call of which only the ids and the encoding are known, to make a result for."""
    return ToolCall(call_id=call_id, lease_id=lease_id, tool="", args={}, encoding=encoding)


def _sandbox_evidence(error: SandboxLost) -> Mapping[str, Any]:
    evidence = error.extra.get("evidence")
    return evidence if isinstance(evidence, Mapping) else {"sandbox": error.detail}
