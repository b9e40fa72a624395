"""Parses requests: checks the fields of bodies and the query parameters, fills in defaults, and makes the values of `core` from them."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Collection, Iterator
from typing import Any, TypeVar

import orjson
from pydantic import ValidationError
from starlette.requests import HTTPConnection, Request

from sandbox_server.agent.allowed_hosts import find_entry_problem
from sandbox_server.api.contract.requests import AcquireBody, CallBody, ExecBody, RequestModel, all_problems, first_problem
from sandbox_server.api.contract.specs import hosts_problem
from sandbox_server.api.limits import Limits, limit_sentence, too_many
from sandbox_server.core.errors import InvalidRequest
from sandbox_server.core.execution import Reason, Result, ToolCall
from sandbox_server.core.types import AcquireRequest
from sandbox_server.dispatch.results import invalid_field_result, service_result

AnyRequest = TypeVar("AnyRequest", bound=RequestModel)
TRUE_WORDS = frozenset({"1", "true", "yes"})
FALSE_WORDS = frozenset({"0", "false", "no"})
FIELDS_OF_POLICY = frozenset({"tool", "args", "command"})
"""The fields of a call that the policy writes; `command` stands for what is in `args`. The environment writes all others."""
SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


def parse_body(model: type[AnyRequest], document: dict[str, Any]) -> AnyRequest:
    """Check a JSON object against the model of a body.

    Raises:
        InvalidRequest: it does not fit the model; the error names the field.
    """
    try:
        return model.model_validate(document)
    except ValidationError as error:
        field, problem = first_problem(error, model.model_fields)
        raise InvalidRequest(problem, field=field) from None


def acquire_request(body: AcquireBody, tenant: str, default_pool: str, limits: Limits) -> AcquireRequest:
    """Make the acquire request of a body.

    Raises:
        InvalidRequest: the fields contradict each other, or there are too many labels.
    """
    if len(body.labels) > limits.labels:
        raise too_many(limits, "labels", "labels")
    return AcquireRequest(
        tenant=tenant,
        pool=body.pool if body.pool is not None else default_pool,
        count=body.count,
        trajectory_ids=_trajectory_ids(body),
        run_id=body.run_id,
        ttl_s=body.ttl_s,
        wait_s=body.wait_s,
        allow_network=body.allow_network,
        allow_hosts=_allow_hosts(body),
        cache=body.cache,
        priority=body.priority,
        labels=body.labels,
        request_key=body.request_key,
    )


def _allow_hosts(body: AcquireBody) -> tuple[str, ...] | None:
    problem = hosts_problem("allow_hosts", body.allow_hosts or (), find_entry_problem)
    if problem is not None:
        raise InvalidRequest(problem, field="allow_hosts")
    return None if body.allow_hosts is None else tuple(body.allow_hosts)


def _trajectory_ids(body: AcquireBody) -> tuple[str | None, ...]:
    if body.trajectory_ids is not None:
        if body.trajectory_id is not None:
            raise InvalidRequest("trajectory_id: give it or trajectory_ids, not both", field="trajectory_id")
        if len(body.trajectory_ids) != body.count:
            raise InvalidRequest(f"trajectory_ids: {len(body.trajectory_ids)} of them for a count of {body.count}", field="trajectory_ids")
        return tuple(body.trajectory_ids)
    if body.trajectory_id is not None and body.count > 1:
        raise InvalidRequest("trajectory_id: names one slot; a gang takes trajectory_ids, one for each of its slots", field="trajectory_id")
    return (body.trajectory_id,) * min(body.count, 100_000)


def new_call_id() -> str:
    """Generate an id for a call that was sent without one."""
    return f"c-{os.urandom(10).hex()}"


def batch_items(document: dict[str, Any], limits: Limits) -> list[ToolCall | Result]:
    """Parse the items of an exec-batch. An invalid item gives its result, a valid one gives its call.

    Raises:
        InvalidRequest: there is no list of calls, it is empty or too long, or an item has no `lease_id` or no `tool`.
    """
    calls = document.get("calls")
    if not isinstance(calls, list) or not calls:
        raise InvalidRequest("calls: must be a list of at least one call", field="calls")
    if len(calls) > limits.batch_calls:
        raise too_many(limits, "batch_calls", "calls")
    for index, item in enumerate(calls):
        # The result of an item names its lease, so the id must be a string that UTF-8 can encode.
        if not isinstance(item, dict) or not _is_text(item.get("lease_id")) or not isinstance(item.get("tool"), str):
            raise InvalidRequest(f"calls.{index}: must be an object with string lease_id and tool", field=f"calls.{index}")
    items = [call_of(item, limits) for item in calls]
    return _within_output_budget(items, limits)


def _within_output_budget(items: list[ToolCall | Result], limits: Limits) -> list[ToolCall | Result]:
    budget_bytes = limits.batch_output_bytes
    for index, item in enumerate(items):
        if isinstance(item, ToolCall):
            if item.output_limit_bytes > budget_bytes:
                items[index] = invalid_field_result(item, "output_limit_bytes", f"output_limit_bytes: {limit_sentence(limits, 'batch_output_bytes')}")
            else:
                budget_bytes -= item.output_limit_bytes
    return items


def call_of(item: dict[str, Any], limits: Limits) -> ToolCall | Result:
    """Parse one item of a batch: the call, or for an invalid item its result `invalid_args`."""
    try:
        body = CallBody.model_validate(item)
    except ValidationError as error:
        return _invalid(item, all_problems(error, CallBody.model_fields))
    return _call(body, body.lease_id, body.tool, body.args, limits)


def exec_call(document: dict[str, Any], lease_id: str, limits: Limits) -> ToolCall | Result:
    """Parse the body of a single exec: the fields of an item of a batch, or the short form with `command`.

    Raises:
        InvalidRequest: the body has neither a tool nor a command, or names another lease than its path.
    """
    if "command" not in document and "tool" not in document:
        raise InvalidRequest("tool: missing; give tool and args, or command", field="tool")
    if document.get("lease_id", lease_id) != lease_id:
        raise InvalidRequest("lease_id: is not the lease of the path", field="lease_id")
    item = {**document, "lease_id": lease_id}
    try:
        body = ExecBody.model_validate(item)
    except ValidationError as error:
        return _invalid(item, all_problems(error, ExecBody.model_fields))
    if body.command is None:
        return _call(body, lease_id, body.tool, body.args, limits)
    if "tool" in document or "args" in document:
        return invalid_field_result(_unchecked(item), "command", "command: stands for tool and args; give one or the other")
    return _call(body, lease_id, "bash", {"command": body.command}, limits)


def _call(body: CallBody, lease_id: str, tool: str, args: dict[str, Any], limits: Limits) -> ToolCall | Result:
    call = ToolCall(
        call_id=body.call_id if body.call_id is not None else new_call_id(),
        lease_id=lease_id,
        tool=tool,
        args=args,
        timeout_s=body.timeout_s,
        no_output_timeout_s=body.no_output_timeout_s,
        output_limit_bytes=body.output_limit_bytes,
        separate_streams=body.separate_streams,
        encoding=body.encoding,
    )
    field, problem = "tool", _problem_of_tool(tool)
    if problem is None:
        field, problem = "args", problem_of_args(args, limits)
    return call if problem is None else service_result(call, Reason.INVALID_ARGS, problem, evidence={"field": field, "detail": problem})


def _problem_of_tool(tool: str) -> str | None:
    return None if _is_text(tool) else "tool: contains half of a surrogate pair, which UTF-8 cannot encode"


def problem_of_args(args: dict[str, Any], limits: Limits) -> str | None:
    """What is wrong with the arguments of a call, so that they cannot be sent to an agent; None if nothing is."""
    try:
        size_bytes = len(orjson.dumps(args))
    except orjson.JSONEncodeError as error:
        return f"args: cannot be encoded as JSON in UTF-8; half of a surrogate pair in a string is one reason: {error}"
    return f"args: {limit_sentence(limits, 'call_bytes')}" if size_bytes > limits.call_bytes else None


def _is_text(value: object) -> bool:
    """Whether a value is a string that UTF-8 can encode. A string with half of a surrogate pair is not."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _invalid(item: dict[str, Any], problems: Iterator[tuple[str, str]]) -> Result:
    """The result of an invalid call.

    The policy is at fault only if all invalid fields are the policy's: otherwise the call would have failed whatever the policy wrote.
    """
    call = _unchecked(item)
    first = next(problems)
    for field, problem in itertools.chain([first], problems):
        if field.partition(".")[0] not in FIELDS_OF_POLICY:
            return invalid_field_result(call, field, problem)
    field, problem = first
    return service_result(call, Reason.INVALID_ARGS, problem, evidence={"field": field, "detail": problem})


def _unchecked(item: dict[str, Any]) -> ToolCall:
    """A call with the lease and, if they are valid, the id and the encoding of an invalid item; its result needs no more."""
    call_id = item.get("call_id")
    encoding = item.get("encoding")
    return ToolCall(
        call_id=call_id if isinstance(call_id, str) and len(call_id) <= 128 and _is_text(call_id) else new_call_id(),
        lease_id=item["lease_id"],
        tool="",
        args={},
        encoding=encoding if encoding == "base64" else "utf-8",
    )


def query(request: HTTPConnection, allowed: Collection[str]) -> dict[str, str]:
    """The query parameters of a request.

    Args:
        request: the request.
        allowed: the names of the parameters that the route takes.

    Raises:
        InvalidRequest: a parameter is unknown, is given twice, or contains a NUL.
    """
    found: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name not in allowed:
            raise InvalidRequest(f"{name}: unknown query parameter; allowed are {', '.join(allowed) or 'none'}", field=name)
        if name in found:
            raise InvalidRequest(f"{name}: given twice", field=name)
        if "\0" in value:
            raise InvalidRequest(f"{name}: contains a NUL", field=name)
        found[name] = value
    return found


def whole_number(text: str | None, name: str, default: int, largest: int) -> int:
    """Parse a query parameter that is a count.

    Raises:
        InvalidRequest: it is not a whole number from 1 to `largest`.
    """
    if text is None:
        return default
    if not text.isascii() or not text.isdecimal() or len(text) > 18 or not 1 <= int(text) <= largest:
        raise InvalidRequest(f"{name}: must be a whole number from 1 to {largest}", field=name)
    return int(text)


def flag(text: str | None, name: str) -> bool:
    """Parse a query parameter that is a switch; without it, the switch is off.

    Raises:
        InvalidRequest: its value is not one of the words for on and off.
    """
    if text is None or text.lower() in FALSE_WORDS:
        return False
    if text.lower() in TRUE_WORDS:
        return True
    raise InvalidRequest(f"{name}: must be 1 or 0", field=name)


def offset_of(text: str | None, name: str = "offset") -> int:
    """Parse an offset in an output, in bytes, or the id of an event.

    Raises:
        InvalidRequest: it is not a whole number of at most 18 digits.
    """
    if text is None:
        return 0
    if not text.isascii() or not text.isdecimal() or len(text) > 18:
        raise InvalidRequest(f"{name}: must be a whole number from 0 on", field=name)
    return int(text)


def wait_of(text: str | None, limits: Limits) -> float:
    """Parse how long to wait for a call, in seconds.

    Raises:
        InvalidRequest: it is not a number from 0 to `limits.call_wait_s`.
    """
    if text is None:
        return 0.0
    if not SECONDS.fullmatch(text):
        raise InvalidRequest("wait_s: must be a number of seconds from 0 on", field="wait_s")
    if float(text) > limits.call_wait_s:
        raise too_many(limits, "call_wait_s", "wait_s")
    return float(text)


def last_event_id(request: Request) -> int | None:
    """The id of the event after which an event stream continues; None if the request has no `Last-Event-ID`.

    Raises:
        InvalidRequest: the header is not an id of an event.
    """
    last = request.headers.get("last-event-id")
    return offset_of(last, "Last-Event-ID") if last else None
