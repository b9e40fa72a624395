"""The error classes of the client. Every error that the client raises for the service or the network is a `SandboxError`.

    SandboxError
    ├── ServiceError                        the service responded with an error; one class for each code of the HTTP contract
    │   ├── Unauthorized, Forbidden
    │   ├── RouteNotFound, PoolNotFound, SandboxNotFound, LeaseNotFound, FileNotFound, CallNotFound
    │   ├── MethodNotAllowed
    │   ├── PoolConflict, CallConflict, FileError
    │   ├── LeaseLost
    │   │   └── SandboxLost
    │   ├── PayloadTooLarge, InvalidRequest, QuotaExceeded
    │   ├── InternalError, NotImplementedYet, PortClosed
    │   └── NoCapacity, Draining, BackendUnavailable, StorageUnavailable
    ├── TransportError                      no response of the service arrived
    │   ├── ConnectFailed                   the request was not sent
    │   ├── ConnectionLost, TimedOut        the service may have acted on the request
    │   └── BadAnswer                       a response that is not in the contract, for instance from a proxy
    ├── ServiceNotFound                     the address of the service is not known
    ├── ClientClosed                        the client was closed before
    └── EmbeddedFailed                      the embedded service did not start

A command that fails is reported in a `Result`, never as an error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_PROBLEM_MEMBERS = frozenset({"type", "title", "status", "detail", "code", "instance"})


class SandboxError(Exception):
    """An error between this program and the sandbox service.

    Args:
        detail: one sentence that a person can act on. Default: the first line of the class's docstring.
        status: the HTTP status; None if no response arrived.
        code: the stable code. For a `ServiceError` it is from the contract's closed set, else the client's own.
        request_id: the id that finds the request in the service's log.
        retry_after_s: how long the service asks to wait, in seconds.
        extra: further members of the response, such as `queue_position` or `errno`.
    """

    code: str = "sandbox_error"

    def __init__(
        self,
        detail: str | None = None,
        *,
        status: int | None = None,
        code: str | None = None,
        request_id: str | None = None,
        retry_after_s: float | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        self.detail = detail or (self.__doc__ or "").partition("\n")[0]
        self.status = status
        self.code = code or type(self).code
        self.request_id = request_id
        self.retry_after_s = retry_after_s
        self.extra: Mapping[str, Any] = extra or {}
        super().__init__(self.detail)

    def __str__(self) -> str:
        known = [self.code if self.status is None else f"{self.status} {self.code}"]
        if self.request_id:
            known.append(f"request {self.request_id}")
        return f"{self.detail} [{', '.join(known)}]"


class ServiceError(SandboxError):
    """The service responded with an error."""

    code = "unknown"


class Unauthorized(ServiceError):
    """The service did not accept the token: set SANDBOX_TOKEN, or pass token=."""

    code = "unauthorized"


class Forbidden(ServiceError):
    """The token does not permit this request."""

    code = "forbidden"


class RouteNotFound(ServiceError):
    """The service has no such route."""

    code = "not_found"


class PoolNotFound(ServiceError):
    """There is no pool of that name."""

    code = "pool_not_found"


class SandboxNotFound(ServiceError):
    """There is no sandbox with that id."""

    code = "sandbox_not_found"


class LeaseNotFound(ServiceError):
    """There is no lease with that id, or it is not yours."""

    code = "lease_not_found"


class FileNotFound(ServiceError):
    """There is no such file in the slot."""

    code = "file_not_found"


class CallNotFound(ServiceError):
    """The lease has no call with that id."""

    code = "call_not_found"


class MethodNotAllowed(ServiceError):
    """The route does not accept this HTTP method."""

    code = "method_not_allowed"


class PoolConflict(ServiceError):
    """The pool cannot be changed in this way."""

    code = "pool_conflict"


class CallConflict(ServiceError):
    """The call id or request key was used before with another request body."""

    code = "call_conflict"


class FileError(ServiceError):
    """The file operation failed in the slot; `extra["errno"]` names the error."""

    code = "file_error"


class LeaseLost(ServiceError):
    """The lease has ended."""

    code = "lease_lost"


class SandboxLost(LeaseLost):
    """The sandbox of the lease died or disappeared."""

    code = "sandbox_lost"


class PayloadTooLarge(ServiceError):
    """The request is larger than the service accepts."""

    code = "payload_too_large"


class InvalidRequest(ServiceError):
    """The request is not valid."""

    code = "invalid_request"


class QuotaExceeded(ServiceError):
    """A limit of the tenant or the lease is reached."""

    code = "quota_exceeded"


class InternalError(ServiceError):
    """The service failed; the request id finds the cause in its log."""

    code = "internal"


class NotImplementedYet(ServiceError):
    """The service does not offer this, or not on this backend."""

    code = "not_implemented"


class PortClosed(ServiceError):
    """Nothing listens on the port of the slot, or what listens gave no valid answer."""

    code = "port_closed"


class NoCapacity(ServiceError):
    """No slot became free in time."""

    code = "no_capacity"


class Draining(ServiceError):
    """The pool or the service is draining and gives no new leases."""

    code = "draining"


class BackendUnavailable(ServiceError):
    """The backend of the pool cannot be reached or cannot make sandboxes."""

    code = "backend_unavailable"


class StorageUnavailable(ServiceError):
    """The service cannot store its state, so it accepts nothing new."""

    code = "storage_unavailable"


class TransportError(SandboxError):
    """No response of the service arrived."""

    code = "transport_error"


class ConnectFailed(TransportError):
    """The service could not be reached; nothing was sent."""

    code = "connect_failed"


class ConnectionLost(TransportError):
    """The connection ended before the response was complete."""

    code = "connection_lost"


class TimedOut(TransportError):
    """The response did not arrive in time."""

    code = "timed_out"


class BadAnswer(TransportError):
    """The response is not one of the sandbox service."""

    code = "bad_answer"


class ServiceNotFound(SandboxError):
    """No sandbox service is known: set SANDBOX_URL (and SANDBOX_TOKEN), or start one with `python -m sandbox_server serve`."""

    code = "service_not_found"


class ClientClosed(SandboxError):
    """This client is closed: create a new one, or close it later."""

    code = "client_closed"


class EmbeddedFailed(SandboxError):
    """The embedded service did not start."""

    code = "embedded_failed"


#: The error class for each code of the contract.
CLASS_OF_CODE: Mapping[str, type[ServiceError]] = {
    error.code: error
    for error in (
        Unauthorized, Forbidden, RouteNotFound, PoolNotFound, SandboxNotFound, LeaseNotFound, FileNotFound, CallNotFound, MethodNotAllowed,
        PoolConflict, CallConflict, FileError, LeaseLost, SandboxLost, PayloadTooLarge, InvalidRequest, QuotaExceeded, InternalError,
        NotImplementedYet, PortClosed, NoCapacity, Draining, BackendUnavailable, StorageUnavailable,
    )
}  # fmt: skip


def service_error(code: str, detail: str | None = None, **known: Any) -> ServiceError:
    """Create the error for a code; a plain `ServiceError` for a code that only a newer service knows.

    Args:
        code: the code, from the contract's closed set.
        detail: one sentence; default the first line of the class's docstring.
        known: further arguments of `SandboxError`.
    """
    return CLASS_OF_CODE.get(code, ServiceError)(detail, code=code, **known)


def error_from_response(status: int, headers: Mapping[str, str], body: bytes) -> SandboxError:
    """Create the error for a response that is not a success.

    Args:
        status: the HTTP status.
        headers: the headers of the response, by lower-case name.
        body: the whole body.

    Returns:
        A `ServiceError` for a problem document, a `BadAnswer` for any other body.
    """
    known: dict[str, Any] = {"status": status, "request_id": headers.get("x-request-id"), "retry_after_s": _parse_retry_after(headers.get("retry-after"))}
    try:
        problem = json.loads(body)
    except ValueError:  # raised for bytes that are not UTF-8 as well
        problem = None
    if not isinstance(problem, dict) or not isinstance(problem.get("code"), str):
        excerpt = body[:200].decode("utf-8", "replace").strip()
        return BadAnswer(f"HTTP {status} without a problem document{': ' + excerpt if excerpt else ''}", **known)
    detail = problem.get("detail") or problem.get("title")
    extra = {name: value for name, value in problem.items() if name not in _PROBLEM_MEMBERS}
    return service_error(problem["code"], detail if isinstance(detail, str) else None, extra=extra, **known)


def _parse_retry_after(value: str | None) -> float | None:
    """Return a `Retry-After` header in seconds. A date gives None: the service never sends one."""
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        return None
