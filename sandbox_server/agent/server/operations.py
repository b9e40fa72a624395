"""What the service can ask for on a stream, one handler an operation."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Awaitable, Callable, Deque, Mapping, Sequence

from sandbox_server.agent.errors import InvalidArgs, Refused
from sandbox_server.agent.execution.calls import Call, parse_spec
from sandbox_server.agent.execution.journal import CallOutcome
from sandbox_server.agent.execution.output import Kept, Sink
from sandbox_server.agent.execution.unfetched import Unfetched
from sandbox_server.agent.server.connections import Handler, Stream
from sandbox_server.agent.slots.slots import Slot
from sandbox_server.agent.slots.transitions import SlotTransitions
from sandbox_server.agent.slots.verify import verify as start_verify

if TYPE_CHECKING:
    from sandbox_server.agent.server.agent import Agent

_CHUNK_BYTES = 64 << 10
MAX_CALLS_A_STREAM = 1000


class Calls:
    """Calls of one slot, one after the other; a failed one does not stop the next. They run on when the connection ends.

    A large output is not sent with its result: it waits in the spool until the service has fetched it, and the next call begins then. So it does
    behind a smaller one that waits for the service to take what was sent before. However slowly the service takes them, a stream never has more
    than one large output, which is not in memory, and never much more than its window of small ones.

    Args:
        stream: where the results go.
        slot: whose calls.
        epoch: of the lease.
        fetches: whether the service fetches large outputs; services before this could be told did not.
    """

    def __init__(self, stream: Stream, slot: Slot, epoch: Any, fetches: bool) -> None:
        slot.admit(epoch)
        self._stream = stream
        self._slot = slot
        self._epoch = epoch
        self._fetches = fetches
        self._unfetched: Unfetched | None = None
        self._waiting: Deque[dict[str, Any]] = deque()
        self._busy = False
        self._advancing = False
        self._all_said = False

    def item(self, meta: dict[str, Any], body: bytes) -> None:
        """Another call."""
        if len(self._waiting) >= MAX_CALLS_A_STREAM:
            raise Refused("invalid", "more than %d calls wait on one stream" % MAX_CALLS_A_STREAM)
        self._waiting.append(meta)
        if not self._busy:
            self._next()

    def _next(self) -> None:
        if self._advancing:
            return  # a call was over as soon as it began: the loop below goes on with the next
        self._advancing = True
        try:
            while self._waiting and not self._busy:
                self._begin(self._waiting.popleft())
        finally:
            self._advancing = False
        if self._all_said and not self._busy:
            self._stream.end()

    def _begin(self, meta: dict[str, Any]) -> None:
        if self._slot.epoch != self._epoch or self._slot.state != "ready":
            self._skip(meta)
            return
        try:
            spec = parse_spec(meta)
        except InvalidArgs as error:
            self._answer_invalid(meta, str(error))
            return
        self._busy = True
        self._slot.submit(spec, self._done)

    def _done(self, outcome: CallOutcome) -> None:
        if self._fetches and self._stream.open and outcome.is_large:
            self._unfetched = Unfetched(self._slot, outcome, self._go_on)
            self._stream.send_item(outcome.head())
            return
        self._stream.send_item(*outcome.item())
        if self._stream.queued_bytes:
            self._stream.on_drained = self._drained  # results that nobody takes yet wait here, in memory: no more of them until then
        else:
            self._go_on()

    def _drained(self) -> None:
        if not self._stream.queued_bytes:
            self._stream.on_drained = None
            self._go_on()

    def _go_on(self) -> None:
        if self._unfetched is not None:
            self._unfetched.let_go()
            self._unfetched = None
        self._busy = False
        if self._waiting or self._all_said:
            self._next()

    def _skip(self, meta: Mapping[str, Any]) -> None:
        """The slot moved on before this call began."""
        moved = self._slot.epoch != self._epoch
        reason = "cancelled" if moved else "sandbox_lost" if self._slot.state == "broken" else "backend_error"
        state = "given back" if moved else self._slot.state
        text = "the slot was given back" if moved else "the slot is %s (%s)" % (state, self._slot.detail)
        proof: dict[str, Any] = {**({} if moved else self._slot.lost_by), "slot": state, "ran": False}
        self._stream.send_item(_blank(meta, reason, text + " before the call began", {"may_have_run": False, "evidence": proof}))

    def _answer_invalid(self, meta: Mapping[str, Any], text: str) -> None:
        self._stream.send_item(_blank(meta, "invalid_args", text, {"evidence": {"ran": False}}))

    def data(self, body: bytes) -> None:
        """Calls are items."""
        raise Refused("invalid", "a stream of calls takes no data")

    def ended(self) -> None:
        """No more calls come."""
        self._all_said = True
        if not self._busy and not self._waiting:
            self._stream.end()

    def aborted(self) -> None:
        """Nobody listens; what was asked for still runs."""
        self._fetches = False
        if self._unfetched is not None or self._stream.on_drained is not None:
            self._stream.on_drained = None
            self._go_on()


def _send_outcome(stream: Stream, outcome: CallOutcome, fetches: bool) -> None:
    if fetches and outcome.is_large:
        stream.send_item(outcome.head())
    else:
        stream.send_item(*outcome.item())


def _blank(meta: Mapping[str, Any], reason: str, error: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "call_id": meta.get("call_id"), "reason": reason, "exit_code": None, "error": error, "output_bytes": 0, "truncated": False, "started_at": time.time(),
        "duration_s": 0.0, "cpu_s": 0.0, "max_rss_bytes": 0, "tool_ok": False, "metadata": metadata, "lens": [0],
    }  # fmt: skip


class Task:
    """A stream that one coroutine serves."""

    def __init__(self, stream: Stream, work: Callable[[], Awaitable[None]], cancel_on_abort: bool) -> None:
        self._stream = stream
        self._cancel_on_abort = cancel_on_abort
        self._task = asyncio.get_event_loop().create_task(self._run(work))

    async def _run(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Refused as error:
            self._stream.refuse(error)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._stream.refuse(Refused("internal", "%s: %s" % (type(error).__name__, error)))
            raise

    def item(self, meta: dict[str, Any], body: bytes) -> None:
        """Nothing is expected."""
        raise Refused("invalid", "this stream takes no items")

    def data(self, body: bytes) -> None:
        """Nothing is expected."""
        raise Refused("invalid", "this stream takes no data")

    def ended(self) -> None:
        """The request is complete as it was opened."""

    def aborted(self) -> None:
        """Nobody waits for the answer."""
        if self._cancel_on_abort:
            self._task.cancel()


class Watch:
    """Every change of the slots, for as long as somebody listens."""

    def __init__(self, agent: Agent, stream: Stream) -> None:
        self._agent = agent
        self._stream = stream
        self._changed: dict[str, Slot] = {}
        stream.send_item({"slots": [slot.view() for slot in agent.slots.values()]})
        agent.watchers.append(self)

    def changed(self, slot: Slot) -> None:
        """Tell it soon; several changes at once become one message."""
        if not self._changed:
            asyncio.get_event_loop().call_soon(self._tell)
        self._changed[slot.slot_id] = slot

    def effective_changed(self) -> None:
        """Tell which limits hold for each slot from now on."""
        self._stream.send_item({"slots": [], "effective": self._agent.effective()})

    def _tell(self) -> None:
        slots, self._changed = self._changed, {}
        self._stream.send_item({"slots": [slot.view() for slot in slots.values()]})

    def item(self, meta: dict[str, Any], body: bytes) -> None:
        """Nothing is expected."""

    def data(self, body: bytes) -> None:
        """Nothing is expected."""

    def ended(self) -> None:
        """The service only listens."""

    def aborted(self) -> None:
        """Nobody listens any more."""
        self._agent.watchers.remove(self)


async def cancel(stream: Stream, slot: Slot, call_id: Any) -> None:
    """End a call's tree; its own stream gets its verdict."""
    try:
        found = slot.find_call(call_id)
    except Refused:
        stream.end({"found": False})
        return
    if isinstance(found, Call):
        found.cancel()
    stream.end({"found": True, "state": "running" if isinstance(found, Call) else "done"})


async def call_status(stream: Stream, slot: Slot, call_id: Any, fetches: bool) -> None:
    """Whether a call runs, or its verdict."""
    found = slot.find_call(call_id)
    if isinstance(found, Call):
        stream.end({"state": "running", "output_bytes": found.output_bytes, "started_at": found.started_at, "encoding": found.spec.encoding})
    else:
        _send_outcome(stream, found, fetches)
        stream.end({"state": "done"})


async def result_output(stream: Stream, slot: Slot, call_id: Any) -> None:
    """The output that the result of a call has, cut as the call asked for; standard error, where it is apart, after standard output."""
    found = slot.find_call(call_id)
    if isinstance(found, Call):
        raise Refused("invalid", "call %s still runs" % ascii(call_id))
    spool = slot.spool
    for kept in found.outputs:
        spool.hold(kept)
    try:
        for kept in found.outputs:
            for piece in kept.cut_pieces():
                if not await stream.send_data(piece):
                    return
    except OSError as error:
        raise Refused("call_not_found", "the output of call %s cannot be read any more: %s" % (ascii(call_id), error)) from None
    finally:
        for kept in found.outputs:
            spool.let_go(kept)
    stream.end()
    for fetched in list(found.on_fetched):
        fetched()


async def attach(stream: Stream, slot: Slot, call_id: Any, offset: Any, fetches: bool) -> None:
    """A call's output as it comes, then its verdict. Standard error, where it is apart, follows when standard output is complete."""
    at = _offset(offset)
    found = slot.find_call(call_id)
    while isinstance(found, Call):
        if found.outcome is not None:
            found = found.outcome
            break
        chunk = found.sinks[0].read(at, _CHUNK_BYTES) if at < found.sinks[0].available else b""
        if not chunk:
            await _wait_for_more(found)
            continue
        at += len(chunk)
        if not await stream.send_data(chunk):
            return
    await _send_whole(stream, found, [kept.available for kept in found.outputs], at)
    _send_outcome(stream, found, fetches)
    stream.end()


async def _wait_for_more(call: Call) -> None:
    event: asyncio.Future[None] = asyncio.get_event_loop().create_future()

    def happened() -> None:
        if not event.done():
            event.set_result(None)

    call.watchers.append(happened)
    try:
        await event
    finally:
        call.watchers.remove(happened)


async def _send_whole(stream: Stream, found: Call | CallOutcome, sizes: Sequence[int], at: int) -> None:
    """So much of each output, as one run of bytes, from an offset on. A call may end meanwhile; its outputs then are its verdict's."""
    start = 0
    for which, size in enumerate(sizes):
        while start <= at < start + size:
            source = found.outcome if isinstance(found, Call) and found.outcome is not None else found
            output: Sink | Kept = source.sinks[which] if isinstance(source, Call) else source.outputs[which]
            chunk = output.read(at - start, min(_CHUNK_BYTES, start + size - at))
            at += len(chunk)
            if not chunk or not await stream.send_data(chunk):
                return
        start += size


async def output(stream: Stream, slot: Slot, call_id: Any, offset: Any) -> None:
    """The whole output so far, or of a finished call as far as it is kept; standard error, where it is apart, after standard output."""
    start = _offset(offset)
    found = slot.find_call(call_id)
    sizes = [sink.available for sink in found.sinks] if isinstance(found, Call) else [kept.available for kept in found.outputs]
    total = found.output_bytes if isinstance(found, Call) else sum(kept.total for kept in found.outputs)
    about = {"total_bytes": total, "available_bytes": sum(sizes)}
    stream.send_item({"state": "running" if isinstance(found, Call) else "done", **about})
    await _send_whole(stream, found, sizes, start)
    stream.end({**about, "from": start})


def _offset(value: Any) -> int:
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise Refused("invalid", "offset must be an integer from 0 on")
    return value


async def reset(stream: Stream, changes: SlotTransitions, meta: Mapping[str, Any]) -> None:
    """Clean the slot for its next holder; goes on when nobody listens any more."""
    task = changes.reset(meta.get("epoch"), bool(meta.get("network", True)), bool(meta.get("keep", False)))
    stream.end(await asyncio.shield(task))


async def verify(stream: Stream, changes: SlotTransitions, meta: Mapping[str, Any]) -> None:
    """Test the slot's reset; goes on when nobody listens any more."""
    task = start_verify(changes, meta.get("epoch"), bool(meta.get("network", True)))
    stream.end(await asyncio.shield(task))


async def equip(stream: Stream, changes: SlotTransitions, meta: Mapping[str, Any]) -> None:
    """Give the holder a cache."""
    changes.slot.admit(meta.get("epoch"))
    await changes.equip(meta.get("network", True) is not False, meta.get("cache"))
    stream.end()


async def narrow(stream: Stream, changes: SlotTransitions, meta: Mapping[str, Any]) -> None:
    """Take rights away."""
    changes.slot.admit(meta.get("epoch"))
    await changes.narrow(meta.get("network") is True, meta.get("cache"))
    stream.end()


async def quiet(stream: Stream, slot: Slot, epoch: Any) -> None:
    """Answer as soon as no call runs in the slot; jobs do not count. What begins meanwhile counts; a reset ends it."""
    while slot.epoch == epoch:
        running = slot.journal.running()
        if not running:
            break
        await _wait_for_outcome(running[0])
    stream.end()


async def _wait_for_outcome(call: Call) -> None:
    over: asyncio.Future[None] = asyncio.get_event_loop().create_future()

    def happened(_: CallOutcome) -> None:
        if not over.done():
            over.set_result(None)

    call.on_done(happened)
    await over


__all__ = ["Calls", "Handler", "Task", "Watch", "attach", "call_status", "cancel", "equip", "narrow", "output", "quiet", "reset", "result_output", "verify"]
