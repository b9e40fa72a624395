"""Pipes that are still open after their call has ended. The agent reads them slowly and discards what it reads.

Otherwise a background process that writes to such a pipe would block for ever, or be killed by SIGPIPE.
"""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict

_PAUSE_S = 0.1
_READ_BYTES = 64 << 10


class Drains:
    """The drained pipes of one slot.

    Every pipe is read at most once per pause, so that a background process that writes without end costs the agent little time. If there are too many
    pipes, the oldest is closed; it belongs to the same slot.

    Args:
        loop: the event loop.
        max_count: how many pipes there may be.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, max_count: int) -> None:
        self._loop = loop
        self._max_count = max_count
        self._timers: OrderedDict[int, asyncio.TimerHandle | None] = OrderedDict()  # descriptor -> when it is read again; None: as soon as it is readable

    def add_pipe(self, fd: int) -> None:
        """Drain a pipe from now on, and close it later.

        Args:
            fd: its read end, which must not block.
        """
        if len(self._timers) >= self._max_count:
            self._close_pipe(next(iter(self._timers)))
        self._timers[fd] = None
        self._loop.add_reader(fd, self._read_pipe, fd)

    def _read_pipe(self, fd: int) -> None:
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._close_pipe(fd)
            return
        self._loop.remove_reader(fd)
        self._timers[fd] = self._loop.call_later(_PAUSE_S, self._resume_reading, fd)

    def _resume_reading(self, fd: int) -> None:
        self._timers[fd] = None
        self._loop.add_reader(fd, self._read_pipe, fd)

    def _close_pipe(self, fd: int) -> None:
        timer = self._timers.pop(fd)
        if timer is not None:
            timer.cancel()
        else:
            self._loop.remove_reader(fd)
        os.close(fd)

    def close_pipes(self) -> None:
        """Close all pipes: the processes of the slot are being ended."""
        while self._timers:
            self._close_pipe(next(iter(self._timers)))
