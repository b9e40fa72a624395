"""Signal handlers: the service stops on SIGTERM and SIGINT even while clients keep connections open, and within a time limit."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable
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
        self._end_timer: threading.Timer | None = None

    def install(self) -> None:
        """Install the handlers. Does nothing outside the main thread, because Python delivers signals to the main thread only."""
        if threading.current_thread() is not threading.main_thread():
            return
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
        if self._end_timer is not None:
            self._end_timer.cancel()

    def service_stopped(self, _: object = None) -> None:
        """Note that the service has stopped: the process now ends within `CLOSE_CONNECTIONS_WITHIN_S`. Can be used as a callback of a task."""
        if self._end_timer is not None and self._previous_handlers:
            self._end_timer.cancel()
            self._end_process_within(CLOSE_CONNECTIONS_WITHIN_S)

    def _end_process_within(self, seconds: float) -> None:
        self._end_timer = threading.Timer(seconds, _end_process)
        self._end_timer.daemon = True
        self._end_timer.start()

    def _on_stop_signal(self, number: int, frame: FrameType | None) -> None:
        if self._end_timer is None:
            self._end_process_within(END_WITHIN_S)
        self._loop.call_soon_threadsafe(self._stop)
        previous = self._previous_handlers.get(signal.Signals(number))
        if callable(previous):
            previous(number, frame)

    def _on_reload_signal(self, number: int, frame: FrameType | None) -> None:
        self._loop.call_soon_threadsafe(self._reload)


def _end_process() -> None:
    log.warning("clients did not close their connections in time: the process ends now")
    os._exit(128 + signal.SIGTERM)
