"""Reading what a caller sends: bounded in bytes and in depth, whatever it claims."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import orjson
from starlette.requests import Request

from sandbox_server.api.limits import Limits, too_large, too_many
from sandbox_server.core.errors import InvalidRequest


class CallerGone(Exception):
    """The caller hung up; there is nobody to answer."""


class CallerStalled(CallerGone):
    """The caller is there, and does not read its answer: the connection is to be closed."""


def _check_length(request: Request, limits: Limits, name: str) -> None:
    claimed = request.headers.get("content-length")
    if claimed is not None and claimed.isdecimal() and (len(claimed) > 18 or int(claimed) > getattr(limits, name)):
        raise too_large(limits, name)


async def read_chunks(request: Request, limits: Limits, name: str) -> AsyncIterator[bytes]:
    """The body as it comes.

    Args:
        request: whose body.
        limits: one of them bounds it, by what the caller claims and by counting.
        name: which one.

    Raises:
        PayloadTooLarge: there is more.
        CallerGone: the caller hung up before the end.
    """
    _check_length(request, limits, name)
    limit_bytes = getattr(limits, name)
    receive = request.receive
    seen = 0
    more = True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            raise CallerGone
        chunk: bytes = message.get("body", b"")
        more = message.get("more_body", False)
        seen += len(chunk)
        if seen > limit_bytes:
            raise too_large(limits, name)
        if chunk:
            yield chunk


async def read_json(request: Request, limits: Limits) -> Any:
    """The body as JSON.

    Raises:
        PayloadTooLarge: it is longer than `limits.body_bytes`.
        InvalidRequest: it is no JSON, holds more than `limits.json_values`, nests deeper than `limits.json_depth`, or gives a key twice.
        CallerGone: the caller hung up before the end.
    """
    body = b"".join([chunk async for chunk in read_chunks(request, limits, "body_bytes")])
    if not body:
        raise InvalidRequest("the body is empty: send a JSON object", field="body")
    bare = without_escapes(body)
    check_count(bare, limits)
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not JSON: {error}", field="body") from None
    # Counting brackets is cheap and never too low; only a body with many of them is walked.
    if body.count(b"{") + body.count(b"[") > limits.json_depth:
        check_depth(document, limits)
    check_keys(body, bare, document)
    return document


async def read_object(request: Request, limits: Limits) -> dict[str, Any]:
    """The body as a JSON object; raises as `read_json` does, and InvalidRequest for any other JSON."""
    document = await read_json(request, limits)
    if not isinstance(document, dict):
        raise InvalidRequest("the body is not a JSON object", field="body")
    return document


def without_escapes(body: bytes) -> bytes:
    """The body without what is escaped by a backslash: of what is left, every quote begins or ends a text."""
    return body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body


def check_count(bare: bytes, limits: Limits) -> None:
    """Refuse a body of very many small values before they are made: millions would hold everybody up. What stands in texts does not count.

    Args:
        bare: the body, `without_escapes`.
        limits: one of them is `json_values`.

    Raises:
        InvalidRequest: there are more.
    """
    most = limits.json_values
    if bare.count(b",") + bare.count(b"{") + bare.count(b"[") <= most:
        return
    if bare.count(b'"') <= 4 * most:  # a key and a text for each value
        outside = b"".join(bare.split(b'"')[::2])
        if outside.count(b",") + outside.count(b"{") + outside.count(b"[") <= most:
            return
    raise too_many(limits, "json_values", "body")


def check_depth(document: Any, limits: Limits) -> None:
    """Refuse a document that nests deeper than `limits.json_depth`, without recursion of our own.

    Raises:
        InvalidRequest: it does.
    """
    level = [document] if isinstance(document, dict | list) else []
    for _ in range(limits.json_depth):
        level = [child for node in level for child in (node.values() if isinstance(node, dict) else node) if isinstance(child, dict | list)]
        if not level:
            return
    raise too_many(limits, "json_depth", "body")


KEY = re.compile(rb'"[ \t\r\n]*:')


def check_keys(body: bytes, bare: bytes, document: Any) -> None:
    """Refuse a body that gives a key twice: which one was meant cannot be known, and whoever looked at it before may have taken the other.

    A quote before a colon is a key's, once those within texts are gone: only a body with more of them than there are keys is read again.

    Raises:
        InvalidRequest: it does; the error names the key.
    """
    if sum(1 for _ in KEY.finditer(bare)) > _count_keys(document):
        json.loads(body, object_pairs_hook=_unique)


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


def _unique(pairs: list[tuple[str, Any]]) -> None:
    seen = set()
    for key, _ in pairs:
        if key in seen:
            shown = ascii(key[:64])
            raise InvalidRequest(f"the body gives {shown} twice", field="body")
        seen.add(key)
