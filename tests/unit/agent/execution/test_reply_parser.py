"""The parser for the output of a forked tool. The output comes from inside the slot: in any pieces, and perhaps forged."""

from __future__ import annotations

import struct

import pytest

from sandbox_server.agent.execution.reply_parser import MAX_HEADER_BYTES, ReplyParser


class Collected:
    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_the_header_is_split_off_however_the_output_is_cut_into_pieces(step: int) -> None:
    document = b'{"ok":true,"size_bytes":3}'
    stream = struct.pack(">I", len(document)) + document + b"abc"
    content = Collected()
    reply = ReplyParser(content)
    for start in range(0, len(stream), step):
        reply.write(stream[start : start + step])

    assert reply.header == {"ok": True, "size_bytes": 3}
    assert content.data == b"abc"


@pytest.mark.parametrize("forged", [struct.pack(">I", MAX_HEADER_BYTES + 1), struct.pack(">I", 2) + b"[]", struct.pack(">I", 3) + b"{{{", b"\xff" * 100])
def test_an_invalid_header_is_detected_and_not_stored(forged: bytes) -> None:
    content = Collected()
    reply = ReplyParser(content)
    reply.write(forged)
    reply.write(b"x" * 100_000)

    assert reply.is_invalid
    assert reply.header is None
    assert content.data == b""
