"""Writes results as JSON in small pieces, so that a large output is never whole in memory, and no piece blocks the event loop for long."""

from __future__ import annotations

import base64
import codecs
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import orjson
from starlette.responses import Response

from sandbox_server.api.contract.render import JSON_TYPE, dumps, json_response, result_document
from sandbox_server.api.streams import StreamResponse
from sandbox_server.core.execution import Result
from sandbox_server.dispatch.outputs import output_pieces
from sandbox_server.dispatch.run_batch.values import ItemResult

WHOLE_RESPONSE_BYTES = 48 << 10
"""A response that is larger than this is sent in pieces. JSON can make six bytes of one byte of output, so the response itself is measured."""
TEXT_BYTES = 4 << 10
"""How much of an output is decoded at a time, in bytes. As JSON, a piece is at most six times as large."""
ARTIFACT_PIECE_BYTES = 96 << 10
"""How much of an artifact is encoded at a time, in bytes. A multiple of three, for base64."""
SMALL_BYTES = 32 << 10
"""A response with no more output than this, in bytes, is made in one piece."""


def are_small(results: Sequence[Result]) -> bool:
    """Whether the output of these results is small enough for a response in one piece."""
    return all(result.output_file is None for result in results) and sum(result.held_bytes for result in results) <= SMALL_BYTES


def results_response(results: list[Result], stall_s: float, on_end: Callable[[], None]) -> Response:
    """The response to an exec-batch.

    Args:
        results: the results, in the order of the calls.
        stall_s: for how long the client may read nothing, in seconds.
        on_end: called once the results are needed no more.
    """
    if are_small(results):
        response = json_response({"results": [result_document(result) for result in results]})
        if len(response.body) <= WHOLE_RESPONSE_BYTES or not any(result.held_bytes for result in results):
            on_end()
            return response
    return StreamResponse(_results(results), JSON_TYPE, stall_s=stall_s, on_end=on_end)


def result_response(result: Result, stall_s: float, on_end: Callable[[], None]) -> Response:
    """The response with one result. The arguments are those of `results_response`."""
    response = whole_response(result, result_document)
    if response is None:
        return StreamResponse(result_pieces(result), JSON_TYPE, stall_s=stall_s, on_end=on_end)
    on_end()
    return response


def whole_response(result: Result, document_of: Callable[[Result], dict[str, Any]]) -> Response | None:
    """The response with one result in one piece; None if it is too large for that.

    Args:
        result: the result.
        document_of: makes the JSON document of the response.
    """
    if not are_small([result]):
        return None
    response = json_response(document_of(result))
    return response if len(response.body) <= WHOLE_RESPONSE_BYTES or not result.held_bytes else None


async def _results(results: list[Result]) -> AsyncGenerator[bytes, None]:
    yield b'{"results":['
    for number, result in enumerate(results):
        if number:
            yield b","
        async for piece in result_pieces(result):
            yield piece
    yield b"]}"


async def enclosed(head: bytes, result: Result, end: bytes) -> AsyncGenerator[bytes, None]:
    """The JSON of a result between other bytes, in pieces."""
    yield head
    async for piece in result_pieces(result):
        yield piece
    yield end


async def result_pieces(result: Result) -> AsyncGenerator[bytes, None]:
    """The JSON of a result in pieces. Together they are what `result_document` gives."""
    if are_small([result]):
        whole = dumps(result_document(result))
        if len(whole) <= WHOLE_RESPONSE_BYTES or not result.held_bytes:
            yield whole
            return
        del whole
    first_bytes = _stdout_bytes(result) if result.is_separate else None
    document = result_document(replace(result, output=b"", stdout=None, stderr=None, output_file=None))
    metadata = document.pop("metadata")
    names = list(document)
    at = names.index("output")
    yield dumps({name: document[name] for name in names[:at]})[:-1] + b',"output":"'
    if first_bytes is None:
        async for piece in _text(result, 0, None):
            yield piece
    yield b'",' + dumps({name: document[name] for name in names[at + 1 :]})[1:-1] + b',"metadata":'
    if first_bytes is None:
        yield dumps(metadata) + b"}"
        return
    others = {name: value for name, value in metadata.items() if name not in ("stdout", "stderr")}
    yield (dumps(others)[:-1] + b"," if others else b"{") + b'"stdout":"'
    async for piece in _text(result, 0, first_bytes):
        yield piece
    yield b'","stderr":"'
    async for piece in _text(result, first_bytes, None):
        yield piece
    yield b'"}}'


async def item_pieces(index: int, item: ItemResult) -> AsyncGenerator[bytes, None]:
    """The JSON of the result of an item of a run-batch, in pieces: that of its call, its index and its artifacts.

    Args:
        index: the place of the item in the request.
        item: the result.
    """
    yield b'{"index":%d,' % index
    held: bytes | None = None
    async for piece in result_pieces(item.result):
        if held is not None:
            yield held
        held = piece if held is not None else piece[1:]
    yield (held or b"}")[:-1] + b',"artifacts":{'
    for number, (path, artifact) in enumerate(item.artifacts.items()):
        yield b"," * (number > 0) + dumps(path) + b":"
        if artifact.content is None:
            yield dumps({"error": artifact.error, "code": artifact.code})
            continue
        yield b'{"base64":"'
        for at in range(0, len(artifact.content), ARTIFACT_PIECE_BYTES):
            yield base64.b64encode(artifact.content[at : at + ARTIFACT_PIECE_BYTES])
        yield b'"}'
    yield b"}}"


def _stdout_bytes(result: Result) -> int:
    file = result.output_file
    return (file.stdout_bytes or 0) if file is not None else len(result.stdout or b"")


async def _text(result: Result, start: int, end: int | None) -> AsyncIterator[bytes]:
    """A part of the output of a result, as the inside of a JSON string, in pieces."""
    if result.encoding == "base64":
        async for piece in output_pieces(result, start, end):
            yield base64.b64encode(piece)
        return
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    async for piece in output_pieces(result, start, end):
        for at in range(0, len(piece), TEXT_BYTES):
            yield orjson.dumps(decoder.decode(piece[at : at + TEXT_BYTES]))[1:-1]
    yield orjson.dumps(decoder.decode(b"", final=True))[1:-1]
