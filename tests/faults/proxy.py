"""A proxy between the clients and the service, whose connections can be cut at any moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

CHUNK_BYTES = 65536
BACKLOG = 512


class Proxy:
    """Forwards connections to the service. While the service cannot be reached, a connection ends at once.

    Args:
        port: where the service listens on loopback.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._open: dict[asyncio.StreamWriter, asyncio.StreamWriter | None] = {}
        self.url = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Proxy]:
        """Listen for the length of the block."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=BACKLOG)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            self.cut(1.0)
            await server.wait_closed()

    def cut(self, share: float) -> int:
        """Cut a share of the open connections, the oldest first. Bytes that were not delivered are lost. Return how many were cut."""
        victims = list(self._open.items())[: max(1, round(len(self._open) * share))]
        for client, service in victims:
            client.transport.abort()
            if service is not None:
                service.transport.abort()
        return len(victims)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open[writer] = None
        try:
            there, service = await asyncio.open_connection("127.0.0.1", self._target)
            self._open[writer] = service
            try:
                await asyncio.gather(_pass_on(reader, service), _pass_on(there, writer))
            finally:
                service.transport.abort()
        except OSError:
            pass  # the service does not listen now, or one of the two connections was cut
        finally:
            del self._open[writer]
            writer.transport.abort()


async def _pass_on(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while chunk := await source.read(CHUNK_BYTES):
        target.write(chunk)
        await target.drain()
    # Closed after everything was sent, so that no connection stays half open.
    with suppress(OSError):
        target.close()
        await target.wait_closed()
