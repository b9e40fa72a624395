"""Signal handlers: the service stops on SIGTERM and SIGINT even while clients keep connections open, and within a time limit."""

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
"""The process ends this many seconds after a stop signal at the latest, even if clients still have connections to it."""

CLOSE_CONNECTIONS_WITHIN_S = 1.0
"""How long the HTTP server may wait for open connections after the service has stopped, in seconds."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class SignalHandlers:
    """Handles SIGTERM, SIGINT and SIGHUP for the service, and calls the handlers that were installed before.

    An HTTP server such as uvicorn first waits until every connection is closed, and stops the application only after that. An open stream would
    make it wait for ever. So the service handles the signals itself.

    Args:
        stop: is called on SIGTERM and SIGINT; starts to stop the service.
        reload: is called on SIGHUP; loads the tenants again.
    """

    def __init__(self, stop: Callable[[], Any], reload: Callable[[], Any]) -> None:
        self._stop = stop
        self._reload = reload
        self._loop = asyncio.get_running_loop()
        self._previous_handlers: dict[signal.Signals, Any] = {}
        self._stopping = False
        self._forced_end = _ForcedEnd()

    def install(self) -> None:
        """Install the handlers. Does nothing outside the main thread, because Python delivers signals to the main thread only."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._forced_end.start_thread()
        for number in STOP_SIGNALS:
            self._previous_handlers[number] = signal.getsignal(number)
            signal.signal(number, self._on_stop_signal)
        self._previous_handlers[signal.SIGHUP] = signal.getsignal(signal.SIGHUP)
        signal.signal(signal.SIGHUP, self._on_reload_signal)

    def uninstall(self) -> None:
        """Restore the previous handlers, and cancel the timer that ends the process."""
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        self._previous_handlers.clear()
        self._forced_end.cancel()

    def service_stopped(self, _: object = None) -> None:
        """Note that the service has stopped: the process now ends within `CLOSE_CONNECTIONS_WITHIN_S`. Can be used as a callback of a task."""
        if self._stopping and self._previous_handlers:
            self._forced_end.set_deadline(CLOSE_CONNECTIONS_WITHIN_S)

    def _on_stop_signal(self, number: int, frame: FrameType | None) -> None:
        if not self._stopping:
            self._stopping = True
            self._forced_end.set_deadline(END_WITHIN_S)
        self._loop.call_soon_threadsafe(self._stop)
        previous = self._previous_handlers.get(signal.Signals(number))
        if callable(previous):
            previous(number, frame)

    def _on_reload_signal(self, number: int, frame: FrameType | None) -> None:
        self._loop.call_soon_threadsafe(self._reload)


class _ForcedEnd:
    """Ends the process when a deadline passes.

    Its thread is started with the handlers: when a signal comes, slots of the same user may have taken every process that the user may have.
    """

    def __init__(self) -> None:
        self._deadlines_s: SimpleQueue[float | None] = SimpleQueue()  # `put` is safe in a signal handler

    def start_thread(self) -> None:
        """Start the thread, which waits for a deadline."""
        threading.Thread(target=self._wait_and_end, name="forced-end", daemon=True).start()

    def set_deadline(self, seconds: float) -> None:
        """End the process in so many seconds from now. This replaces any earlier deadline."""
        self._deadlines_s.put(seconds)

    def cancel(self) -> None:
        """End the thread, without ending the process."""
        self._deadlines_s.put(None)

    def _wait_and_end(self) -> None:
        wait_s = self._deadlines_s.get()
        while wait_s is not None:
            try:
                wait_s = self._deadlines_s.get(timeout=wait_s)
            except Empty:
                log.warning("clients did not close their connections in time: the process ends now")
                os._exit(128 + signal.SIGTERM)
