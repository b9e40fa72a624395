"""Messages about pools, sandboxes and the service itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from env_client.errors import BadAnswer
from env_client.messages.message import (
    BYTES,
    EVENT_STREAM,
    STREAM_READ_TIMEOUT_S,
    TRANSFER_TIMEOUT_S,
    Message,
    Response,
    encode_json,
    ignore_body,
    path_with_query,
    quote_path_segment,
    read_list,
    read_object,
)
from env_client.values import Page, PoolChange, PoolInfo, Readiness, SandboxInfo, SlotCheck, VerifyReport, read_value

T = TypeVar("T")

#: How long the verification of a pool may take, in seconds: it resets every free slot.
VERIFY_TIMEOUT_S = 600.0


def list_pools_message(cursor: str | None = None, tenant: str | None = None) -> Message[Page[PoolInfo]]:
    """Build `GET /v1/pools`."""
    return Message(
        method="GET", path=path_with_query("/v1/pools", tenant=tenant, cursor=cursor), parse=lambda response: _parse_page(PoolInfo, response, "pools")
    )


def get_pool_message(name: str, tenant: str | None = None) -> Message[PoolInfo]:
    """Build `GET /v1/pools/{name}`."""
    return Message(method="GET", path=path_with_query(_pool_path(name), tenant=tenant), parse=_parse_pool)


def put_pool_message(name: str, spec: Mapping[str, Any], tenant: str | None = None) -> Message[PoolChange]:
    """Build `PUT /v1/pools/{name}`."""

    def parse(response: Response) -> PoolChange:
        return PoolChange(pool=_parse_pool(response), created=response.status == 201)

    return Message(method="PUT", path=path_with_query(_pool_path(name), tenant=tenant), body=encode_json(spec), parse=parse)


def delete_pool_message(name: str, force: bool, tenant: str | None = None) -> Message[None]:
    """Build `DELETE /v1/pools/{name}`."""
    return Message(method="DELETE", path=path_with_query(_pool_path(name), tenant=tenant, force=1 if force else None), parse=ignore_body)


def verify_pool_message(name: str, tenant: str | None = None) -> Message[VerifyReport]:
    """Build `POST /v1/pools/{name}/verify`."""
    return Message(
        method="POST",
        path=path_with_query(_pool_path(name) + "/verify", tenant=tenant),
        parse=_parse_verify_report,
        response_timeout_s=VERIFY_TIMEOUT_S,
        read_timeout_s=VERIFY_TIMEOUT_S,
    )


def list_sandboxes_message(limit: int | None, cursor: str | None) -> Message[Page[SandboxInfo]]:
    """Build `GET /v1/sandboxes`."""
    path = path_with_query("/v1/sandboxes", limit=limit, cursor=cursor)
    return Message(method="GET", path=path, parse=lambda response: _parse_page(SandboxInfo, response, "sandboxes"))


def drain_sandbox_message(sandbox_id: str) -> Message[SandboxInfo]:
    """Build `POST /v1/sandboxes/{id}/drain`."""
    path = f"/v1/sandboxes/{quote_path_segment(sandbox_id)}/drain"
    return Message(method="POST", path=path, parse=lambda response: read_value(SandboxInfo, read_object(response)))


def events_message(after: str | None) -> Message[None]:
    """Build `GET /v1/events`, beginning after the event with the id `after`."""
    return Message(method="GET", path="/v1/events", accept=EVENT_STREAM, parse=ignore_body, read_timeout_s=STREAM_READ_TIMEOUT_S, last_event_id=after)


def metrics_message() -> Message[str]:
    """Build `GET /metrics`."""
    return Message(method="GET", path="/metrics", accept="text/plain", parse=lambda response: response.body.decode("utf-8", "replace"))


def agent_pyz_message() -> Message[bytes]:
    """Build `GET /v1/agent.pyz`."""
    return Message(
        method="GET",
        path="/v1/agent.pyz",
        accept=f"application/zip, {BYTES}",
        parse=lambda response: response.body,
        response_timeout_s=TRANSFER_TIMEOUT_S,
        read_timeout_s=TRANSFER_TIMEOUT_S,
    )


def healthz_message() -> Message[Mapping[str, Any]]:
    """Build `GET /healthz`."""
    return Message(method="GET", path="/healthz", parse=read_object)


def readyz_message(pool: str | None) -> Message[Readiness]:
    """Build `GET /readyz`. A service that is not ready responds with 503, which is parsed as well."""

    def parse(response: Response) -> Readiness:
        return Readiness(ready=response.status == 200, report=read_object(response))

    return Message(method="GET", path=path_with_query("/readyz", pool=pool), parse=parse, accepted_statuses=frozenset({503}))


def _pool_path(name: str) -> str:
    return f"/v1/pools/{quote_path_segment(name)}"


def _parse_pool(response: Response) -> PoolInfo:
    return read_value(PoolInfo, read_object(response))


def _parse_page(cls: type[T], response: Response, name: str) -> Page[T]:
    document = read_object(response)
    return Page(items=tuple(read_value(cls, item) for item in read_list(document, name)), next_cursor=document.get("next_cursor"))


def _parse_verify_report(response: Response) -> VerifyReport:
    document = read_object(response)
    slots = tuple(read_value(SlotCheck, item) for item in read_list(document, "slots"))
    if not isinstance(document.get("clean"), bool):
        raise BadAnswer("the service does not say whether the slots are clean")
    return read_value(VerifyReport, {**document, "slots": slots})
