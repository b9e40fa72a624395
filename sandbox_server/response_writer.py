"""Joins the head of a response with the first part of its body, so that the client is woken once and not twice.

uvicorn writes both as soon as it has them. The first write wakes the client, which on a machine with few processor cores runs at once, finds no body, and
waits again: for a small response this costs more than making it.
"""

from __future__ import annotations

import asyncio
from typing import Any


class ResponseWriter(asyncio.Transport):
    """The transport of one connection as one response uses it.

    The first write of the response is held until the second one, or until the end of this iteration of the event loop, whichever comes first. So a
    response whose body comes later loses no time.

    Args:
        transport: the transport of the connection.
        loop: the event loop.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._transport = transport
        self._loop = loop
        self._held: bytes | bytearray | memoryview = b""
        self._may_hold = True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write data, together with what is held; hold the first data."""
        if self._may_hold:
            self._may_hold = False
            self._held = data
            self._loop.call_soon(self.write_held)
        elif self._held:
            data, self._held = b"".join((self._held, data)), b""
            self._transport.write(data)
        else:
            self._transport.write(data)

    def write_held(self) -> None:
        """Write what is held, if anything, unless the connection has been closed meanwhile."""
        data, self._held = self._held, b""
        if data and not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        """Write what is held, and close the connection once everything is sent."""
        self.write_held()
        self._transport.close()

    def abort(self) -> None:
        """Close the connection at once, without sending what is held or buffered."""
        self._held = b""
        self._transport.abort()

    def is_closing(self) -> bool:
        """Whether the connection is closed, or is being closed."""
        return self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Information about the connection; see `asyncio.BaseTransport`."""
        return self._transport.get_extra_info(name, default)
