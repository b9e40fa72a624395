"""Reads and parses the bodies of requests, within the limits of their size, depth and number of values."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator
from typing import Any

import orjson
from starlette.requests import Request

from sandbox_server.api.body_budget import SMALL_BODY_BYTES, BodyReservation
from sandbox_server.api.limits import Limits, too_large, too_many
from sandbox_server.api.request_context import service_of, tenant_of
from sandbox_server.core.cleanup import cleanup_on_failure
from sandbox_server.core.errors import InvalidRequest


class ClientDisconnected(Exception):
    """The client has closed the connection, so no response can be sent."""


class ClientStalled(ClientDisconnected):
    """The client does not read its response, so its connection is to be closed."""


def check_length(request: Request, limits: Limits, name: str) -> None:
    """Refuse a body whose `Content-Length` exceeds a limit.

    Raises:
        PayloadTooLarge: it does.
    """
    length = request.headers.get("content-length")
    if length is not None and length.isdecimal() and (len(length) > 18 or int(length) > getattr(limits, name)):
        raise too_large(limits, name)


async def read_chunks(request: Request, limits: Limits, name: str) -> AsyncIterator[bytes]:
    """Yield the body of a request in chunks, as they arrive.

    Args:
        request: the request.
        limits: the limits of the service.
        name: the limit that holds for this body. Both its `Content-Length` and the bytes received are checked.

    Raises:
        PayloadTooLarge: the body is larger than the limit.
        ClientDisconnected: the client disconnected before the end of the body.
    """
    check_length(request, limits, name)
    limit_bytes = getattr(limits, name)
    receive = request.receive
    received_bytes = 0
    more = True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientDisconnected
        chunk: bytes = message.get("body", b"")
        more = message.get("more_body", False)
        received_bytes += len(chunk)
        if received_bytes > limit_bytes:
            raise too_large(limits, name)
        if chunk:
            yield chunk


async def receive_part(request: Request, stall_s: float) -> tuple[bytes, bool]:
    """Receive the next part of a body. Returns it, and whether there is more.

    Raises:
        InvalidRequest: nothing arrived for `stall_s` seconds.
        ClientDisconnected: the client disconnected before the end of the body.
    """
    try:
        async with asyncio.timeout(stall_s):
            message = await request.receive()
    except TimeoutError:
        why = f"body: no more of it arrived within the {stall_s:g} s of `limits.body_stall_s`"
        raise InvalidRequest(f"{why}: send it again", field="body", limit="body_stall_s") from None
    if message["type"] != "http.request":
        raise ClientDisconnected
    return message.get("body", b""), message.get("more_body", False)


async def _read_body(request: Request, limits: Limits) -> tuple[bytes, BodyReservation]:
    """Read the whole body of a request. Returns it with the memory that is reserved for it.

    A small body that has arrived at once reserves nothing. For another, memory for all of it is reserved before the rest is read: bodies that each
    had memory for a part would wait for each other for ever. A body without `Content-Length` reserves as much as a body may have.

    Raises:
        PayloadTooLarge, InvalidRequest, ClientDisconnected, QuotaExceeded: as `read_json`.
    """
    check_length(request, limits, "body_bytes")
    body, more = await receive_part(request, limits.body_stall_s)
    if len(body) > limits.body_bytes:
        raise too_large(limits, "body_bytes")
    tenant = tenant_of(request).name
    if not more and len(body) <= SMALL_BODY_BYTES:
        return body, BodyReservation(None, tenant, 0)
    length = request.headers.get("content-length", "")
    size_bytes = len(body) if not more else int(length) if length.isdecimal() else limits.body_bytes
    reservation = await service_of(request).body_budget.reserve(tenant, size_bytes)
    with cleanup_on_failure(reservation.release):
        chunks = [body]
        received_bytes = len(body)
        while more:
            chunk, more = await receive_part(request, limits.body_stall_s)
            received_bytes += len(chunk)
            if received_bytes > limits.body_bytes:
                raise too_large(limits, "body_bytes")
            chunks.append(chunk)
        return b"".join(chunks), reservation


async def read_json(request: Request, limits: Limits, *, with_lone_surrogates: bool = False) -> tuple[Any, BodyReservation]:
    """Read the body of a request as JSON.

    Args:
        request: the request.
        limits: the limits of the service.
        with_lone_surrogates: whether strings may hold an escaped half of a surrogate pair, which UTF-8 cannot encode. The caller of this function
            then has to deal with such strings.

    Returns:
        The JSON value, and the memory that is reserved for it, to be released when the value is needed no more.

    Raises:
        QuotaExceeded: no memory was free for it within `limits.body_wait_s`.
        PayloadTooLarge: it is longer than `limits.body_bytes`.
        InvalidRequest: nothing arrived for `limits.body_stall_s`, or the body is not JSON, has more values than `limits.json_values`, is nested
            deeper than `limits.json_depth`, or has a key twice in one object.
        ClientDisconnected: the client disconnected before the end of the body.
    """
    body, reservation = await _read_body(request, limits)
    with cleanup_on_failure(reservation.release):
        return parse_json(body, limits, with_lone_surrogates=with_lone_surrogates), reservation


def parse_json(body: bytes, limits: Limits, *, with_lone_surrogates: bool = False) -> Any:
    """Parse JSON within the limits of its depth and number of values.

    Args:
        body: the JSON.
        limits: the limits of the service.
        with_lone_surrogates: see `read_json`.

    Raises:
        InvalidRequest: see `read_json`.
    """
    if not body:
        raise InvalidRequest("the body is empty: send a JSON object", field="body")
    bare = without_escapes(body)
    check_count(bare, limits)
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        if not with_lone_surrogates or not ESCAPED_SURROGATE.search(body):
            raise InvalidRequest(f"the body is not JSON: {error}", field="body") from None
        document = _parse_lone_surrogates(body, limits)
    # The number of brackets is quick to count and never smaller than the depth, so only a document with many of them is searched.
    if body.count(b"{") + body.count(b"[") > limits.json_depth:
        check_depth(document, limits)
    check_keys(body, bare, document)
    return document


ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
INTEGER_RANGE = range(-(1 << 63), 1 << 64)
"""The integers that orjson reads as such; it reads others as floats."""


def _parse_lone_surrogates(body: bytes, limits: Limits) -> Any:
    """Parse a body as orjson does, but accept lone surrogates. This takes about twice as long, so it is used only for what orjson refuses.

    Raises:
        InvalidRequest: the body is not JSON, or is nested too deep.
    """
    try:
        return json.loads(body.decode(), parse_int=_parse_integer, parse_float=_parse_float, parse_constant=_refuse_constant)
    except RecursionError:
        raise too_many(limits, "json_depth", "body") from None
    except ValueError as error:
        raise InvalidRequest(f"the body is not JSON: {error}", field="body") from None


def _parse_integer(digits: str) -> int | float:
    number = int(digits)
    return number if number in INTEGER_RANGE else _parse_float(digits)


def _parse_float(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError("a number is beyond the range of a double")
    return number


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON value")


async def read_object(request: Request, limits: Limits) -> dict[str, Any]:
    """Read the body of a request as a JSON object of which little is kept: the memory for it is released at once.

    Raises:
        Exception: those of `read_json`, and InvalidRequest for JSON that is not an object.
    """
    document, reservation = await read_reserved_object(request, limits)
    reservation.release()
    return document


async def read_reserved_object(request: Request, limits: Limits, *, with_lone_surrogates: bool = False) -> tuple[dict[str, Any], BodyReservation]:
    """Read the body of a request as a JSON object.

    Returns:
        The object, and the memory that is reserved for it, to be released when the object is needed no more.

    Raises:
        Exception: those of `read_json`, and InvalidRequest for JSON that is not an object.
    """
    document, reservation = await read_json(request, limits, with_lone_surrogates=with_lone_surrogates)
    if not isinstance(document, dict):
        reservation.release()
        raise InvalidRequest("the body is not a JSON object", field="body")
    return document, reservation


def without_escapes(body: bytes) -> bytes:
    """A JSON body without escaped backslashes and quotes, so that every quote that is left begins or ends a string."""
    return body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body


def check_count(bare: bytes, limits: Limits) -> None:
    """Refuse a body with more values than `limits.json_values` before it is parsed: making millions of objects would block all other requests.

    Commas and brackets are counted, those within strings aside.

    Args:
        bare: the body, as `without_escapes` returns it.
        limits: the limits of the service.

    Raises:
        InvalidRequest: there are more values.
    """
    most = limits.json_values
    if bare.count(b",") + bare.count(b"{") + bare.count(b"[") <= most:
        return
    if bare.count(b'"') <= 4 * most:  # at most a key and a string for each value
        outside = b"".join(bare.split(b'"')[::2])
        if outside.count(b",") + outside.count(b"{") + outside.count(b"[") <= most:
            return
    raise too_many(limits, "json_values", "body")


def check_depth(document: Any, limits: Limits) -> None:
    """Refuse a document that is nested deeper than `limits.json_depth`. It is searched level by level, so no recursion limit is met.

    Raises:
        InvalidRequest: it is nested deeper.
    """
    level = [document] if isinstance(document, dict | list) else []
    for _ in range(limits.json_depth):
        level = [child for node in level for child in (node.values() if isinstance(node, dict) else node) if isinstance(child, dict | list)]
        if not level:
            return
    raise too_many(limits, "json_depth", "body")


KEY = re.compile(rb'"[ \t\r\n]*:')


def check_keys(body: bytes, bare: bytes, document: Any) -> None:
    """Refuse a body that has a key twice in one object: which value was meant is not known, and a proxy may have taken the other one.

    In a body without escapes, a quote before a colon ends a key. A body that has more of those than the parsed document has keys is parsed again, to
    find the key. Strings that hold a quote before a colon cause nothing but the second parse.

    Args:
        body: the body.
        bare: the body, as `without_escapes` returns it.
        document: the parsed body.

    Raises:
        InvalidRequest: a key is there twice; the error names it.
    """
    if sum(1 for _ in KEY.finditer(bare)) > _count_keys(document):
        json.loads(body, object_pairs_hook=_refuse_duplicates)


def _count_keys(document: Any) -> int:
    count = 0
    nodes = [document]
    while nodes:
        node = nodes.pop()
        if isinstance(node, dict):
            count += len(node)
            nodes.extend(child for child in node.values() if isinstance(child, dict | list))
        elif isinstance(node, list):
            nodes.extend(child for child in node if isinstance(child, dict | list))
    return count


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> None:
    keys = set()
    for key, _ in pairs:
        if key in keys:
            raise InvalidRequest(f"the body has the key {key[:64]!a} twice", field="body")
        keys.add(key)
