"""The agent's end of a pipe that a process in a slot reads as its standard input."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from typing import Callable, Deque

from sandbox_server.agent.execution.processes.pipe_size import PIPE_BYTES, enlarge_pipe


class StdinPipe:
    """Writes to a process without blocking the event loop: what the pipe does not take yet is queued in memory.

    Once the process has closed its standard input, everything that is still to be written is dropped.

    Args:
        fd: the non-blocking write end of the pipe. This object closes it.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.on_progress: Callable[[], None] | None = None  # called whenever the pipe has taken some bytes
        self._loop = asyncio.get_event_loop()
        self._queue: Deque[memoryview] = deque()
        self._is_large = False
        self._waiters: list[asyncio.Future[None]] = []
        self.unwritten_bytes = 0

    def write_stdin(self, data: bytes) -> None:
        """Write bytes, or queue them if the pipe is full. Does nothing once the pipe is closed."""
        if self._fd < 0 or not data:
            return
        if len(data) > PIPE_BYTES and not self._is_large:
            self._is_large = True
            enlarge_pipe(self._fd)  # this is much content, and a larger pipe costs both sides fewer wake-ups
        is_waiting = bool(self._queue)
        self._queue.append(memoryview(data))
        self.unwritten_bytes += len(data)
        if not is_waiting:
            self._write_queue()
            if self._queue:
                self._loop.add_writer(self._fd, self._write_queue)

    async def wait_until_written(self) -> None:
        """Wait until nothing is queued any more."""
        if self._queue:
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._waiters.append(waiter)
            await waiter

    def close_stdin(self) -> None:
        """Close the pipe, which the process sees as the end of its input. What is still queued is dropped."""
        if self._fd >= 0:
            self._drop_queue()
            os.close(self._fd)
            self._fd = -1

    def _write_queue(self) -> None:
        while self._queue:
            data = self._queue[0]
            try:
                written = os.write(self._fd, data)
            except BlockingIOError:
                return
            except OSError:
                break  # the process has closed its standard input
            self.unwritten_bytes -= written
            if self.on_progress is not None:
                self.on_progress()
            if written < len(data):
                self._queue[0] = data[written:]
                return
            self._queue.popleft()
        self._drop_queue()

    def _drop_queue(self) -> None:
        self._queue.clear()
        self.unwritten_bytes = 0
        self._loop.remove_writer(self._fd)
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():  # it is done if the task that waits was cancelled
                waiter.set_result(None)
