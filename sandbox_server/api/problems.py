"""The one table from error codes to HTTP: status, title, and what a problem document looks like."""

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
    "no_capacity": 503,
    "draining": 503,
    "backend_unavailable": 503,
    "storage_unavailable": 503,
}

RETRY_STATUSES: Final = frozenset({429, 503})
DEFAULT_RETRY_AFTER_S: Final = 1
MEDIA_TYPE: Final = "application/problem+json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """An error as HTTP carries it."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def title_of(code: str) -> str:
    """The short text of a code: `lease_lost` is "Lease lost"."""
    return code.replace("_", " ").capitalize()


def problem_of(error: PoolServiceError, request_id: str) -> Problem:
    """Render an error.

    Args:
        error: what went wrong; `retry_after_s` among its extra members sets the Retry-After header, `allow` the Allow header.
        request_id: goes into the document, so that a pasted error finds its log line.
    """
    extra = dict(error.extra)
    retry_after_s = extra.pop("retry_after_s", DEFAULT_RETRY_AFTER_S)
    allow = extra.pop("allow", None)
    status = STATUS_OF[error.code]
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
