"""The one table from error codes to HTTP statuses and WebSocket close codes, and how an error becomes a problem document (RFC 9457)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from sandbox_server.core.errors import PoolServiceError

STATUS_OF: Final[Mapping[str, int]] = {
    "unauthorized": 401,
    "forbidden": 403,
    "not_found": 404,
    "pool_not_found": 404,
    "sandbox_not_found": 404,
    "lease_not_found": 404,
    "file_not_found": 404,
    "call_not_found": 404,
    "method_not_allowed": 405,
    "pool_conflict": 409,
    "call_conflict": 409,
    "file_error": 409,
    "lease_lost": 410,
    "sandbox_lost": 410,
    "payload_too_large": 413,
    "invalid_request": 422,
    "quota_exceeded": 429,
    "internal": 500,
    "not_implemented": 501,
    "port_closed": 502,
    "no_capacity": 503,
    "draining": 503,
    "backend_unavailable": 503,
    "storage_unavailable": 503,
}

CLOSE_CODE_BASE: Final = 4000
"""The close code of an error on a WebSocket connection is its HTTP status plus this: 4000 to 4999 are free for applications (RFC 6455)."""
RETRY_STATUSES: Final = frozenset({429, 503})
"""The statuses whose responses carry `Retry-After`."""
DEFAULT_RETRY_AFTER_S: Final = 1
MEDIA_TYPE: Final = "application/problem+json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """An error as an HTTP response: its status, its headers, and the problem document as JSON."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def title_of(code: str) -> str:
    """The title of an error code in a problem document: that of `lease_lost` is "Lease lost"."""
    return code.replace("_", " ").capitalize()


def close_code_of(code: str) -> int:
    """The code with which a WebSocket connection is closed because of an error."""
    return CLOSE_CODE_BASE + STATUS_OF[code]


def problem_of(error: PoolServiceError, request_id: str, *, status: int | None = None) -> Problem:
    """Render an error as a problem document.

    Args:
        error: what went wrong. Of its extra members, `retry_after_s` sets the Retry-After header and `allow` sets the Allow header; all others
            become members of the document.
        request_id: the id of the request. It goes into the document, so that the error can be found in the service's log.
        status: the HTTP status, where it is not the one that `STATUS_OF` has for the error's code.
    """
    extra = dict(error.extra)
    retry_after_s = extra.pop("retry_after_s", DEFAULT_RETRY_AFTER_S)
    allow = extra.pop("allow", None)
    status = STATUS_OF[error.code] if status is None else status
    document: dict[str, Any] = {
        "type": f"urn:sandbox-pool:problem:{error.code}",
        "title": title_of(error.code),
        "status": status,
        "detail": error.detail,
        "code": error.code,
        "request_id": request_id,
    }
    document.update((name, value) for name, value in extra.items() if name not in document)
    headers = {"content-type": MEDIA_TYPE}
    if status in RETRY_STATUSES:
        headers["retry-after"] = str(max(1, round(retry_after_s)))
    if status == 401:
        headers["www-authenticate"] = 'Bearer realm="sandbox-pool"'
    if allow:
        headers["allow"] = allow
    if status == 413 or document.get("limit") == "body_stall_s":  # the rest of the body is not read
        headers["connection"] = "close"
    return Problem(status=status, headers=headers, body=orjson.dumps(document, default=str))
