"""Messages about tool calls: running them, asking for their state and output, cancelling them."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Unpack

from env_client.errors import BadAnswer, InvalidRequest
from env_client.messages.message import (
    BYTES,
    DEADLINE_MARGIN_S,
    DEFAULT_TIMEOUT_S,
    EVENT_STREAM,
    JSON,
    NDJSON,
    STREAM_READ_TIMEOUT_S,
    TRANSFER_TIMEOUT_S,
    Message,
    Response,
    decode_json,
    duration_or_default,
    encode_json,
    path_with_query,
    quote_path_segment,
    read_list,
    read_object,
)
from env_client.values import Call, CallOptions, CallStatus, Fault, Reason, Result, read_value

#: The contract's default `max_timeout_s`: how long a call without a timeout of its own may take, in seconds.
MAX_CALL_S = 3600.0
#: A request for a long call is repeated at least this often, in seconds. The repeated request joins the running call, and a connection that has
#: failed silently is noticed.
REJOIN_INTERVAL_S = 240.0


def new_call_id() -> str:
    """Return a random call id."""
    return "c-" + secrets.token_hex(12)


def make_call(lease_id: str, tool: str, args: Mapping[str, Any] | None, **options: Unpack[CallOptions]) -> Call:
    """Create a call, with a new id unless the options give one.

    Args:
        lease_id: the lease in whose slot the call runs.
        tool: the name of the tool.
        args: the arguments of the tool, of any type: the service checks them, and wrong ones are reported in the result of the call.
        options: see `CallOptions`.

    Raises:
        InvalidRequest: `tool` or an option has the wrong type.
    """
    options["call_id"] = options.get("call_id") or new_call_id()
    return Call(lease_id=lease_id, tool=tool, args={} if args is None else args, **options)


def assign_call_ids(calls: Iterable[Call]) -> list[tuple[Call, str]]:
    """Pair each call with its own id, or with a new one if it has none.

    Raises:
        TypeError: an item is not a `Call`.
    """
    given_calls = list(calls)
    for index, call in enumerate(given_calls):
        if not isinstance(call, Call):
            raise TypeError(f"a batch consists of calls, such as lease.call('bash', {{'command': 'ls'}}), but item {index} is {call!r:.100}")
    return [(call, call.call_id or new_call_id()) for call in given_calls]


def exec_batch_message(calls: Sequence[tuple[Call, str]], *, stream: bool = False) -> Message[tuple[Result, ...]]:
    """Build `POST /v1/exec-batch`.

    Args:
        calls: the calls with their ids.
        stream: ask for one result per line (NDJSON). `parse` does not read that response; `parse_result_line` reads its lines.
    """
    lease_durations_s: dict[str, float] = {}  # the calls of one lease run one after another
    for call, _ in calls:
        lease_durations_s[call.lease_id] = lease_durations_s.get(call.lease_id, 0.0) + duration_or_default(call.timeout_s, MAX_CALL_S)
    response_timeout_s = max(lease_durations_s.values(), default=0.0) + DEADLINE_MARGIN_S

    def parse(response: Response) -> tuple[Result, ...]:
        results = tuple(read_value(Result, item) for item in read_list(read_object(response), "results"))
        if len(results) != len(calls):
            raise BadAnswer(f"the service sent {len(results)} results for {len(calls)} calls")
        return results

    return Message(
        method="POST",
        path="/v1/exec-batch",
        body=encode_json({"calls": [_call_fields(call, call_id) for call, call_id in calls]}),
        accept=NDJSON if stream else JSON,
        parse=parse,
        call_ids=tuple(call_id for _, call_id in calls),
        is_unfinished=lambda results: any(result.unfinished for result in results),
        response_timeout_s=response_timeout_s,
        read_timeout_s=min(response_timeout_s, STREAM_READ_TIMEOUT_S if stream else REJOIN_INTERVAL_S),
    )


def exec_message(call: Call, *, stream: bool = False, offset: int = 0) -> Message[Result]:
    """Build `POST /v1/leases/{id}/exec`.

    Args:
        call: the call; it gets a new id if it has none.
        stream: ask for server-sent events with the output and then the result. `parse` does not read that response.
        offset: how many bytes of output the client already has; the events begin after them.
    """
    fields = _call_fields(call, call.call_id or new_call_id())
    del fields["lease_id"]
    response_timeout_s = duration_or_default(call.timeout_s, MAX_CALL_S) + DEADLINE_MARGIN_S
    return Message(
        method="POST",
        path=f"/v1/leases/{quote_path_segment(call.lease_id)}/exec",
        body=encode_json(fields),
        accept=EVENT_STREAM if stream else JSON,
        parse=_parse_checked_result,
        call_ids=(fields["call_id"],),
        is_unfinished=lambda result: result.unfinished,
        last_event_id=str(offset) if offset else None,
        response_timeout_s=response_timeout_s,
        read_timeout_s=min(response_timeout_s, STREAM_READ_TIMEOUT_S if stream else REJOIN_INTERVAL_S),
    )


def call_status_message(lease_id: str, call_id: str, wait_s: float | None) -> Message[CallStatus]:
    """Build `GET /v1/leases/{id}/calls/{call_id}`."""
    timeout_s = duration_or_default(wait_s, 0.0) + DEFAULT_TIMEOUT_S
    return Message(
        method="GET",
        path=path_with_query(_call_path(lease_id, call_id), wait_s=wait_s),
        parse=_parse_call_status,
        response_timeout_s=timeout_s,
        read_timeout_s=timeout_s,
    )


def call_events_message(lease_id: str, call_id: str, offset: int, response_timeout_s: float) -> Message[Result]:
    """Build `GET /v1/leases/{id}/calls/{call_id}/events`: the output of the call from a byte offset on, then its result."""
    return Message(
        method="GET",
        path=path_with_query(_call_path(lease_id, call_id) + "/events", offset=offset or None),
        accept=EVENT_STREAM,
        parse=_parse_result,
        call_ids=(call_id,),
        response_timeout_s=response_timeout_s,
        read_timeout_s=min(response_timeout_s, STREAM_READ_TIMEOUT_S),
    )


def call_output_message(lease_id: str, call_id: str, offset: int) -> Message[bytes]:
    """Build `GET /v1/leases/{id}/calls/{call_id}/output`: the complete output of the call from a byte offset on."""
    return Message(
        method="GET",
        path=path_with_query(_call_path(lease_id, call_id) + "/output", offset=offset or None),
        parse=lambda response: response.body,
        accept=BYTES,
        response_timeout_s=TRANSFER_TIMEOUT_S,
        read_timeout_s=TRANSFER_TIMEOUT_S,
    )


def cancel_message(lease_id: str, call_id: str) -> Message[Result]:
    """Build `POST /v1/cancel`."""
    return Message(method="POST", path="/v1/cancel", body=encode_json({"lease_id": lease_id, "call_id": call_id}), parse=_parse_result)


def check_result(result: Result, *, tool_from_program: bool) -> Result:
    """Return the result of a call, or raise if the program itself made a mistake in the call.

    A mistake of the program must not be mistaken for one of the model, so it is raised. A mistake in `args`, or in a tool name that a model may
    have chosen, stays a result. In both cases the call has not run.

    Args:
        result: the result that the service sent.
        tool_from_program: whether the program, and not a model, chose the name of the tool.

    Raises:
        InvalidRequest: a field other than `tool` and `args` is wrong, or the program named a tool that does not exist.
    """
    if result.reason != Reason.INVALID_ARGS:
        return result
    evidence = result.metadata.get("evidence")
    field = evidence.get("field") if isinstance(evidence, Mapping) else None
    if result.fault == Fault.INFRA or (tool_from_program and field == "tool"):
        raise InvalidRequest(result.error, extra={"call_id": result.call_id, **({"field": field} if isinstance(field, str) else {})})
    return result


def parse_result_line(line: bytes) -> Result:
    """Parse one line of a streamed batch response."""
    return read_value(Result, decode_json(line))


def _call_fields(call: Call, call_id: str) -> dict[str, Any]:
    fields: dict[str, Any] = {"call_id": call_id, "lease_id": call.lease_id, "tool": call.tool, "args": call.args}
    for name in ("timeout_s", "no_output_timeout_s", "output_limit_bytes", "separate_streams", "encoding"):
        value = getattr(call, name)
        if value is not None:
            fields[name] = value
    return fields


def _call_path(lease_id: str, call_id: str) -> str:
    return f"/v1/leases/{quote_path_segment(lease_id)}/calls/{quote_path_segment(call_id)}"


def _parse_call_status(response: Response) -> CallStatus:
    document = read_object(response)
    if document.get("state") == "done":
        document = {**document, "result": read_value(Result, document.get("result"))}
    return read_value(CallStatus, document)


def _parse_result(response: Response) -> Result:
    return read_value(Result, read_object(response))


def _parse_checked_result(response: Response) -> Result:
    return check_result(_parse_result(response), tool_from_program=True)
