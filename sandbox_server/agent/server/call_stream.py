"""A stream on which the service sends the calls of one lease, and gets their results."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Callable, Deque, Mapping

from sandbox_server.agent.errors import InvalidArgs, Refused
from sandbox_server.agent.execution.call_spec import parse_call_spec
from sandbox_server.agent.execution.journal import CallOutcome
from sandbox_server.agent.execution.output import Spool
from sandbox_server.agent.server.connections import Stream
from sandbox_server.agent.slots.slots import BROKEN, READY, AgentSlot

MAX_CALLS_PER_STREAM = 1000


class CallStreamHandler:
    """Runs calls of one slot one after the other. A call that fails does not stop the next one. When the connection ends, the calls still run.

    A large output is not sent with its result. It stays in the spool until the service has fetched it, and only then the next call begins. The same holds
    for a small result that is queued here because the service has not taken earlier ones. So, however slowly the service takes results, a stream holds back
    at most one large output, which is not in memory, and little more than its flow-control window of small ones.

    Args:
        stream: the stream.
        slot: the slot.
        epoch: the epoch of the lease.
        fetches_outputs: whether the service fetches large outputs. Older services do not.

    Raises:
        Refused: the epoch is not the slot's, or the slot is not ready.
    """

    def __init__(self, stream: Stream, slot: AgentSlot, epoch: Any, fetches_outputs: bool) -> None:
        slot.check_admits(epoch)
        self._stream = stream
        self._slot = slot
        self._epoch = epoch
        self._fetches_outputs = fetches_outputs
        self._unfetched: UnfetchedOutput | None = None
        self._queue: Deque[dict[str, Any]] = deque()
        self._is_busy = False  # a call runs, or its result has not been taken
        self._is_starting = False
        self._is_complete = False  # the service sends no more calls

    def on_item(self, meta: dict[str, Any], body: bytes) -> None:
        """See `StreamHandler`. The item describes a call."""
        if len(self._queue) >= MAX_CALLS_PER_STREAM:
            raise Refused("invalid", "more than %d calls wait on one stream" % MAX_CALLS_PER_STREAM)
        self._queue.append(meta)
        if not self._is_busy:
            self._start_next_calls()

    def _start_next_calls(self) -> None:
        if self._is_starting:
            return  # a call has ended before its start returned; the loop below continues with the next one
        self._is_starting = True
        try:
            while self._queue and not self._is_busy:
                self._start_call(self._queue.popleft())
        finally:
            self._is_starting = False
        if self._is_complete and not self._is_busy:
            self._stream.end_stream()

    def _start_call(self, meta: dict[str, Any]) -> None:
        if self._slot.epoch != self._epoch or self._slot.state != READY:
            self._send_not_started(meta)
            return
        try:
            spec = parse_call_spec(meta)
        except InvalidArgs as error:
            self._stream.send_item(_result_without_output(meta, "invalid_args", str(error), {"evidence": {"ran": False}}))
            return
        self._is_busy = True
        self._slot.submit_call(spec, self._send_result)

    def _send_result(self, outcome: CallOutcome) -> None:
        if self._fetches_outputs and self._stream.is_open and outcome.is_large:
            self._unfetched = UnfetchedOutput(self._slot.lease.spool, outcome, self._continue)
            self._stream.send_item(outcome.to_item_without_output())
            return
        self._stream.send_item(*outcome.to_item())
        if self._stream.queued_bytes:
            self._stream.on_drained = self._continue_if_drained  # queued results are in memory, so no more of them may be produced
        else:
            self._continue()

    def _continue_if_drained(self) -> None:
        if not self._stream.queued_bytes:
            self._stream.on_drained = None
            self._continue()

    def _continue(self) -> None:
        if self._unfetched is not None:
            self._unfetched.release_output()
            self._unfetched = None
        self._is_busy = False
        if self._queue or self._is_complete:
            self._start_next_calls()

    def _send_not_started(self, meta: Mapping[str, Any]) -> None:
        """Send the result of a call that cannot be started, because the lease has ended or the slot is not ready any more."""
        slot = self._slot
        if slot.epoch != self._epoch:
            reason, state, error, evidence = "cancelled", "given back", "the slot was given back", {}
        else:
            reason = "sandbox_lost" if slot.state == BROKEN else "backend_error"
            state, error, evidence = slot.state, "the slot is %s (%s)" % (slot.state, slot.detail), slot.lease.loss_evidence
        metadata = {"may_have_run": False, "evidence": {**evidence, "slot": state, "ran": False}}
        self._stream.send_item(_result_without_output(meta, reason, error + " before the call began", metadata))

    def on_data(self, body: bytes) -> None:
        """See `StreamHandler`. Calls are sent as items."""
        raise Refused("invalid", "a stream of calls takes no data")

    def on_end(self) -> None:
        """See `StreamHandler`. The service sends no more calls."""
        self._is_complete = True
        if not self._is_busy and not self._queue:
            self._stream.end_stream()

    def on_abort(self) -> None:
        """See `StreamHandler`. The calls that were sent still run, and their results are recorded in the journal."""
        self._fetches_outputs = False
        if self._unfetched is not None or self._stream.on_drained is not None:
            self._stream.on_drained = None
            self._continue()


class UnfetchedOutput:
    """Keeps a large output in the spool until the service has fetched it.

    Args:
        spool: holds the output.
        outcome: of the call.
        on_fetched: called once when the service has fetched the output.
    """

    def __init__(self, spool: Spool, outcome: CallOutcome, on_fetched: Callable[[], None]) -> None:
        self._spool = spool
        self._outcome = outcome
        self._on_fetched = on_fetched
        for output in outcome.outputs:
            spool.hold_output(output)
        outcome.on_fetched.append(on_fetched)

    def release_output(self) -> None:
        """Let the spool delete the output when it needs room."""
        self._outcome.on_fetched.remove(self._on_fetched)
        for output in self._outcome.outputs:
            self._spool.release_output(output)


def _result_without_output(meta: Mapping[str, Any], reason: str, error: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "call_id": meta.get("call_id"), "reason": reason, "exit_code": None, "error": error, "output_bytes": 0, "truncated": False, "started_at": time.time(),
        "duration_s": 0.0, "cpu_s": 0.0, "max_rss_bytes": 0, "tool_ok": False, "metadata": metadata, "lens": [0],
    }  # fmt: skip
