"""A call as server-sent events: its output as it comes, its result at the end."""

from __future__ import annotations

import asyncio
import base64
import codecs
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing

from sandbox_server.api.result_pieces import enclosed
from sandbox_server.api.service import Service
from sandbox_server.api.streams import BLOCK_END, event_block
from sandbox_server.core.errors import BackendUnavailable, CallNotFound, LeaseLost
from sandbox_server.core.execution import NOT_RECORDED, Result, ToolCall
from sandbox_server.dispatch.call_records import CallRecords, Chunk

OUTPUT = "output"
RESULT = "result"
MISSED = "missed"
EVENT_BYTES = 4 << 10
"""How much output one event tells of at most: JSON makes up to six bytes of each."""
LAST_OUTPUT_S = 5.0
"""How long to wait for more output of a call whose result is there, in seconds."""


class Text:
    """Output into the text of events. In UTF-8 a character that is not whole yet waits for its rest, so that whoever begins again at the id
    of an event begins with a whole one.

    Args:
        encoding: `utf-8` or `base64`.
        offset: where in the output it begins.
    """

    def __init__(self, encoding: str, offset: int = 0) -> None:
        self._base64 = encoding == "base64"
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._end = offset

    def block(self, chunk: Chunk) -> bytes:
        """The event of a chunk; nothing where no character of it is whole yet."""
        self._end = chunk.end
        if self._base64:
            data = {"data": base64.b64encode(chunk.data).decode("ascii"), "encoding": "base64"}
            return event_block(data, event=OUTPUT, event_id=chunk.end)
        text = self._decoder.decode(chunk.data)
        return _block(text, chunk.end - len(self._decoder.getstate()[0])) if text else b""

    def last(self, result: Result) -> bytes:
        """The last events before the result: what has never become whole, and how much is missing of an output too large to be kept."""
        text = "" if self._base64 else self._decoder.decode(b"", final=True)
        rest = _block(text, self._end) if text else b""
        missing_bytes = result.output_bytes - self._end if not result.is_separate else 0
        missed = event_block({"bytes": missing_bytes}, event=MISSED) if missing_bytes > 0 else b""
        return rest + missed


def _parts(chunk: Chunk) -> Iterator[Chunk]:
    start = chunk.end - len(chunk.data)
    for at in range(0, len(chunk.data), EVENT_BYTES):
        data = chunk.data[at : at + EVENT_BYTES]
        yield Chunk(data=data, end=start + at + len(data))


def _block(text: str, end: int) -> bytes:
    return event_block({"data": text}, event=OUTPUT, event_id=end)


async def one_result(result: Result) -> AsyncGenerator[bytes, None]:
    """The event of a result, in pieces."""
    async for piece in enclosed(f"event: {RESULT}\ndata: ".encode(), result, BLOCK_END):
        yield piece


async def call_events(records: CallRecords, tenant: str, lease_id: str, call_id: str, offset: int) -> AsyncGenerator[bytes, None]:
    """The events of a call that the lease has, from an offset on."""
    text = Text(await records.call_encoding(tenant, lease_id, call_id), offset)
    async with aclosing(records.follow_call(tenant, lease_id, call_id, offset)) as found:
        async for event in found:
            if isinstance(event, Chunk):
                for block in filter(None, map(text.block, _parts(event))):
                    yield block
                continue
            yield text.last(event)
            async for piece in one_result(event):
                yield piece


async def exec_events(
    service: Service, tenant: str, call: ToolCall, offset: int, done: Callable[[], None]
) -> tuple[AsyncGenerator[bytes, None], Callable[[], None]]:
    """Run a call. It runs on to its end even if nobody reads its events; `done` is called when it has its result.

    Returns:
        Its events, those of its output from an offset on, and what is to be called when they are needed no more.

    Raises:
        LeaseNotFound, LeaseLost, SandboxLost, QuotaExceeded: before the first event; nothing has run.
    """
    known = service.dispatcher.check_call(tenant, call)
    if known is not None:
        done()
        return one_result(known), lambda: None
    asked = asyncio.Event()
    batch = await service.dispatcher.start_when_there_is_room(tenant, [call], on_sent=asked.set, ended=done)
    ended = asyncio.create_task(batch.all_results())
    ended.add_done_callback(lambda _: asked.set())
    return _running(service.records, tenant, call, offset, asked, ended), batch.close


async def _running(
    records: CallRecords, tenant: str, call: ToolCall, offset: int, asked: asyncio.Event, ended: asyncio.Task[list[Result]]
) -> AsyncGenerator[bytes, None]:
    await asked.wait()
    text = Text(call.encoding, offset)
    async with aclosing(records.follow_call(tenant, call.lease_id, call.call_id, offset)) as found:
        while (chunk := await _next_chunk(found, ended)) is not None:
            for block in filter(None, map(text.block, _parts(chunk))):
                yield block
    (result,) = await ended
    yield text.last(result)
    async for piece in one_result(result):
        yield piece


async def _next_chunk(found: AsyncGenerator[Chunk | Result, None], ended: asyncio.Task[list[Result]]) -> Chunk | None:
    """The next output of a call; None where there is no more, or, once its result is there, none for `LAST_OUTPUT_S`."""
    coming = asyncio.ensure_future(anext(found, None))
    try:
        await asyncio.wait({coming, ended}, return_when=asyncio.FIRST_COMPLETED)
        # A result that is not the agent's own says nothing of more output to come.
        if not coming.done() and ended.result()[0].reason not in NOT_RECORDED:
            await asyncio.wait({coming}, timeout=LAST_OUTPUT_S)
        event = coming.result() if coming.done() else None
    except (CallNotFound, LeaseLost, BackendUnavailable):
        # The result says what became of it.
        return None
    finally:
        if not coming.done():
            coming.cancel()
            await asyncio.wait({coming})
    return event if isinstance(event, Chunk) else None
