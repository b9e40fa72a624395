"""The server-sent events of a tool call: its output as it arrives, and its result at the end."""

from __future__ import annotations

import asyncio
import base64
import codecs
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing

from sandbox_server.api.request_context import Service
from sandbox_server.api.result_pieces import enclosed
from sandbox_server.api.streams import EVENT_END, MISSED_EVENT, event_block
from sandbox_server.core.errors import BackendUnavailable, CallNotFound, LeaseLost
from sandbox_server.core.execution import NOT_RECORDED, Result, ToolCall
from sandbox_server.dispatch.call_queries import CallQueries, Chunk

OUTPUT = "output"
RESULT = "result"
EVENT_BYTES = 4 << 10
"""The most output that one event carries. As JSON, one byte of it can take six."""
LAST_OUTPUT_S = 5.0
"""How long to wait for further output of a call whose result has arrived, in seconds."""


class OutputEncoder:
    """Turns the output of a call into events, whose ids are offsets in the output.

    In UTF-8, an incomplete character is kept back until the rest of it arrives. So a client that continues from the id of an event begins with a
    whole character.

    Args:
        encoding: `utf-8` or `base64`.
        offset: the offset in the output at which the first event begins, in bytes.
    """

    def __init__(self, encoding: str, offset: int = 0) -> None:
        self._base64 = encoding == "base64"
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._end = offset

    def encode(self, chunk: Chunk) -> bytes:
        """The event for a chunk of output; empty where the chunk completes no character."""
        self._end = chunk.end
        if self._base64:
            data = {"data": base64.b64encode(chunk.data).decode("ascii"), "encoding": "base64"}
            return event_block(data, event=OUTPUT, event_id=chunk.end)
        text = self._decoder.decode(chunk.data)
        return _block(text, chunk.end - len(self._decoder.getstate()[0])) if text else b""

    def finish(self, result: Result) -> bytes:
        """The events between the last chunk and the result: an incomplete character, and how much output was too much to be kept."""
        text = "" if self._base64 else self._decoder.decode(b"", final=True)
        rest = _block(text, self._end) if text else b""
        missing_bytes = result.output_bytes - self._end if not result.is_separate else 0
        missed = event_block({"bytes": missing_bytes}, event=MISSED_EVENT) if missing_bytes > 0 else b""
        return rest + missed


def _split(chunk: Chunk) -> Iterator[Chunk]:
    """Split a chunk so that no part is larger than `EVENT_BYTES`."""
    start = chunk.end - len(chunk.data)
    for at in range(0, len(chunk.data), EVENT_BYTES):
        data = chunk.data[at : at + EVENT_BYTES]
        yield Chunk(data=data, end=start + at + len(data))


def _block(text: str, end: int) -> bytes:
    return event_block({"data": text}, event=OUTPUT, event_id=end)


async def result_event(result: Result) -> AsyncGenerator[bytes, None]:
    """The event that carries a result, in pieces."""
    async for piece in enclosed(f"event: {RESULT}\ndata: ".encode(), result, EVENT_END):
        yield piece


async def call_events(call_queries: CallQueries, tenant: str, lease_id: str, call_id: str, offset: int) -> AsyncGenerator[bytes, None]:
    """The events of a call that has been started before.

    Args:
        call_queries: where calls are found.
        tenant: the tenant that holds the lease.
        lease_id: the lease.
        call_id: the call.
        offset: the offset in its output from which events are wanted, in bytes.
    """
    encoder = OutputEncoder(await call_queries.call_encoding(tenant, lease_id, call_id), offset)
    async with aclosing(call_queries.follow_call(tenant, lease_id, call_id, offset)) as events:
        async for event in events:
            if isinstance(event, Chunk):
                for block in filter(None, map(encoder.encode, _split(event))):
                    yield block
                continue
            yield encoder.finish(event)
            async for piece in result_event(event):
                yield piece


async def run_call_as_events(
    service: Service, tenant: str, call: ToolCall, offset: int, on_result: Callable[[], None]
) -> tuple[AsyncGenerator[bytes, None], Callable[[], None]]:
    """Start a call, and give its events. The call runs to its end, whether or not its events are read.

    Args:
        service: the service.
        tenant: the tenant that holds the lease.
        call: the call.
        offset: the offset in its output from which events are wanted, in bytes.
        on_result: called once the call has its result.

    Returns:
        The events, and a function to be called when they are needed no more.

    Raises:
        LeaseNotFound, LeaseLost, SandboxLost, QuotaExceeded: before the first event; nothing has run.
    """
    known = service.dispatcher.check_call(tenant, call)
    if known is not None:
        on_result()
        return result_event(known), lambda: None
    sent_to_agent = asyncio.Event()
    batch = await service.dispatcher.reserve_and_start_calls(tenant, [call], on_sent=sent_to_agent.set, ended=on_result)
    results = asyncio.create_task(batch.all_results())
    results.add_done_callback(lambda _: sent_to_agent.set())
    return _events_of_running_call(service.call_queries, tenant, call, offset, sent_to_agent, results), batch.discard_results


async def _events_of_running_call(
    call_queries: CallQueries, tenant: str, call: ToolCall, offset: int, sent_to_agent: asyncio.Event, results: asyncio.Task[list[Result]]
) -> AsyncGenerator[bytes, None]:
    await sent_to_agent.wait()
    encoder = OutputEncoder(call.encoding, offset)
    async with aclosing(call_queries.follow_call(tenant, call.lease_id, call.call_id, offset)) as output:
        while (chunk := await _next_chunk(output, results)) is not None:
            for block in filter(None, map(encoder.encode, _split(chunk))):
                yield block
    (result,) = await results
    yield encoder.finish(result)
    async for piece in result_event(result):
        yield piece


async def _next_chunk(output: AsyncGenerator[Chunk | Result, None], results: asyncio.Task[list[Result]]) -> Chunk | None:
    """The next output of a running call; None at its end, or when none has arrived for `LAST_OUTPUT_S` after the result."""
    next_event = asyncio.ensure_future(anext(output, None))
    try:
        await asyncio.wait({next_event, results}, return_when=asyncio.FIRST_COMPLETED)
        # Only after a result of the agent's own can there be output that is still on its way.
        if not next_event.done() and results.result()[0].reason not in NOT_RECORDED:
            await asyncio.wait({next_event}, timeout=LAST_OUTPUT_S)
        event = next_event.result() if next_event.done() else None
    except (CallNotFound, LeaseLost, BackendUnavailable):
        # The result of the call says what happened, and it is sent next.
        return None
    finally:
        if not next_event.done():
            next_event.cancel()
            await asyncio.wait({next_event})
    return event if isinstance(event, Chunk) else None
