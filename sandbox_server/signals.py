"""Hearing that the process should end while the server still waits for its clients, and ending in time even if they never let go."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any

log = logging.getLogger(__name__)

END_WITHIN_S = 9.0
"""After so many seconds of being told to stop the process ends, whoever still holds a connection to it."""

LET_GO_WITHIN_S = 1.0
"""How long the server may wait for its clients after the service has stopped, in seconds."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Signals:
    """Calls the service back on signals, and whoever handled them before as well.

    A server such as uvicorn first waits until every connection is closed and only then tells the application to stop; an open stream would
    keep it waiting for ever. So the service listens for the signals itself.

    Args:
        stop: begins to stop.
        reload: reads again what SIGHUP is for.
    """

    def __init__(self, stop: Callable[[], Any], reload: Callable[[], Any]) -> None:
        self._stop = stop
        self._reload = reload
        self._loop = asyncio.get_running_loop()
        self._before: dict[signal.Signals, Any] = {}
        self._stopping = False
        self._forced_end = _ForcedEnd()

    def install(self) -> None:
        """Start to listen. Does nothing outside the main thread, where signals never arrive."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._forced_end.start_thread()
        for number in STOP_SIGNALS:
            self._before[number] = signal.getsignal(number)
            signal.signal(number, self._on_stop)
        self._before[signal.SIGHUP] = signal.getsignal(signal.SIGHUP)
        signal.signal(signal.SIGHUP, self._on_hang_up)

    def uninstall(self) -> None:
        """Stop listening, and call off the forced end."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
        self._forced_end.cancel()

    def stopped(self, _: object = None) -> None:
        """The service has stopped; the server may take `LET_GO_WITHIN_S` more to see its clients off."""
        if self._stopping and self._before:
            self._forced_end.set_deadline(LET_GO_WITHIN_S)

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        if not self._stopping:
            self._stopping = True
            self._forced_end.set_deadline(END_WITHIN_S)
        self._loop.call_soon_threadsafe(self._stop)
        before = self._before.get(signal.Signals(number))
        if callable(before):
            before(number, frame)

    def _on_hang_up(self, number: int, frame: FrameType | None) -> None:
        self._loop.call_soon_threadsafe(self._reload)


class _ForcedEnd:
    """Ends the process when a deadline passes, in a thread that waits from the start: when a signal comes there may be no room for another thread."""

    def __init__(self) -> None:
        self._deadlines_s: SimpleQueue[float | None] = SimpleQueue()  # `put` is safe in a signal handler

    def start_thread(self) -> None:
        """Wait for a deadline."""
        threading.Thread(target=self._run, name="forced-end", daemon=True).start()

    def set_deadline(self, seconds: float) -> None:
        """End the process in so many seconds from now, in place of any earlier deadline."""
        self._deadlines_s.put(seconds)

    def cancel(self) -> None:
        """End the thread, and leave the process be."""
        self._deadlines_s.put(None)

    def _run(self) -> None:
        wait_s = self._deadlines_s.get()
        while wait_s is not None:
            try:
                wait_s = self._deadlines_s.get(timeout=wait_s)
            except Empty:
                log.warning("clients held on to their connections: ending all the same")
                os._exit(128 + signal.SIGTERM)
