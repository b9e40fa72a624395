"""The second witness of every call: a listener outside of all slots, to which each command says its name when it runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.faults.history import History

BACKLOG = 512


@asynccontextmanager
async def witness(history: History) -> AsyncIterator[int]:
    """Listen while the block lasts; every line `WORD CALL_ID LEASE_ID` is noted. Gives the port."""
    talks: set[asyncio.StreamWriter] = set()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        talks.add(writer)
        try:
            while line := await reader.readline():
                word, call_id, lease_id = line.decode().split()
                history.note("witness", word=word, call_id=call_id, lease_id=lease_id)
        except ConnectionResetError:
            pass  # its slot was killed while it held the connection; whole lines were noted
        finally:
            talks.discard(writer)
            writer.transport.abort()

    server = await asyncio.start_server(listen, "127.0.0.1", 0, backlog=BACKLOG)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for writer in list(talks):
            writer.transport.abort()
        await server.wait_closed()
