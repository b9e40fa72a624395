"""Every request as a value, and how its answer is read. Pure, and written once for both clients."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, Unpack
from urllib.parse import quote, urlencode

from env_client.errors import BadAnswer, InvalidRequest, service_error
from env_client.values import (
    Acquired,
    AcquireOptions,
    Call,
    CallOptions,
    FileEntry,
    LeaseInfo,
    LeasePage,
    PoolInfo,
    Readiness,
    Released,
    Renewed,
    Result,
    read_value,
)

T = TypeVar("T")

JSON = "application/json"
NDJSON = "application/x-ndjson"
GZIP = "application/gzip"
BYTES = "application/octet-stream"

#: What an ordinary answer may take, in seconds.
PROMPT_S = 30.0
#: What a transfer may pause, and a listing or an unpacking may take, in seconds.
TRANSFER_S = 300.0
#: The contract's default `max_timeout_s`: what a call without a timeout of its own may take.
LONGEST_CALL_S = 3600.0
#: The contract's longest `ttl_s`; nothing is waited for longer.
LONGEST_LEASE_S = 86_400.0
#: What an acquire may queue whose bound only the pool knows, in seconds.
LONGEST_QUEUE_S = 600.0
#: What a release or a renewal may take, in seconds.
AT_ONCE_S = 5.0
#: Kill and report of a call past its deadline, and the way there and back, in seconds.
SLACK_S = 10.0
#: A long call is asked after at least this often, in seconds: a connection that died silently is found out, and asking again joins the call.
REJOIN_S = 240.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back, as far as parsing needs it."""

    status: int
    body: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Message(Generic[T]):
    """One request, ready to be sent.

    Args:
        path: with its query, percent-encoded.
        parse: reads the answer; raises `BadAnswer`.
        answer_within_s: what the answer may rightly take.
        silence_s: how long one attempt waits for bytes.
        repeatable: whether it may be served twice without harm.
        final_codes: errors that are an answer, not an obstacle.
        also_ok: statuses beside 2xx that `parse` reads.
    """

    method: str
    path: str
    parse: Callable[[Answer], T]
    body: bytes | None = None
    content_type: str = JSON
    accept: str = JSON
    answer_within_s: float = PROMPT_S
    silence_s: float = PROMPT_S
    repeatable: bool = True
    final_codes: frozenset[str] = frozenset()
    also_ok: frozenset[int] = frozenset()


def new_call_id() -> str:
    """An id for a call that nobody named."""
    return "c-" + secrets.token_hex(12)


def acquire(pool: str | None, count: int, **options: Unpack[AcquireOptions]) -> Message[Acquired]:
    """`POST /v1/acquire`, always with a request key, so that it may be sent again."""
    asked: dict[str, Any] = {"pool": pool, "count": count, **options}
    asked["request_key"] = options.get("request_key") or "k-" + secrets.token_hex(16)
    queue_s = min(_seconds(options.get("wait_s"), LONGEST_QUEUE_S), LONGEST_LEASE_S) + SLACK_S
    return Message(
        method="POST",
        path="/v1/acquire",
        body=_json(_given(asked)),
        parse=_acquired,
        answer_within_s=queue_s,
        silence_s=queue_s,
        final_codes=frozenset({"backend_unavailable"}),
    )


def make_call(lease_id: str, tool: str, args: Mapping[str, Any] | None, **options: Unpack[CallOptions]) -> Call:
    """A call with an id of its own."""
    options["call_id"] = options.get("call_id") or new_call_id()
    return Call(lease_id=lease_id, tool=tool, args=args or {}, **options)


def named(calls: Iterable[Call]) -> list[tuple[Call, str]]:
    """The calls, each with its own id or a new one."""
    return [(call, call.call_id or new_call_id()) for call in calls]


def exec_batch(calls: Sequence[tuple[Call, str]], *, stream: bool = False) -> Message[tuple[Result, ...]]:
    """`POST /v1/exec-batch`; with `stream` the answer is one result a line, and `parse` is not for it."""
    lasts_s: dict[str, float] = {}
    for call, _ in calls:
        lasts_s[call.lease_id] = lasts_s.get(call.lease_id, 0.0) + _seconds(call.timeout_s, LONGEST_CALL_S)
    within_s = max(lasts_s.values(), default=0.0) + SLACK_S

    def parse(answer: Answer) -> tuple[Result, ...]:
        results = tuple(read_value(Result, item) for item in _list(_object(answer), "results"))
        if len(results) != len(calls):
            raise BadAnswer(f"the service sent {len(results)} results for {len(calls)} calls")
        return results

    return Message(
        method="POST",
        path="/v1/exec-batch",
        body=_json({"calls": [_call(call, call_id) for call, call_id in calls]}),
        accept=NDJSON if stream else JSON,
        parse=parse,
        answer_within_s=within_s,
        # A stream has a line every 15 s, so silence is noticed early.
        silence_s=min(within_s, 45.0 if stream else REJOIN_S),
    )


def exec_one(call: Call) -> Message[Result]:
    """`POST /v1/leases/{id}/exec`."""
    asked = _call(call, call.call_id or new_call_id())
    del asked["lease_id"]
    within_s = _seconds(call.timeout_s, LONGEST_CALL_S) + SLACK_S
    return Message(
        method="POST",
        path=f"/v1/leases/{_segment(call.lease_id)}/exec",
        body=_json(asked),
        parse=_result,
        answer_within_s=within_s,
        silence_s=min(within_s, REJOIN_S),
    )


def release(lease_ids: Iterable[str] | None, run_id: str | None, reset_workspace: bool) -> Message[Released]:
    """`POST /v1/release`, of leases or of a run."""
    asked = _given({"lease_ids": None if lease_ids is None else list(lease_ids), "run_id": run_id, "reset_workspace": reset_workspace})
    return Message(method="POST", path="/v1/release", body=_json(asked), parse=_released, answer_within_s=AT_ONCE_S)


def renew(lease_ids: Iterable[str], ttl_s: float | None) -> Message[Renewed]:
    """`POST /v1/renew`."""
    asked = _given({"lease_ids": list(lease_ids), "ttl_s": ttl_s})
    return Message(method="POST", path="/v1/renew", body=_json(asked), parse=_renewed, answer_within_s=AT_ONCE_S)


def cancel(lease_id: str, call_id: str) -> Message[Result]:
    """`POST /v1/cancel`."""
    return Message(method="POST", path="/v1/cancel", body=_json({"lease_id": lease_id, "call_id": call_id}), parse=_result)


def lease_info(lease_id: str) -> Message[LeaseInfo]:
    """`GET /v1/leases/{id}`."""
    return Message(method="GET", path=f"/v1/leases/{_segment(lease_id)}", parse=lambda answer: read_value(LeaseInfo, _object(answer)))


def leases(run_id: str | None, trajectory_id: str | None, limit: int | None, cursor: str | None) -> Message[LeasePage]:
    """`GET /v1/leases`."""
    return Message(method="GET", path=_path("/v1/leases", run_id=run_id, trajectory_id=trajectory_id, limit=limit, cursor=cursor), parse=_lease_page)


def get_file(lease_id: str, path: str) -> Message[bytes]:
    """`GET /v1/leases/{id}/files`."""
    return _transfer("GET", _path(f"/v1/leases/{_segment(lease_id)}/files", path=path), lambda answer: answer.body, accept=BYTES)


def put_file(lease_id: str, path: str, mode: int | None) -> Message[None]:
    """`PUT /v1/leases/{id}/files`; the content is sent beside it."""
    octal = None if mode is None else f"{mode:04o}"
    return _transfer("PUT", _path(f"/v1/leases/{_segment(lease_id)}/files", path=path, mode=octal), _nothing, content_type=BYTES)


def list_files(lease_id: str, path: str, recursive: bool) -> Message[tuple[FileEntry, ...]]:
    """`GET /v1/leases/{id}/files/list`."""
    where = _path(f"/v1/leases/{_segment(lease_id)}/files/list", path=path, recursive=1 if recursive else None)
    return _transfer("GET", where, _entries)


def get_archive(lease_id: str, path: str) -> Message[bytes]:
    """`GET /v1/leases/{id}/archive`."""
    return _transfer("GET", _path(f"/v1/leases/{_segment(lease_id)}/archive", path=path), lambda answer: answer.body, accept=GZIP)


def put_archive(lease_id: str, path: str) -> Message[None]:
    """`PUT /v1/leases/{id}/archive`; the archive is sent beside it."""
    return _transfer("PUT", _path(f"/v1/leases/{_segment(lease_id)}/archive", path=path), _nothing, content_type=GZIP)


def pools() -> Message[tuple[PoolInfo, ...]]:
    """`GET /v1/pools`."""
    return Message(method="GET", path="/v1/pools", parse=lambda answer: tuple(read_value(PoolInfo, item) for item in _list(_object(answer), "pools")))


def pool(name: str) -> Message[PoolInfo]:
    """`GET /v1/pools/{name}`."""
    return Message(method="GET", path=f"/v1/pools/{_segment(name)}", parse=lambda answer: read_value(PoolInfo, _object(answer)))


def healthz() -> Message[Mapping[str, Any]]:
    """`GET /healthz`."""
    return Message(method="GET", path="/healthz", parse=_object)


def readyz(pool: str | None) -> Message[Readiness]:
    """`GET /readyz`; not ready is an answer too."""

    def parse(answer: Answer) -> Readiness:
        return Readiness(ready=answer.status == 200, report=_object(answer))

    return Message(method="GET", path=_path("/readyz", pool=pool), parse=parse, also_ok=frozenset({503}))


def result_line(line: bytes) -> Result:
    """One line of a streamed batch."""
    return read_value(Result, _decode(line))


def _transfer(method: str, path: str, parse: Callable[[Answer], T], *, accept: str = JSON, content_type: str = JSON) -> Message[T]:
    return Message(method=method, path=path, parse=parse, accept=accept, content_type=content_type, answer_within_s=TRANSFER_S, silence_s=TRANSFER_S)


def _call(call: Call, call_id: str) -> dict[str, Any]:
    asked: dict[str, Any] = {"call_id": call_id, "lease_id": call.lease_id, "tool": call.tool, "args": call.args}
    for name in ("timeout_s", "no_output_timeout_s", "output_limit_bytes", "separate_streams", "encoding"):
        value = getattr(call, name)
        if value is not None:
            asked[name] = value
    return asked


def _given(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Without what was left to the service."""
    return {name: value for name, value in asked.items() if value is not None}


def _json(value: object) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"the request cannot be written as JSON: {error}") from error


def _seconds(value: object, default_s: float) -> float:
    """A duration to wait for; what is no number is left for the service to refuse."""
    return max(0.0, float(value)) if isinstance(value, int | float) else default_s


def _segment(value: str) -> str:
    return quote(value, safe="")


def _path(route: str, /, **query: object) -> str:
    given = _given(query)
    return f"{route}?{urlencode(given, quote_via=quote)}" if given else route


def _decode(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError as error:
        raise BadAnswer(f"the service sent what is not JSON: {body[:200]!r}") from error


def _object(answer: Answer) -> dict[str, Any]:
    document = _decode(answer.body)
    if not isinstance(document, dict):
        raise BadAnswer(f"the service sent {type(document).__name__} where an object was due", status=answer.status)
    return document


def _list(document: Mapping[str, Any], name: str) -> list[Any]:
    items = document.get(name)
    if not isinstance(items, list):
        raise BadAnswer(f"the service sent no list of {name}")
    return items


def _leases_of(document: Mapping[str, Any]) -> tuple[LeaseInfo, ...]:
    return tuple(read_value(LeaseInfo, item) for item in _list(document, "leases"))


def _acquired(answer: Answer) -> Acquired:
    document = _object(answer)
    return Acquired(leases=_leases_of(document), waited_s=_seconds(document.get("waited_s"), 0.0))


def _result(answer: Answer) -> Result:
    return read_value(Result, _object(answer))


def _released(answer: Answer) -> Released:
    document = _object(answer)
    return Released(released=tuple(_list(document, "released")), unknown=tuple(_list(document, "unknown")))


def _renewed(answer: Answer) -> Renewed:
    document = _object(answer)
    lost = {}
    for item in _list(document, "lost"):
        if not isinstance(item, dict) or not isinstance(item.get("lease_id"), str):
            raise BadAnswer("the service sent a lost lease without its id")
        lost[item["lease_id"]] = service_error(item.get("code") or "lease_lost", item.get("detail"))
    return Renewed(leases=_leases_of(document), lost=lost)


def _lease_page(answer: Answer) -> LeasePage:
    document = _object(answer)
    return LeasePage(leases=_leases_of(document), next_cursor=document.get("next_cursor"))


def _entries(answer: Answer) -> tuple[FileEntry, ...]:
    return tuple(read_value(FileEntry, item) for item in _list(_object(answer), "entries"))


def _nothing(answer: Answer) -> None:
    return None
