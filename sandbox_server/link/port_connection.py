"""A connection to a program that listens on a port of a slot, carried by one stream of the link."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from sandbox_server.agent import wire
from sandbox_server.link.agent_stream import AgentStream
from sandbox_server.link.errors import AgentRefused, PortRefused


class PortConnection:
    """Bytes to and from a program in a slot. Use it as an async context manager; leaving it closes the connection in the slot.

    Reading slowly makes the program wait, and a program that reads slowly makes `write` wait.
    """

    def __init__(self, stream: AgentStream) -> None:
        self._stream = stream
        self._has_ended = False

    async def wait_until_connected(self) -> None:
        """Wait for the agent to have connected.

        Raises:
            PortRefused: nobody listens on the port.
            LinkLost, AgentSilent, AgentRefused: the agent cannot say.
        """
        async for event in self._stream:
            if isinstance(event, wire.Item):
                return
        raise PortRefused({"code": "port_closed", "detail": "the agent has ended the connection before it stood"})

    async def read(self) -> bytes:
        """Wait for bytes of the program. Empty bytes: it sends no more.

        Raises:
            PortRefused: the connection was broken.
            LinkLost, AgentSilent, AgentRefused: the agent has ended it, or cannot be reached.
        """
        if not self._has_ended:
            async for event in self._stream:
                if isinstance(event, wire.Data):
                    return event.body
            self._has_ended = True
        return b""

    async def write(self, data: bytes) -> None:
        """Send bytes to the program, and wait while too many are on their way. Bytes that the program does not want any more are discarded.

        Raises:
            LinkLost, AgentSilent: the agent cannot be reached.
        """
        try:
            await self._stream.send_data(data)
        except AgentRefused:
            return  # `read` raises it: the program's last bytes come before that

    def end_writing(self) -> None:
        """Tell the program that nothing more follows."""
        self._stream.end()

    async def __aenter__(self) -> Self:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._stream.__aexit__(kind, error, trace)
