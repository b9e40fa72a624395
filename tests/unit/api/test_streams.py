"""Event streams and pages, piece by piece."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_server.api.body import ClientDisconnected, check_keys, without_escapes
from sandbox_server.api.call_events import OutputEncoder
from sandbox_server.api.contract.parse import offset_of, wait_of
from sandbox_server.api.limits import Limits
from sandbox_server.api.paging import PageRequest, next_cursor
from sandbox_server.api.streams import COMMENT, EventStreamResponse, check_stream_limit, event_block
from sandbox_server.core.errors import InvalidRequest, QuotaExceeded
from sandbox_server.core.execution import Fault, Reason, Result
from sandbox_server.dispatch.call_queries import Chunk
from tests.contract.test_recorded import events as parsed


class Caller:
    """Who reads a stream; `hang_up` when it has had enough."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.gone = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


def service(**limits: int) -> Any:
    return SimpleNamespace(stream_counts=Counter(), limits=Limits(**limits), stopping=asyncio.get_running_loop().create_future())


async def test_a_comment_is_sent_while_nothing_is() -> None:
    ready = asyncio.Event()
    caller = Caller()

    async def events() -> AsyncGenerator[bytes, None]:
        await ready.wait()
        yield event_block({"n": 1}, event="e", event_id=1)

    stream = asyncio.create_task(EventStreamResponse(events(), service(), "t", heartbeat_s=0.001)({}, caller.receive, caller.send))
    while caller.body.count(COMMENT) < 3:
        await asyncio.sleep(0)
    ready.set()
    await stream

    assert caller.body.endswith(b'id: 1\nevent: e\ndata: {"n":1}\n\n')
    assert caller.sent[-1]["more_body"] is False


async def test_a_hang_up_closes_the_events_and_frees_the_place() -> None:
    caller, closed, of = Caller(), asyncio.Event(), service(streams=1)

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            yield COMMENT
            await asyncio.Event().wait()
        finally:
            closed.set()

    stream = asyncio.create_task(EventStreamResponse(events(), of, "t")({}, caller.receive, caller.send))
    while len(caller.sent) < 3:
        await asyncio.sleep(0)
    with pytest.raises(QuotaExceeded, match=r"limits\.streams"):
        EventStreamResponse(events(), of, "t")
    caller.gone.set()
    with pytest.raises(ClientDisconnected):
        await stream

    assert closed.is_set()
    assert not of.stream_counts.total()


async def test_a_tenant_has_half_of_the_streams() -> None:
    of = service(streams=4)
    of.stream_counts.update({"greedy": 2})

    with pytest.raises(QuotaExceeded, match=r"more than 2 event streams of one tenant open at once: that is half of `limits\.streams`"):
        check_stream_limit(of, "greedy")
    check_stream_limit(of, "other")
    of.stream_counts.update({"other": 1, "third": 1})
    with pytest.raises(QuotaExceeded, match=r"more than 4 event streams open at once"):
        check_stream_limit(of, "fourth")


async def test_a_stop_ends_a_stream_without_an_end() -> None:
    caller, of = Caller(), service()

    async def events() -> AsyncGenerator[bytes, None]:
        await asyncio.Event().wait()
        yield b""

    stream = asyncio.create_task(EventStreamResponse(events(), of, "t", ends_with_service=True)({}, caller.receive, caller.send))
    while not caller.sent:
        await asyncio.sleep(0)
    of.stopping.set_result(None)
    await stream

    assert caller.sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}


class Lines:
    """Blocks as an HTTP answer gives them."""

    def __init__(self, blocks: bytes) -> None:
        self.blocks = blocks

    async def aiter_lines(self) -> Any:
        for line in self.blocks.decode().split("\n"):
            yield line


@given(st.text(min_size=1, max_size=40), st.data())
def test_text_in_pieces_is_the_text_and_every_id_begins_a_character(text: str, data: st.DataObject) -> None:
    whole = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace").encode()
    cuts = sorted({0, len(whole), *data.draw(st.lists(st.integers(0, len(whole)), max_size=6))})

    async def told() -> list[tuple[str, int]]:
        reader = OutputEncoder("utf-8")
        ended = Result(call_id="c", lease_id="l", reason=Reason.EXIT, fault=Fault.NONE, output_bytes=len(whole))
        blocks = b"".join(reader.encode(Chunk(data=whole[start:end], end=end)) for start, end in itertools.pairwise(cuts)) + reader.finish(ended)
        return [(event.data["data"], int(event.id or 0)) async for event in parsed(Lines(blocks)) if event.event == "output"]  # type: ignore[arg-type]

    found = asyncio.run(told())
    assert "".join(part for part, _ in found).encode() == whole
    for number, (_, end) in enumerate(found):
        assert whole[end:].decode() == "".join(part for part, _ in found[number + 1 :])


async def test_output_that_was_too_large_to_keep_is_said_to_be_missing() -> None:
    reader = OutputEncoder("base64", offset=10)
    reader.encode(Chunk(data=b"abc", end=13))

    told = [event async for event in parsed(Lines(reader.finish(Result(call_id="c", lease_id="l", reason=Reason.EXIT, fault=Fault.NONE, output_bytes=20))))]  # type: ignore[arg-type]

    assert [(event.event, event.data.get("bytes")) for event in told] == [("missed", 7)]


@given(st.sets(st.text(max_size=8)), st.integers(1, 5))
def test_pages_together_are_the_list(names: set[str], limit: int) -> None:
    seen: list[str] = []
    asked = {"limit": str(limit)}
    while True:
        page, cursor = PageRequest.of(asked, Limits()).cut(names, lambda name: name)
        seen += page
        if cursor is None:
            break
        asked["cursor"] = cursor

    assert seen == sorted(names)


@pytest.mark.parametrize("cursor", ["!", "a", "_w", "\u00e4", "A" * 9000, "===="])
def test_a_cursor_that_is_none(cursor: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^cursor"):
        PageRequest.of({"cursor": cursor}, Limits())


def test_a_cursor_is_what_a_list_gave() -> None:
    assert PageRequest.of({"cursor": next_cursor("a/\udcff")}, Limits()).after == "a/\udcff"


@pytest.mark.parametrize(("text", "value"), [(None, 0), ("0", 0), ("007", 7), ("9" * 18, 10**18 - 1)])
def test_an_offset(text: str | None, value: int) -> None:
    assert offset_of(text) == value


@pytest.mark.parametrize("text", ["", "-1", "+1", "1.0", "0x1", "\u0663", "9" * 19, " 1"])
def test_no_offset(text: str) -> None:
    with pytest.raises(InvalidRequest):
        offset_of(text)


@pytest.mark.parametrize("text", ["", "-1", "nan", "inf", "1e3", "1.", ".5", "\u0663"])
def test_no_wait(text: str) -> None:
    with pytest.raises(InvalidRequest):
        wait_of(text, Limits())


@pytest.mark.parametrize(
    ("body", "document"),
    [
        (b'{"a": "\\": \\":"}', {"a": '": ":'}),
        (b'{"a": {"a": [{"a": 1}, {"a": 2}]}}', {"a": {"a": [{"a": 1}, {"a": 2}]}}),
        (b"[]", []),
    ],
)
def test_the_same_key_in_different_places_is_none_twice(body: bytes, document: Any) -> None:
    check_keys(body, without_escapes(body), document)
