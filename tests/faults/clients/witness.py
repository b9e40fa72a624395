"""The witness of the calls: a listener outside of all slots, to which each command reports when it runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.faults.history import History

BACKLOG = 512


@asynccontextmanager
async def witness(history: History) -> AsyncIterator[int]:
    """Listen for the length of the block, and record every line `WORD CALL_ID LEASE_ID`. Yields the port."""
    connections: set[asyncio.StreamWriter] = set()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.add(writer)
        try:
            while line := await reader.readline():
                word, call_id, lease_id = line.decode().split()
                history.note("witness", word=word, call_id=call_id, lease_id=lease_id)
        except ConnectionResetError:
            pass  # its slot was killed; the lines that arrived whole were recorded
        finally:
            connections.discard(writer)
            writer.transport.abort()

    server = await asyncio.start_server(listen, "127.0.0.1", 0, backlog=BACKLOG)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for writer in list(connections):
            writer.transport.abort()
        await server.wait_closed()
