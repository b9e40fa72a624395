"""What is sent to a program in a slot, within a limit of the time in which the program reads none of it."""

from __future__ import annotations

import asyncio

from sandbox_server.agent.wire import DATA_BYTES
from sandbox_server.core.errors import PortClosed
from sandbox_server.link.port_connection import PortConnection


class ProgramInput:
    """The direction of a connection that leads to the program.

    While a part of a request waits for the program, the server reads nothing of the client, and so cannot notice that the client is gone. Without the limit,
    a program that never reads would keep the connections of clients that are gone until its lease ends.

    Args:
        connection: the connection to the program.
        port: the TCP port on which the program listens, for the error.
        stall_s: for how long the program may read nothing of what was sent before, in seconds.
    """

    def __init__(self, connection: PortConnection, port: int, stall_s: float) -> None:
        self._connection = connection
        self._port = port
        self._stall_s = stall_s

    async def write(self, data: bytes) -> None:
        """Send bytes to the program at the pace at which it reads. The time begins anew with each 128 KiB: a slow program loses nothing of a large message.

        Raises:
            PortClosed: the program has read nothing for `stall_s`.
            LinkLost, AgentSilent: the agent cannot be reached.
        """
        for start in range(0, len(data), DATA_BYTES):
            try:
                async with asyncio.timeout(self._stall_s):
                    await self._connection.write(data[start : start + DATA_BYTES])
            except TimeoutError:
                why = f"has read nothing of what was sent to it for the {self._stall_s:g} s of `limits.answer_stall_s`"
                raise PortClosed(f"the program on port {self._port} of the slot {why}") from None

    def end(self) -> None:
        """Tell the program that nothing more follows."""
        self._connection.end_writing()
