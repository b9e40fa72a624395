"""Tests of the parser for server-sent events."""

from __future__ import annotations

import pytest

from env_client.messages.server_sent_events import EventParser, ServerEvent

STREAM = b': hello\n\nid: 5\nevent: output\ndata: {"data": "a"}\n\ndata: one\ndata: two\n\nevent: nothing\n\nevent:result\r\ndata:x\r\n\r\n'
EVENTS = [ServerEvent("output", '{"data": "a"}', "5"), ServerEvent("message", "one\ntwo", "5"), ServerEvent("result", "x", "5")]


def read(*pieces: bytes) -> list[ServerEvent]:
    reader = EventParser()
    return [event for piece in pieces for event in reader.feed(piece)]


def test_events_are_read() -> None:
    assert read(STREAM) == EVENTS


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_events_are_parsed_from_chunks_of_any_size(size: int) -> None:
    assert read(*[STREAM[at : at + size] for at in range(0, len(STREAM), size)]) == EVENTS


def test_a_long_line_takes_no_longer_than_its_length() -> None:
    line = b"data: " + b"x" * 10_000_000

    (event,) = read(*[line[at : at + 65_536] for at in range(0, len(line), 65_536)], b"\n\nevent: half of it and no end" * 10_000)

    assert len(event.data) == 10_000_000


def test_an_event_without_its_end_is_none() -> None:
    assert read(b"data: half\n") == []


def test_bytes_that_are_no_text_do_not_raise() -> None:
    assert read(b"data: \xff\n\n") == [ServerEvent("message", "\ufffd", "")]
