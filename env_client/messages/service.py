"""Every request about pools, sandboxes and the service itself as a value. Pure, and written once for both clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from env_client.errors import BadAnswer
from env_client.messages.message import BYTES, EVENT_STREAM, SILENCE_S, TRANSFER_S, Answer, Message, list_of, nothing, object_of, path_of, segment, to_json
from env_client.values import Page, PoolChange, PoolInfo, Readiness, SandboxInfo, SlotCheck, VerifyReport, read_value

T = TypeVar("T")

ZIP = "application/zip"
#: What a verify may take, which resets every free slot of the pool, in seconds.
VERIFY_S = 600.0


def pools(cursor: str | None = None, tenant: str | None = None) -> Message[Page[PoolInfo]]:
    """`GET /v1/pools`."""
    return Message(method="GET", path=path_of("/v1/pools", tenant=tenant, cursor=cursor), parse=lambda answer: _page(PoolInfo, answer, "pools"))


def pool(name: str, tenant: str | None = None) -> Message[PoolInfo]:
    """`GET /v1/pools/{name}`."""
    return Message(method="GET", path=path_of(_pool_path(name), tenant=tenant), parse=lambda answer: read_value(PoolInfo, object_of(answer)))


def pool_put(name: str, spec: Mapping[str, Any], tenant: str | None = None) -> Message[PoolChange]:
    """`PUT /v1/pools/{name}`."""

    def parse(answer: Answer) -> PoolChange:
        return PoolChange(pool=read_value(PoolInfo, object_of(answer)), created=answer.status == 201)

    return Message(method="PUT", path=path_of(_pool_path(name), tenant=tenant), body=to_json(spec), parse=parse)


def pool_delete(name: str, force: bool, tenant: str | None = None) -> Message[None]:
    """`DELETE /v1/pools/{name}`."""
    return Message(method="DELETE", path=path_of(_pool_path(name), tenant=tenant, force=1 if force else None), parse=nothing)


def pool_verify(name: str, tenant: str | None = None) -> Message[VerifyReport]:
    """`POST /v1/pools/{name}/verify`."""
    return Message(method="POST", path=path_of(_pool_path(name) + "/verify", tenant=tenant), parse=_verified, answer_within_s=VERIFY_S, silence_s=VERIFY_S)


def sandboxes(limit: int | None, cursor: str | None) -> Message[Page[SandboxInfo]]:
    """`GET /v1/sandboxes`."""
    return Message(method="GET", path=path_of("/v1/sandboxes", limit=limit, cursor=cursor), parse=lambda answer: _page(SandboxInfo, answer, "sandboxes"))


def sandbox_drain(sandbox_id: str) -> Message[SandboxInfo]:
    """`POST /v1/sandboxes/{id}/drain`."""
    path = f"/v1/sandboxes/{segment(sandbox_id)}/drain"
    return Message(method="POST", path=path, parse=lambda answer: read_value(SandboxInfo, object_of(answer)))


def events(after: str | None) -> Message[None]:
    """`GET /v1/events`, from the last event that was seen."""
    return Message(method="GET", path="/v1/events", accept=EVENT_STREAM, parse=nothing, silence_s=SILENCE_S, last_event_id=after)


def metrics() -> Message[str]:
    """`GET /metrics`."""
    return Message(method="GET", path="/metrics", accept="text/plain", parse=lambda answer: answer.body.decode("utf-8", "replace"))


def agent_pyz() -> Message[bytes]:
    """`GET /v1/agent.pyz`."""
    return Message(
        method="GET",
        path="/v1/agent.pyz",
        accept=f"application/zip, {BYTES}",
        parse=lambda answer: answer.body,
        answer_within_s=TRANSFER_S,
        silence_s=TRANSFER_S,
    )


def healthz() -> Message[Mapping[str, Any]]:
    """`GET /healthz`."""
    return Message(method="GET", path="/healthz", parse=object_of)


def readyz(pool: str | None) -> Message[Readiness]:
    """`GET /readyz`; not ready is an answer too."""

    def parse(answer: Answer) -> Readiness:
        return Readiness(ready=answer.status == 200, report=object_of(answer))

    return Message(method="GET", path=path_of("/readyz", pool=pool), parse=parse, also_ok=frozenset({503}))


def _pool_path(name: str) -> str:
    return f"/v1/pools/{segment(name)}"


def _page(cls: type[T], answer: Answer, name: str) -> Page[T]:
    document = object_of(answer)
    return Page(items=tuple(read_value(cls, item) for item in list_of(document, name)), next_cursor=document.get("next_cursor"))


def _verified(answer: Answer) -> VerifyReport:
    document = object_of(answer)
    slots = tuple(read_value(SlotCheck, item) for item in list_of(document, "slots"))
    if not isinstance(document.get("clean"), bool):
        raise BadAnswer("the service does not say whether the slots are clean")
    return read_value(VerifyReport, {**document, "slots": slots})
