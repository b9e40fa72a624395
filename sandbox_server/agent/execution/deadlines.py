"""The two deadlines of a call: how long it may take, and how long it may write nothing."""

from __future__ import annotations

import asyncio
from typing import Callable

from sandbox_server.agent.execution.call_spec import CallSpec

_STALLED_S = 1.0  # if a timer fires this late, this process did not run for a while, and the slot perhaps did not either
_MAX_EXTENSION_S = 10.0


class CallDeadlines:
    """Ends a call when one of its deadlines has passed, from `start_timers` on: most calls end before, and are spared the timers.

    If the agent itself was stalled while the deadline passed (the machine was suspended, or overloaded), the call gets that time in addition, once.

    Args:
        spec: says how long the call may take.
        started: when the call began, as a time of the event loop.
        read_reports: processes what the call has written and how it has ended, as far as the agent has not done so yet.
        end_call: called with the reason, `timeout` or `no_output_timeout`, when a deadline has passed.
    """

    __slots__ = ("_due", "_end_call", "_is_over", "_last_output", "_loop", "_read_reports", "_silence_limit_s", "_silence_timer", "_timeout_timer", "stalled_s")

    def __init__(self, spec: CallSpec, started: float, read_reports: Callable[[], None], end_call: Callable[[str], None]) -> None:
        self._loop = asyncio.get_event_loop()
        self._silence_limit_s = spec.no_output_timeout_s
        self._read_reports = read_reports
        self._end_call = end_call
        self._last_output = started
        self._is_over = False
        self.stalled_s = 0.0  # how much longer the call may take, because the agent was stalled
        self._due = started + spec.timeout_s
        self._timeout_timer: asyncio.TimerHandle | None = None
        self._silence_timer: asyncio.TimerHandle | None = None

    def start_timers(self) -> None:
        """Check the deadlines from now on: the call has not ended at once. A deadline that has passed already ends the call now."""
        if self._is_over:
            return
        self._timeout_timer = self._loop.call_at(self._due, self._check_timeout, self._due)
        if self._silence_limit_s is not None:
            self._silence_timer = self._loop.call_at(self._last_output + self._silence_limit_s, self._check_silence, self._silence_limit_s)

    def record_output(self) -> None:
        """Restart the time in which the call may write nothing."""
        self._last_output = self._loop.time()

    def cancel_timers(self) -> None:
        """The call has ended: check no deadline any more."""
        self._is_over = True
        if self._timeout_timer is not None:
            self._timeout_timer.cancel()
        if self._silence_timer is not None:
            self._silence_timer.cancel()

    def _check_timeout(self, due: float) -> None:
        self._read_reports()
        extension_s = self._extend_if_stalled(due)
        if extension_s and not self._is_over:
            self._timeout_timer = self._loop.call_later(extension_s, self._end_call, "timeout")
        else:
            self._end_call("timeout")

    def _check_silence(self, limit_s: float) -> None:
        if self._loop.time() - self._last_output >= limit_s:
            self._read_reports()
        silent_s = self._loop.time() - self._last_output
        if silent_s >= limit_s and not self._extend_if_stalled(self._last_output + limit_s):
            self._end_call("no_output_timeout")
        elif not self._is_over:
            self._silence_timer = self._loop.call_later(max(limit_s - silent_s, self.stalled_s), self._check_silence, limit_s)

    def _extend_if_stalled(self, due: float) -> float:
        """Return by how many seconds a deadline that was due at `due` is extended; 0.0: it is not."""
        late_s = self._loop.time() - due
        if late_s < _STALLED_S or self.stalled_s:
            return 0.0
        self.stalled_s = min(late_s, _MAX_EXTENSION_S)
        return self.stalled_s
