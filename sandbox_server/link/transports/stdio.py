"""`stdio:`: the standard input and output of the agent's relay, a program that the backend starts inside the sandbox."""

from __future__ import annotations

import asyncio
import logging
from collections import deque

from sandbox_server.core.pipe import Pipe
from sandbox_server.link.endpoint import AgentEndpoint

log = logging.getLogger(__name__)

HIGH_WATER_BYTES = 256 << 10
LOW_WATER_BYTES = 64 << 10
#: How long a relay whose output has ended may take to report why, in seconds.
END_REASON_WAIT_S = 2.0
#: How long a backend may take to end a relay, in seconds.
CLOSE_WAIT_S = 10.0


async def open_stdio(protocol: asyncio.Protocol, endpoint: AgentEndpoint) -> None:
    """Start the agent's relay and connect the protocol to it.

    Raises:
        OSError: the relay could not be started.
        ValueError: the backend cannot start a relay.
    """
    if endpoint.open_pipe is None:
        raise ValueError(f"{endpoint.address} needs a backend that can start the agent's relay")
    PipeTransport(await endpoint.open_pipe(), protocol)


class PipeTransport(asyncio.Transport):
    """Adapts a pipe to an asyncio transport, with flow control in both directions. `connection_lost` is called after the pipe was closed.

    Args:
        pipe: the standard input and output of the relay.
        protocol: the protocol to connect.
    """

    def __init__(self, pipe: Pipe, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._pipe = pipe
        self._protocol = protocol
        self._unsent: deque[bytes] = deque()
        self._unsent_bytes = 0
        self._has_unsent = asyncio.Event()
        self._reading_is_allowed = asyncio.Event()
        self._reading_is_allowed.set()
        self._writing_is_paused = False
        self._is_closed = asyncio.Event()
        protocol.connection_made(self)
        self._task = asyncio.create_task(self._transfer_data())

    async def _transfer_data(self) -> None:
        error: Exception | None = None
        tasks = [asyncio.create_task(job) for job in (self._read_pipe(), self._write_pipe(), self._is_closed.wait())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not self._is_closed.is_set():
                error = await self._reason_for_end(next(iter(done)))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._is_closed.set()
            await self._close_pipe()
            self._protocol.connection_lost(error)

    async def _reason_for_end(self, done: asyncio.Task[object]) -> Exception | None:
        """Why the pipe ended: what the relay reports, or else the error of reading or writing."""
        failure = done.exception()
        if failure is not None and not isinstance(failure, OSError):
            log.error("a pipe to an agent failed", exc_info=failure)
            return ConnectionError(f"{type(failure).__name__}: {failure}")
        try:
            async with asyncio.timeout(END_REASON_WAIT_S):
                reported = await self._pipe.wait_for_exit()
        except (TimeoutError, OSError) as error:
            return failure or (None if isinstance(error, TimeoutError) else error)
        return ConnectionError(reported) if reported else failure

    async def _close_pipe(self) -> None:
        try:
            async with asyncio.timeout(CLOSE_WAIT_S):
                await self._pipe.end_program()
        except (TimeoutError, OSError) as error:
            log.warning("the relay to an agent may not have ended: %s", str(error) or f"it was given {CLOSE_WAIT_S:g} s")

    async def _read_pipe(self) -> None:
        while data := await self._pipe.read():
            await self._reading_is_allowed.wait()
            self._protocol.data_received(data)

    async def _write_pipe(self) -> None:
        while True:
            await self._has_unsent.wait()
            self._has_unsent.clear()
            data = b"".join(self._unsent)
            self._unsent.clear()
            await self._pipe.write(data)
            self._unsent_bytes -= len(data)
            if self._writing_is_paused and self._unsent_bytes <= LOW_WATER_BYTES:
                self._writing_is_paused = False
                self._protocol.resume_writing()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._is_closed.is_set() or not data:
            return
        self._unsent.append(bytes(data))
        self._unsent_bytes += len(data)
        self._has_unsent.set()
        if not self._writing_is_paused and self._unsent_bytes > HIGH_WATER_BYTES:
            self._writing_is_paused = True
            self._protocol.pause_writing()

    def get_write_buffer_size(self) -> int:
        return self._unsent_bytes

    def pause_reading(self) -> None:
        self._reading_is_allowed.clear()

    def resume_reading(self) -> None:
        self._reading_is_allowed.set()

    def is_closing(self) -> bool:
        return self._is_closed.is_set()

    def abort(self) -> None:
        self._is_closed.set()

    def close(self) -> None:
        self._is_closed.set()
