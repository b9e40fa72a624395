"""Reading what a caller sends: bounded in bytes and in depth, whatever it claims."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import orjson
from starlette.requests import Request

from sandbox_server.api.limits import Limits
from sandbox_server.core.errors import InvalidRequest, PayloadTooLarge


class CallerGone(Exception):
    """The caller hung up; there is nobody to answer."""


def _check_length(request: Request, limit_bytes: int, name: str) -> None:
    claimed = request.headers.get("content-length")
    if claimed is not None and claimed.isdecimal() and int(claimed) > limit_bytes:
        raise _too_large(limit_bytes, name)


def _too_large(limit_bytes: int, name: str) -> PayloadTooLarge:
    return PayloadTooLarge(f"the body is larger than the {limit_bytes} bytes of `limits.{name}`", limit=name, limit_bytes=limit_bytes)


async def read_chunks(request: Request, limit_bytes: int, name: str) -> AsyncIterator[bytes]:
    """The body as it comes.

    Args:
        request: whose body.
        limit_bytes: more than this is refused, by what the caller claims and by counting.
        name: the name of that limit.

    Raises:
        PayloadTooLarge: there is more.
        CallerGone: the caller hung up before the end.
    """
    _check_length(request, limit_bytes, name)
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
            raise _too_large(limit_bytes, name)
        if chunk:
            yield chunk


async def read_json(request: Request, limits: Limits) -> Any:
    """The body as JSON.

    Raises:
        PayloadTooLarge: it is longer than `limits.body_bytes`.
        InvalidRequest: it is no JSON, or nests deeper than `limits.json_depth`.
        CallerGone: the caller hung up before the end.
    """
    body = b"".join([chunk async for chunk in read_chunks(request, limits.body_bytes, "body_bytes")])
    if not body:
        raise InvalidRequest("the body is empty: send a JSON object", field="body")
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not JSON: {error}", field="body") from None
    # Counting brackets is cheap and never too low; only a body with many of them is walked.
    if body.count(b"{") + body.count(b"[") > limits.json_depth:
        check_depth(document, limits.json_depth)
    return document


async def read_object(request: Request, limits: Limits) -> dict[str, Any]:
    """The body as a JSON object; raises as `read_json` does, and InvalidRequest for any other JSON."""
    document = await read_json(request, limits)
    if not isinstance(document, dict):
        raise InvalidRequest("the body is not a JSON object", field="body")
    return document


def check_depth(document: Any, depth: int) -> None:
    """Refuse a document that nests deeper than so many levels, without recursion of our own.

    Raises:
        InvalidRequest: it does.
    """
    level = [document] if isinstance(document, dict | list) else []
    for _ in range(depth):
        level = [child for node in level for child in (node.values() if isinstance(node, dict) else node) if isinstance(child, dict | list)]
        if not level:
            return
    raise InvalidRequest(f"the body nests deeper than the {depth} levels of `limits.json_depth`", field="body", limit="json_depth")
