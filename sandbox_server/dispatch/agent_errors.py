"""Converts link errors into the errors of the HTTP contract, for requests about the calls or files of a lease."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sandbox_server.core.errors import (
    BackendUnavailable,
    CallNotFound,
    FileError,
    FileNotFound,
    InvalidRequest,
    LeaseLost,
    LeaseNotFound,
    NotImplementedHere,
    PoolServiceError,
    QuotaExceeded,
)
from sandbox_server.dispatch.slot_locator import SlotLocator
from sandbox_server.link.errors import (
    AgentRefused,
    AgentSilent,
    CallUnknown,
    FileOperationFailed,
    LimitReachedAtAgent,
    LinkError,
    LinkLost,
    NotSupportedByAgent,
    PathNotFound,
    RequestInvalid,
)

LOST_LINK_WAIT_S = 15.0
"""After a lost link: how long a request about a call waits for the pool to find out whether the sandbox is lost, in seconds."""


@asynccontextmanager
async def translated_link_errors(
    slot_locator: SlotLocator, tenant: str, lease_id: str, *, wait_s: float, call_id: str | None = None, field: str = "path"
) -> AsyncIterator[None]:
    """Raise the errors of the HTTP contract in place of the link errors of the block.

    Args:
        slot_locator: where the pool says whether the lease holds.
        tenant: the tenant that sends the request.
        lease_id: the lease.
        wait_s: after a lost link: how long to wait for the pool to find out whether the sandbox is lost, in seconds.
        call_id: the call, where the request is about one.
        field: the field of the request that is wrong if the agent says that the request is invalid.

    Raises:
        SandboxLost: the link was lost because the sandbox is.
        BackendUnavailable: the agent cannot be reached, does not respond, or refused without a reason that the client can act on.
        LeaseNotFound, LeaseLost: the agent refused because the lease has ended.
        CallNotFound, NotImplementedHere, QuotaExceeded, FileNotFound, FileError, InvalidRequest: the agent refused for this reason.
    """
    try:
        yield
    except AgentRefused as refused:
        raise error_of_refusal(refused, slot_locator, tenant, lease_id, call_id, field) from None
    except LinkLost as lost:
        sandbox_lost = await slot_locator.wait_for_reconnect_or_loss(lease_id, wait_s)
        raise sandbox_lost or unreachable(lost) from None
    except AgentSilent as silent:
        raise unreachable(silent) from None


def unreachable(error: LinkError | str) -> BackendUnavailable:
    """The error for an agent that cannot be reached."""
    return BackendUnavailable(f"the agent cannot be reached: {error}")


def error_of_refusal(
    refused: AgentRefused, slot_locator: SlotLocator, tenant: str, lease_id: str, call_id: str | None, field: str = "path"
) -> PoolServiceError:
    """The error of the HTTP contract for an agent's refusal. For the other arguments see `translated_link_errors`."""
    match refused:
        case NotSupportedByAgent():
            return NotImplementedHere(refused.detail)
        case LimitReachedAtAgent():
            return QuotaExceeded(refused.detail)
        case CallUnknown() if call_id is not None:
            return CallNotFound(f"lease {lease_id} has no call {call_id}")
        case PathNotFound() if call_id is None:
            return FileNotFound(refused.detail)
        case FileOperationFailed() if call_id is None:
            return FileError(refused.detail, errno=refused.errno_name)
        case RequestInvalid() if call_id is None:
            return InvalidRequest(f"{field}: {refused.detail}" if field != "path" else refused.detail, field=field)
        case _:
            return lease_error(slot_locator, tenant, lease_id) or BackendUnavailable(f"the agent refused: {refused.detail}")


def lease_error(slot_locator: SlotLocator, tenant: str, lease_id: str) -> PoolServiceError | None:
    """Why a lease does not hold; None where it does, or where its agent cannot be reached."""
    try:
        slot_locator.locate_slot(tenant, lease_id)
    except (LeaseNotFound, LeaseLost) as error:
        return error
    except BackendUnavailable:
        return None
    return None
