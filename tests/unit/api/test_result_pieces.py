"""Results in pieces are the results in one piece; a caller that does not read is cut off."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_server.api import result_pieces
from sandbox_server.api.body import ClientStalled
from sandbox_server.api.contract.render import dumps, result_document
from sandbox_server.api.streams import StreamResponse
from sandbox_server.core.execution import Fault, Reason, Result
from sandbox_server.dispatch.outputs import PIECE_BYTES
from sandbox_server.store.output_files import OutputFiles

OUTPUTS = st.builds(lambda chunk, times: chunk * times, st.binary(min_size=1, max_size=7), st.integers(5000, 20_000))


def made(first: bytes, second: bytes | None, encoding: str, metadata: dict[str, Any]) -> Result:
    outputs = {"output": first} if second is None else {"stdout": first, "stderr": second}
    return Result(call_id="c", lease_id="l", reason=Reason.EXIT, fault=Fault.NONE, exit_code=0, encoding=encoding, metadata=metadata, **outputs)  # type: ignore[arg-type]


async def joined(result: Result) -> bytes:
    return b"".join([piece async for piece in result_pieces.result_pieces(result)])


@given(OUTPUTS, st.none() | OUTPUTS, st.sampled_from(["utf-8", "base64"]), st.sampled_from([{}, {"stdout": "x", "n": 1}]))
def test_the_pieces_are_the_whole(first: bytes, second: bytes | None, encoding: str, metadata: dict[str, Any]) -> None:
    result = made(first, second, encoding, metadata)

    assert json.loads(asyncio.run(joined(result))) == json.loads(dumps(result_document(result)))


async def test_an_output_in_a_file_is_told_as_one_in_memory(tmp_path: Path) -> None:
    files = OutputFiles(tmp_path / "outputs")
    first, second = "é\0".encode() * 50_000, b"\xff" * 40_000
    file = await files.write_bytes("l-1", [first, second], len(first))
    told = json.loads(await joined(Result(call_id="c", lease_id="l", reason=Reason.EXIT, fault=Fault.NONE, exit_code=0, output_file=file)))

    assert told == json.loads(dumps(result_document(made(first, second, "utf-8", {}))))
    files.close()


async def test_no_piece_is_large() -> None:
    sizes = [len(piece) async for piece in result_pieces.result_pieces(made(b"\0" * 1_000_000, None, "utf-8", {}))]

    assert max(sizes) <= 6 * PIECE_BYTES


async def test_a_caller_that_does_not_read_is_cut_off_and_what_it_held_is_given_back() -> None:
    ended = asyncio.Event()

    async def pieces() -> AsyncGenerator[bytes, None]:
        while True:
            yield b"x" * 20_000

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    stream = StreamResponse(pieces(), "application/json", stall_s=0.01, on_end=ended.set)
    with pytest.raises(ClientStalled, match="answer_stall_s"):
        await stream({}, asyncio.Event().wait, send)  # type: ignore[arg-type]
    assert ended.is_set()


@pytest.mark.parametrize("size_bytes", [0, 5, 100_000])
async def test_a_body_of_known_size_has_a_length_and_a_small_one_is_one_part(size_bytes: int) -> None:
    async def pieces() -> AsyncGenerator[bytes, None]:
        stream.announce_size(size_bytes)
        for _ in range(size_bytes):
            yield b"x"

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    stream = StreamResponse(pieces(), "application/octet-stream", stall_s=1.0)
    await stream({}, asyncio.Event().wait, send)  # type: ignore[arg-type]

    head, *parts = sent
    assert (b"content-length", str(size_bytes).encode()) in head["headers"]
    assert b"".join(part["body"] for part in parts) == b"x" * size_bytes
    assert [part["more_body"] for part in parts] == [True] * (len(parts) - 1) + [False]
    assert (len(parts) == 1) == (size_bytes < 16 << 10)
