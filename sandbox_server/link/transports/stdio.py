"""`stdio:`: the standard input and output of the agent's relay, which a backend starts wherever its sandboxes run programs."""

from __future__ import annotations

import asyncio
import logging
from collections import deque

from sandbox_server.core.pipe import Pipe
from sandbox_server.link.endpoint import Endpoint

log = logging.getLogger(__name__)

HIGH_WATER_BYTES = 256 << 10
LOW_WATER_BYTES = 64 << 10
#: How long a relay whose output has ended may take to say why, in seconds.
ENDING_S = 2.0
#: How long a backend may take to end a relay, in seconds.
CLOSE_S = 10.0


async def open_stdio(protocol: asyncio.Protocol, endpoint: Endpoint) -> None:
    """Start the agent's relay and connect the protocol to it.

    Raises:
        OSError: the relay could not be started.
    """
    if endpoint.open_pipe is None:
        raise ValueError(f"{endpoint.address} needs a backend that can start the agent's relay")
    PipeTransport(await endpoint.open_pipe(), protocol)


class PipeTransport(asyncio.Transport):
    """Makes an asyncio transport of a pipe, with the flow control of both. `connection_lost` comes when the pipe is closed."""

    def __init__(self, pipe: Pipe, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._pipe = pipe
        self._protocol = protocol
        self._unsent: deque[bytes] = deque()
        self._unsent_bytes = 0
        self._has_unsent = asyncio.Event()
        self._may_read = asyncio.Event()
        self._may_read.set()
        self._writing_is_paused = False
        self._hung_up = asyncio.Event()
        protocol.connection_made(self)
        self._work = asyncio.create_task(self._run())

    async def _run(self) -> None:
        error: Exception | None = None
        work = [asyncio.create_task(job) for job in (self._read(), self._write(), self._hung_up.wait())]
        try:
            done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
            if not self._hung_up.is_set():
                error = await self._why_it_ended(next(iter(done)))
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
            self._hung_up.set()
            await self._close_pipe()
            self._protocol.connection_lost(error)

    async def _why_it_ended(self, done: asyncio.Task[object]) -> Exception | None:
        """What the relay says of its end; without that, what reading or writing met."""
        met = done.exception()
        if met is not None and not isinstance(met, OSError):
            log.error("a pipe to an agent failed", exc_info=met)
            return ConnectionError(f"{type(met).__name__}: {met}")
        try:
            async with asyncio.timeout(ENDING_S):
                said = await self._pipe.wait_for_exit()
        except (TimeoutError, OSError) as error:
            return met or (None if isinstance(error, TimeoutError) else error)
        return ConnectionError(said) if said else met

    async def _close_pipe(self) -> None:
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._pipe.close()
        except (TimeoutError, OSError) as error:
            log.warning("the relay to an agent may not have ended: %s", str(error) or f"it was given {CLOSE_S:g} s")

    async def _read(self) -> None:
        while data := await self._pipe.read():
            await self._may_read.wait()
            self._protocol.data_received(data)

    async def _write(self) -> None:
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
        if self._hung_up.is_set() or not data:
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
        self._may_read.clear()

    def resume_reading(self) -> None:
        self._may_read.set()

    def is_closing(self) -> bool:
        return self._hung_up.is_set()

    def abort(self) -> None:
        self._hung_up.set()

    def close(self) -> None:
        self._hung_up.set()
