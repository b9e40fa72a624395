"""One output stream of a session: what is written during a call belongs to that call, and what background jobs write between two calls to the next one."""

from __future__ import annotations

from sandbox_server.agent.execution.output import Sink, truncation_marker

PENDING_BYTES = 64 << 10  # of what is written between two calls, the newest


class SessionOutput:
    """Passes output on to the call that runs, and keeps some of it while none does."""

    def __init__(self) -> None:
        self._sink: Sink | None = None
        self._pending = bytearray()
        self._dropped_bytes = 0
        self._is_discarding = False

    def discard(self) -> None:
        """Discard what is written from now on until the next call begins: a new shell is starting."""
        self._is_discarding = True

    def begin_call(self, sink: Sink) -> None:
        """From now on, output belongs to a call; so does what has been kept."""
        self._sink = sink
        self._is_discarding = False
        if self._dropped_bytes:
            sink.write(truncation_marker(self._dropped_bytes))
        if self._pending:
            sink.write(bytes(self._pending))
        self._pending.clear()
        self._dropped_bytes = 0

    def end_call(self) -> None:
        """From now on, output belongs to no call."""
        self._sink = None

    @property
    def is_full(self) -> bool:
        """See `Writable`."""
        return self._sink.is_full if self._sink is not None else len(self._pending) >= PENDING_BYTES

    def write(self, data: bytes) -> None:
        """See `Writable`."""
        if self._sink is not None:
            self._sink.write(data)
            return
        if self._is_discarding:
            return
        self._pending += data
        surplus = len(self._pending) - PENDING_BYTES
        if surplus > 0:
            del self._pending[:surplus]
            self._dropped_bytes += surplus
