"""All errors that the service reports to its clients.

Each class has one error code of the HTTP contract (`Stopping` shares the code of `Draining`). The docstring of a class is its default message.

    PoolServiceError
    ├── Unauthorized, Forbidden
    ├── RouteNotFound, PoolNotFound, SandboxNotFound, LeaseNotFound, FileNotFound, CallNotFound
    ├── MethodNotAllowed
    ├── PoolConflict, CallConflict, FileError
    ├── LeaseLost
    │   └── SandboxLost
    ├── PayloadTooLarge, InvalidRequest, QuotaExceeded
    ├── Internal, NotImplementedHere
    ├── PortClosed
    ├── NoCapacity, BackendUnavailable, StorageUnavailable
    └── Draining
        └── Stopping

`api/problems.py` alone maps the codes to HTTP statuses.
"""

from __future__ import annotations

from typing import Any, ClassVar


class PoolServiceError(Exception):
    """An error that is reported to the client.

    Args:
        detail: one sentence that says what happened, to what, and what to do. The default is the docstring of the class.
        extra: additional members of the problem document.
    """

    code: ClassVar[str] = "internal"

    def __init__(self, detail: str | None = None, **extra: Any) -> None:
        self.detail = detail or (self.__doc__ or "").strip()
        self.extra = extra
        super().__init__(self.detail)


class Unauthorized(PoolServiceError):
    """The request carries no valid token: send `Authorization: Bearer TOKEN`."""

    code = "unauthorized"


class Forbidden(PoolServiceError):
    """This token may not do that."""

    code = "forbidden"


class RouteNotFound(PoolServiceError):
    """There is no such route."""

    code = "not_found"


class PoolNotFound(PoolServiceError):
    """There is no pool of that name."""

    code = "pool_not_found"


class SandboxNotFound(PoolServiceError):
    """There is no sandbox with that id."""

    code = "sandbox_not_found"


class LeaseNotFound(PoolServiceError):
    """There is no lease with that id, or it is not yours."""

    code = "lease_not_found"


class FileNotFound(PoolServiceError):
    """There is no such file in the slot."""

    code = "file_not_found"


class CallNotFound(PoolServiceError):
    """This lease has no call with that id."""

    code = "call_not_found"


class MethodNotAllowed(PoolServiceError):
    """This route does not take that method."""

    code = "method_not_allowed"


class PoolConflict(PoolServiceError):
    """The pool cannot be changed that way."""

    code = "pool_conflict"


class CallConflict(PoolServiceError):
    """The key or call id was used before with another body."""

    code = "call_conflict"


class FileError(PoolServiceError):
    """The file operation failed in the slot."""

    code = "file_error"


class LeaseLost(PoolServiceError):
    """The lease has ended."""

    code = "lease_lost"


class SandboxLost(LeaseLost):
    """The sandbox of this lease died or vanished."""

    code = "sandbox_lost"


class PayloadTooLarge(PoolServiceError):
    """The request body is larger than this service takes."""

    code = "payload_too_large"


class InvalidRequest(PoolServiceError):
    """The request is not one this route takes."""

    code = "invalid_request"


class QuotaExceeded(PoolServiceError):
    """A limit of this tenant or lease is reached."""

    code = "quota_exceeded"


class Internal(PoolServiceError):
    """The service failed; the request id finds it in the log."""

    code = "internal"


class NotImplementedHere(PoolServiceError):
    """This is not built yet."""

    code = "not_implemented"


class PortClosed(PoolServiceError):
    """Nothing listens on this port of the slot."""

    code = "port_closed"


class NoCapacity(PoolServiceError):
    """No slot came free in time."""

    code = "no_capacity"


class Draining(PoolServiceError):
    """The pool or the service is draining and gives no new leases."""

    code = "draining"


class Stopping(Draining):
    """The service is stopping: ask again when it is back."""

    def __init__(self, detail: str | None = None) -> None:
        super().__init__(detail, stopping=True, retry_after_s=5)


class BackendUnavailable(PoolServiceError):
    """The backend of this pool cannot be reached or cannot make sandboxes."""

    code = "backend_unavailable"


class StorageUnavailable(PoolServiceError):
    """The service cannot write its state, so it promises nothing new."""

    code = "storage_unavailable"
