"""uvicorn's server without its waits: it stops as soon as it is told to, and does nothing while nobody calls."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from types import FrameType

import uvicorn

log = logging.getLogger(__name__)

TICK_S = 1.0
"""How often uvicorn's server does what is due: it renews the date that is in its responses, in seconds."""
TICKS_OF_UVICORN = 10
"""How many times uvicorn itself looks in this time whether it has been told to stop. It counts these times."""


class PromptServer(uvicorn.Server):
    """uvicorn's server, which stops at once. uvicorn itself looks every tenth of a second whether it has been told to, and then waits for another tenth.

    Args:
        config: uvicorn's configuration.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Tell the server to stop, from a task of its event loop."""
        self.should_exit = True
        self._stopping.set()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop because of a signal. uvicorn calls this in a signal handler, between any two instructions of the program."""
        super().handle_exit(sig, frame)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stopping.set)

    async def main_loop(self) -> None:
        """Serve until the server is told to stop."""
        self._loop = asyncio.get_running_loop()
        tick = 0
        while not await self.on_tick(tick):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._stopping.wait()
            tick += TICKS_OF_UVICORN

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the listening sockets and the idle connections, and wait for the requests that are being answered."""
        for server in self.servers:
            server.close()
        for listener in sockets or []:
            listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await asyncio.sleep(0)  # the connections that have been closed are reported in the next iteration of the event loop
        await asyncio.sleep(0)
        await self._finish_requests()
        if not self.force_exit:
            await self.lifespan.shutdown()

    async def _finish_requests(self) -> None:
        """Wait for the requests that are being answered, for as long as uvicorn's configuration says, and cancel those that are left then.

        `uvicorn.Server.shutdown` does the same after it has closed every connection. It is not called, because closing a WebSocket connection twice fails.
        """
        try:
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                await self._wait_tasks_to_complete()  # it looks every tenth of a second
        except TimeoutError:
            log.error("requests that are still being answered are cancelled: the time for stopping is over", extra={"count": len(self.server_state.tasks)})
            for task in self.server_state.tasks:
                task.cancel()
