"""Messages about leases: acquiring, renewing, narrowing, releasing and listing them."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

from env_client.errors import BadAnswer, service_error
from env_client.messages.message import (
    DEADLINE_MARGIN_S,
    Message,
    Response,
    duration_or_default,
    encode_json,
    path_with_query,
    quote_path_segment,
    read_list,
    read_object,
    without_none,
)
from env_client.values import Acquired, AcquireOptions, LeaseInfo, LeasePage, Released, Renewed, read_value

#: The contract's longest `ttl_s`, in seconds. The client waits for no response longer than this.
MAX_LEASE_S = 86_400.0
#: How long an acquire without `wait_s` may be queued, in seconds: the actual limit is in the pool's spec, which the client does not know.
MAX_QUEUE_S = 600.0
#: How long a release or a renewal may take, in seconds.
QUICK_TIMEOUT_S = 5.0
#: How long one attempt to end a cancelled acquire waits for its response, in seconds.
CANCELLED_TIMEOUT_S = 3.0


def new_request_key() -> str:
    """Return a request key that no other acquire has."""
    return "k-" + secrets.token_hex(16)


def acquire_message(pool: str | None, count: int, **options: Unpack[AcquireOptions]) -> Message[Acquired]:
    """Build `POST /v1/acquire`. The request always carries a request key, so that it can be repeated."""
    fields: dict[str, Any] = {"pool": pool, "count": count, **options}
    fields["request_key"] = options.get("request_key") or new_request_key()
    timeout_s = min(duration_or_default(options.get("wait_s"), MAX_QUEUE_S), MAX_LEASE_S) + DEADLINE_MARGIN_S
    return Message(
        method="POST",
        path="/v1/acquire",
        body=encode_json(without_none(fields)),
        parse=_parse_acquired,
        response_timeout_s=timeout_s,
        read_timeout_s=timeout_s,
        final_codes=frozenset({"backend_unavailable"}),
    )


def release_message(lease_ids: Iterable[str] | None, run_id: str | None, reset_workspace: bool, request_key: str | None = None) -> Message[Released]:
    """Build `POST /v1/release`, for the given leases, for all leases of a run, or for those of one acquire."""
    lease_ids = None if lease_ids is None else list(lease_ids)
    fields = without_none({"lease_ids": lease_ids, "run_id": run_id, "request_key": request_key, "reset_workspace": reset_workspace})
    return Message(method="POST", path="/v1/release", body=encode_json(fields), parse=_parse_released, response_timeout_s=QUICK_TIMEOUT_S)


def release_cancelled_message(request_key: str) -> Message[Released]:
    """Build the `POST /v1/release` that ends a cancelled acquire. It does not wait long for its response, because the caller wants to end."""
    return replace(release_message(None, None, True, request_key), response_timeout_s=CANCELLED_TIMEOUT_S, read_timeout_s=CANCELLED_TIMEOUT_S)


def renew_message(lease_ids: Iterable[str], ttl_s: float | None) -> Message[Renewed]:
    """Build `POST /v1/renew`."""
    fields = without_none({"lease_ids": list(lease_ids), "ttl_s": ttl_s})
    return Message(method="POST", path="/v1/renew", body=encode_json(fields), parse=_parse_renewed, response_timeout_s=QUICK_TIMEOUT_S)


def narrow_message(lease_id: str, allow_network: bool | None, cache: str | None, read_only: Sequence[str] | None = None) -> Message[LeaseInfo]:
    """Build `POST /v1/leases/{id}/narrow`. A repeated request changes nothing more, so it is safe to retry."""
    fields = without_none({"allow_network": allow_network, "cache": cache, "read_only": None if read_only is None else list(read_only)})
    return Message(method="POST", path=f"/v1/leases/{quote_path_segment(lease_id)}/narrow", body=encode_json(fields), parse=_parse_lease)


def get_lease_message(lease_id: str) -> Message[LeaseInfo]:
    """Build `GET /v1/leases/{id}`."""
    return Message(method="GET", path=f"/v1/leases/{quote_path_segment(lease_id)}", parse=_parse_lease)


def list_leases_message(run_id: str | None, trajectory_id: str | None, limit: int | None, cursor: str | None) -> Message[LeasePage]:
    """Build `GET /v1/leases`."""
    path = path_with_query("/v1/leases", run_id=run_id, trajectory_id=trajectory_id, limit=limit, cursor=cursor)
    return Message(method="GET", path=path, parse=_parse_lease_page)


def _parse_lease(response: Response) -> LeaseInfo:
    return read_value(LeaseInfo, read_object(response))


def _read_leases(document: Mapping[str, Any]) -> tuple[LeaseInfo, ...]:
    return tuple(read_value(LeaseInfo, item) for item in read_list(document, "leases"))


def _parse_acquired(response: Response) -> Acquired:
    document = read_object(response)
    return Acquired(leases=_read_leases(document), waited_s=duration_or_default(document.get("waited_s"), 0.0))


def _parse_released(response: Response) -> Released:
    document = read_object(response)
    return Released(released=tuple(read_list(document, "released")), unknown=tuple(read_list(document, "unknown")))


def _parse_renewed(response: Response) -> Renewed:
    document = read_object(response)
    lost = {}
    for item in read_list(document, "lost"):
        if not isinstance(item, dict) or not isinstance(item.get("lease_id"), str):
            raise BadAnswer("the service sent a lost lease without its id")
        lost[item["lease_id"]] = service_error(item.get("code") or "lease_lost", item.get("detail"))
    return Renewed(leases=_read_leases(document), lost=lost)


def _parse_lease_page(response: Response) -> LeasePage:
    document = read_object(response)
    return LeasePage(leases=_read_leases(document), next_cursor=document.get("next_cursor"))
