"""The operations on one call of a slot: cancel it, and read its state, its output and its result. Each is a coroutine that serves one stream."""

from __future__ import annotations

import asyncio
from typing import Any, Sequence

from sandbox_server.agent.errors import Refused
from sandbox_server.agent.execution.calls import AgentCall
from sandbox_server.agent.execution.journal import CallOutcome
from sandbox_server.agent.execution.output import FinishedOutput, Sink
from sandbox_server.agent.server.connections import Stream
from sandbox_server.agent.slots.slots import AgentSlot

_CHUNK_BYTES = 64 << 10


async def cancel_call(stream: Stream, slot: AgentSlot, call_id: Any) -> None:
    """End the process tree of a call. The stream that the call came on gets its result."""
    try:
        found = slot.find_call(call_id)
    except Refused:
        stream.end_stream({"found": False})
        return
    if isinstance(found, AgentCall):
        found.cancel_call()
    stream.end_stream({"found": True, "state": "running" if isinstance(found, AgentCall) else "done"})


async def send_call_status(stream: Stream, slot: AgentSlot, call_id: Any, fetches_outputs: bool) -> None:
    """Send whether a call runs, or its result.

    Raises:
        Refused: call_not_found.
    """
    found = slot.find_call(call_id)
    if isinstance(found, AgentCall):
        stream.end_stream({"state": "running", "output_bytes": found.output_bytes, "started_at": found.started_at, "encoding": found.spec.encoding})
    else:
        _send_outcome(stream, found, fetches_outputs)
        stream.end_stream({"state": "done"})


async def send_result_output(stream: Stream, slot: AgentSlot, call_id: Any) -> None:
    """Send the output that the result of a call carries, cut as the call asked for. Standard error, if it is kept apart, follows standard output.

    Raises:
        Refused: the call runs, is not known, or its output cannot be read any more.
    """
    found = slot.find_call(call_id)
    if isinstance(found, AgentCall):
        raise Refused("invalid", "call %s still runs" % ascii(call_id))
    spool = slot.lease.spool
    for output in found.outputs:
        spool.hold_output(output)
    try:
        for output in found.outputs:
            for piece in output.iter_for_result():
                if not await stream.send_data(piece):
                    return
    except OSError as error:
        raise Refused("call_not_found", "the output of call %s cannot be read any more: %s" % (ascii(call_id), error)) from None
    finally:
        for output in found.outputs:
            spool.release_output(output)
    stream.end_stream()
    for on_fetched in list(found.on_fetched):
        on_fetched()


async def follow_call(stream: Stream, slot: AgentSlot, call_id: Any, offset: Any, fetches_outputs: bool) -> None:
    """Send the output of a call while it runs, then its result. Standard error, if it is kept apart, follows the complete standard output.

    Raises:
        Refused: the call is not known, or the offset is not valid.
    """
    position = _parse_offset(offset)
    found = slot.find_call(call_id)
    while isinstance(found, AgentCall):
        if found.outcome is not None:
            found = found.outcome
            break
        chunk = found.sinks[0].read(position, _CHUNK_BYTES) if position < found.sinks[0].available_bytes else b""
        if not chunk:
            await _wait_for_output_or_end(found)
            continue
        position += len(chunk)
        if not await stream.send_data(chunk):
            return
    await _send_outputs(stream, found, [output.available_bytes for output in found.outputs], position)
    _send_outcome(stream, found, fetches_outputs)
    stream.end_stream()


async def _wait_for_output_or_end(call: AgentCall) -> None:
    changed: asyncio.Future[None] = asyncio.get_event_loop().create_future()

    def set_changed() -> None:
        if not changed.done():
            changed.set_result(None)

    call.output_watchers.append(set_changed)
    try:
        await changed
    finally:
        call.output_watchers.remove(set_changed)


async def send_output(stream: Stream, slot: AgentSlot, call_id: Any, offset: Any) -> None:
    """Send the whole output that a call has written so far, as far as it is kept. Standard error, if it is kept apart, follows standard output.

    Raises:
        Refused: the call is not known, or the offset is not valid.
    """
    start = _parse_offset(offset)
    found = slot.find_call(call_id)
    sizes = [sink.available_bytes for sink in found.sinks] if isinstance(found, AgentCall) else [output.available_bytes for output in found.outputs]
    total = found.output_bytes if isinstance(found, AgentCall) else sum(output.total_bytes for output in found.outputs)
    summary = {"total_bytes": total, "available_bytes": sum(sizes)}
    stream.send_item({"state": "running" if isinstance(found, AgentCall) else "done", **summary})
    await _send_outputs(stream, found, sizes, start)
    stream.end_stream({**summary, "from": start})


async def _send_outputs(stream: Stream, found: AgentCall | CallOutcome, sizes_bytes: Sequence[int], position: int) -> None:
    """Send so much of each output as one sequence of bytes, from a position on. If the call ends meanwhile, continue with the outputs of its outcome."""
    start = 0
    for index, size_bytes in enumerate(sizes_bytes):
        while start <= position < start + size_bytes:
            source = found.outcome if isinstance(found, AgentCall) and found.outcome is not None else found
            output: Sink | FinishedOutput = source.sinks[index] if isinstance(source, AgentCall) else source.outputs[index]
            chunk = output.read(position - start, min(_CHUNK_BYTES, start + size_bytes - position))
            position += len(chunk)
            if not chunk or not await stream.send_data(chunk):
                return
        start += size_bytes


def _send_outcome(stream: Stream, outcome: CallOutcome, fetches_outputs: bool) -> None:
    if fetches_outputs and outcome.is_large:
        stream.send_item(outcome.to_item_without_output())
    else:
        stream.send_item(*outcome.to_item())


def _parse_offset(value: Any) -> int:
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise Refused("invalid", "offset must be an integer from 0 on")
    return value


async def wait_until_quiet(stream: Stream, slot: AgentSlot, epoch: Any) -> None:
    """End the stream once no call runs in the slot, or once the lease has ended. Calls that begin meanwhile count, jobs do not."""
    while slot.epoch == epoch:
        running = slot.lease.journal.running_calls()
        if not running:
            break
        await _wait_for_outcome(running[0])
    stream.end_stream()


async def _wait_for_outcome(call: AgentCall) -> None:
    ended: asyncio.Future[None] = asyncio.get_event_loop().create_future()

    def set_ended(_: CallOutcome) -> None:
        if not ended.done():
            ended.set_result(None)

    call.add_done_callback(set_ended)
    await ended
