"""Every request about leases, calls and files as a value, and how its answer is read. Pure, and written once for both clients."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, Unpack

from env_client.errors import BadAnswer, InvalidRequest, service_error
from env_client.messages.message import (
    BYTES,
    EVENT_STREAM,
    GZIP,
    JSON,
    NDJSON,
    PROMPT_S,
    SILENCE_S,
    TRANSFER_S,
    Answer,
    Message,
    decode,
    given,
    list_of,
    nothing,
    object_of,
    path_of,
    seconds,
    segment,
    to_json,
)
from env_client.values import (
    Acquired,
    AcquireOptions,
    Call,
    CallOptions,
    CallStatus,
    Fault,
    FileEntry,
    LeaseInfo,
    LeasePage,
    Reason,
    Released,
    Renewed,
    Result,
    read_value,
)

T = TypeVar("T")

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


def new_call_id() -> str:
    """An id for a call that nobody named."""
    return "c-" + secrets.token_hex(12)


def acquire(pool: str | None, count: int, **options: Unpack[AcquireOptions]) -> Message[Acquired]:
    """`POST /v1/acquire`, always with a request key, so that it may be sent again."""
    asked: dict[str, Any] = {"pool": pool, "count": count, **options}
    asked["request_key"] = options.get("request_key") or "k-" + secrets.token_hex(16)
    queue_s = min(seconds(options.get("wait_s"), LONGEST_QUEUE_S), LONGEST_LEASE_S) + SLACK_S
    return Message(
        method="POST",
        path="/v1/acquire",
        body=to_json(given(asked)),
        parse=_acquired,
        answer_within_s=queue_s,
        silence_s=queue_s,
        final_codes=frozenset({"backend_unavailable"}),
    )


def make_call(lease_id: str, tool: str, args: Mapping[str, Any] | None, **options: Unpack[CallOptions]) -> Call:
    """A call with an id of its own.

    Raises:
        InvalidRequest: `tool` or an option is not of its type. `args` may be anything: what is wrong with it is the call's own result.
    """
    options["call_id"] = options.get("call_id") or new_call_id()
    return Call(lease_id=lease_id, tool=tool, args={} if args is None else args, **options)


def named(calls: Iterable[Call]) -> list[tuple[Call, str]]:
    """The calls, each with its own id or a new one.

    Raises:
        TypeError: one of them is no `Call`.
    """
    asked = list(calls)
    for index, call in enumerate(asked):
        if not isinstance(call, Call):
            raise TypeError(f"a batch is made of calls, such as lease.call('bash', {{'command': 'ls'}}), but item {index} is {call!r:.100}")
    return [(call, call.call_id or new_call_id()) for call in asked]


def exec_batch(calls: Sequence[tuple[Call, str]], *, stream: bool = False) -> Message[tuple[Result, ...]]:
    """`POST /v1/exec-batch`; with `stream` the answer is one result a line, and `parse` is not for it."""
    lasts_s: dict[str, float] = {}
    for call, _ in calls:
        lasts_s[call.lease_id] = lasts_s.get(call.lease_id, 0.0) + seconds(call.timeout_s, LONGEST_CALL_S)
    within_s = max(lasts_s.values(), default=0.0) + SLACK_S

    def parse(answer: Answer) -> tuple[Result, ...]:
        results = tuple(read_value(Result, item) for item in list_of(object_of(answer), "results"))
        if len(results) != len(calls):
            raise BadAnswer(f"the service sent {len(results)} results for {len(calls)} calls")
        return results

    return Message(
        method="POST",
        path="/v1/exec-batch",
        body=to_json({"calls": [_call(call, call_id) for call, call_id in calls]}),
        accept=NDJSON if stream else JSON,
        parse=parse,
        call_ids=tuple(call_id for _, call_id in calls),
        unfinished=lambda results: any(result.unfinished for result in results),
        answer_within_s=within_s,
        # A stream has a line every 15 s, so silence is noticed early.
        silence_s=min(within_s, SILENCE_S if stream else REJOIN_S),
    )


def exec_one(call: Call, *, stream: bool = False, offset: int = 0) -> Message[Result]:
    """`POST /v1/leases/{id}/exec`; with `stream` the answer is events, of the output from `offset` on, and `parse` is not for it."""
    asked = _call(call, call.call_id or new_call_id())
    del asked["lease_id"]
    within_s = seconds(call.timeout_s, LONGEST_CALL_S) + SLACK_S
    return Message(
        method="POST",
        path=f"/v1/leases/{segment(call.lease_id)}/exec",
        body=to_json(asked),
        accept=EVENT_STREAM if stream else JSON,
        parse=_result_of_own_call,
        call_ids=(asked["call_id"],),
        unfinished=lambda result: result.unfinished,
        last_event_id=str(offset) if offset else None,
        answer_within_s=within_s,
        silence_s=min(within_s, SILENCE_S if stream else REJOIN_S),
    )


def call_status(lease_id: str, call_id: str, wait_s: float | None) -> Message[CallStatus]:
    """`GET /v1/leases/{id}/calls/{call_id}`."""
    within_s = seconds(wait_s, 0.0) + PROMPT_S
    return Message(method="GET", path=path_of(_call_path(lease_id, call_id), wait_s=wait_s), parse=_call_status, answer_within_s=within_s, silence_s=within_s)


def call_events(lease_id: str, call_id: str, offset: int, within_s: float) -> Message[Result]:
    """`GET /v1/leases/{id}/calls/{call_id}/events`: what its output was and is from a byte on, then its result."""
    path = path_of(_call_path(lease_id, call_id) + "/events", offset=offset or None)
    return Message(
        method="GET", path=path, accept=EVENT_STREAM, parse=_result, call_ids=(call_id,), answer_within_s=within_s, silence_s=min(within_s, SILENCE_S)
    )


def call_output(lease_id: str, call_id: str, offset: int) -> Message[bytes]:
    """`GET /v1/leases/{id}/calls/{call_id}/output`: all of it from a byte on."""
    return _transfer("GET", path_of(_call_path(lease_id, call_id) + "/output", offset=offset or None), lambda answer: answer.body, accept=BYTES)


def release(lease_ids: Iterable[str] | None, run_id: str | None, reset_workspace: bool) -> Message[Released]:
    """`POST /v1/release`, of leases or of a run."""
    asked = given({"lease_ids": None if lease_ids is None else list(lease_ids), "run_id": run_id, "reset_workspace": reset_workspace})
    return Message(method="POST", path="/v1/release", body=to_json(asked), parse=_released, answer_within_s=AT_ONCE_S)


def renew(lease_ids: Iterable[str], ttl_s: float | None) -> Message[Renewed]:
    """`POST /v1/renew`."""
    asked = given({"lease_ids": list(lease_ids), "ttl_s": ttl_s})
    return Message(method="POST", path="/v1/renew", body=to_json(asked), parse=_renewed, answer_within_s=AT_ONCE_S)


def cancel(lease_id: str, call_id: str) -> Message[Result]:
    """`POST /v1/cancel`."""
    return Message(method="POST", path="/v1/cancel", body=to_json({"lease_id": lease_id, "call_id": call_id}), parse=_result)


def narrow(lease_id: str, allow_network: bool | None, cache: str | None) -> Message[LeaseInfo]:
    """`POST /v1/leases/{id}/narrow`. It ends the slot's processes: an answer that was lost is asked for again, which changes nothing more."""
    asked = given({"allow_network": allow_network, "cache": cache})
    return Message(method="POST", path=f"/v1/leases/{segment(lease_id)}/narrow", body=to_json(asked), parse=_lease)


def lease_info(lease_id: str) -> Message[LeaseInfo]:
    """`GET /v1/leases/{id}`."""
    return Message(method="GET", path=f"/v1/leases/{segment(lease_id)}", parse=_lease)


def leases(run_id: str | None, trajectory_id: str | None, limit: int | None, cursor: str | None) -> Message[LeasePage]:
    """`GET /v1/leases`."""
    return Message(method="GET", path=path_of("/v1/leases", run_id=run_id, trajectory_id=trajectory_id, limit=limit, cursor=cursor), parse=_lease_page)


def get_file(lease_id: str, path: str) -> Message[bytes]:
    """`GET /v1/leases/{id}/files`."""
    return _transfer("GET", path_of(f"/v1/leases/{segment(lease_id)}/files", path=path), lambda answer: answer.body, accept=BYTES)


def put_file(lease_id: str, path: str, mode: int | None) -> Message[None]:
    """`PUT /v1/leases/{id}/files`; the content is sent beside it.

    Raises:
        TypeError: the mode is no number.
    """
    if not isinstance(mode, int | None):
        raise TypeError(f"mode is a number, such as 0o644, not {mode!r}")
    octal = None if mode is None else f"{mode:04o}"
    return _transfer("PUT", path_of(f"/v1/leases/{segment(lease_id)}/files", path=path, mode=octal), nothing, content_type=BYTES)


def list_files(lease_id: str, path: str, recursive: bool) -> Message[tuple[FileEntry, ...]]:
    """`GET /v1/leases/{id}/files/list`."""
    where = path_of(f"/v1/leases/{segment(lease_id)}/files/list", path=path, recursive=1 if recursive else None)
    return _transfer("GET", where, _entries)


def get_archive(lease_id: str, path: str) -> Message[bytes]:
    """`GET /v1/leases/{id}/archive`."""
    return _transfer("GET", path_of(f"/v1/leases/{segment(lease_id)}/archive", path=path), lambda answer: answer.body, accept=GZIP)


def put_archive(lease_id: str, path: str) -> Message[None]:
    """`PUT /v1/leases/{id}/archive`; the archive is sent beside it."""
    return _transfer("PUT", path_of(f"/v1/leases/{segment(lease_id)}/archive", path=path), nothing, content_type=GZIP)


def check_call(result: Result, *, own_tool: bool) -> Result:
    """The result of a call, unless it is that the program has made a call that is none: then nothing has run, and no policy is to be blamed.

    Args:
        result: what the service says.
        own_tool: whether the program itself has named the tool, and not a model.

    Raises:
        InvalidRequest: a field beside `tool` and `args` is wrong, or there is no tool of the name that the program has given.
    """
    if result.reason != Reason.INVALID_ARGS:
        return result
    evidence = result.metadata.get("evidence")
    field = evidence.get("field") if isinstance(evidence, Mapping) else None
    if result.fault == Fault.INFRA or (own_tool and field == "tool"):
        raise InvalidRequest(result.error, extra={"call_id": result.call_id, **({"field": field} if isinstance(field, str) else {})})
    return result


def result_line(line: bytes) -> Result:
    """One line of a streamed batch."""
    return read_value(Result, decode(line))


def _transfer(method: str, path: str, parse: Callable[[Answer], T], *, accept: str = JSON, content_type: str = JSON) -> Message[T]:
    return Message(method=method, path=path, parse=parse, accept=accept, content_type=content_type, answer_within_s=TRANSFER_S, silence_s=TRANSFER_S)


def _call(call: Call, call_id: str) -> dict[str, Any]:
    asked: dict[str, Any] = {"call_id": call_id, "lease_id": call.lease_id, "tool": call.tool, "args": call.args}
    for name in ("timeout_s", "no_output_timeout_s", "output_limit_bytes", "separate_streams", "encoding"):
        value = getattr(call, name)
        if value is not None:
            asked[name] = value
    return asked


def _call_path(lease_id: str, call_id: str) -> str:
    return f"/v1/leases/{segment(lease_id)}/calls/{segment(call_id)}"


def _lease(answer: Answer) -> LeaseInfo:
    return read_value(LeaseInfo, object_of(answer))


def _call_status(answer: Answer) -> CallStatus:
    document = object_of(answer)
    if document.get("state") == "done":
        document = {**document, "result": read_value(Result, document.get("result"))}
    return read_value(CallStatus, document)


def _leases_of(document: Mapping[str, Any]) -> tuple[LeaseInfo, ...]:
    return tuple(read_value(LeaseInfo, item) for item in list_of(document, "leases"))


def _acquired(answer: Answer) -> Acquired:
    document = object_of(answer)
    return Acquired(leases=_leases_of(document), waited_s=seconds(document.get("waited_s"), 0.0))


def _result(answer: Answer) -> Result:
    return read_value(Result, object_of(answer))


def _result_of_own_call(answer: Answer) -> Result:
    return check_call(_result(answer), own_tool=True)


def _released(answer: Answer) -> Released:
    document = object_of(answer)
    return Released(released=tuple(list_of(document, "released")), unknown=tuple(list_of(document, "unknown")))


def _renewed(answer: Answer) -> Renewed:
    document = object_of(answer)
    lost = {}
    for item in list_of(document, "lost"):
        if not isinstance(item, dict) or not isinstance(item.get("lease_id"), str):
            raise BadAnswer("the service sent a lost lease without its id")
        lost[item["lease_id"]] = service_error(item.get("code") or "lease_lost", item.get("detail"))
    return Renewed(leases=_leases_of(document), lost=lost)


def _lease_page(answer: Answer) -> LeasePage:
    document = object_of(answer)
    return LeasePage(leases=_leases_of(document), next_cursor=document.get("next_cursor"))


def _entries(answer: Answer) -> tuple[FileEntry, ...]:
    return tuple(read_value(FileEntry, item) for item in list_of(object_of(answer), "entries"))
