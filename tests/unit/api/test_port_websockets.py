"""The end of a WebSocket connection to a program that does not close its side."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from starlette.websockets import WebSocket
from websockets.frames import Frame
from websockets.http11 import Request
from websockets.server import ServerProtocol

from sandbox_server.api.body import ClientDisconnected
from sandbox_server.api.ports.directions import run_until_first_ends
from sandbox_server.api.ports.target import PortTarget
from sandbox_server.api.ports.websocket_relay import WebSocketRelay
from sandbox_server.link.port_connection import PortConnection

TARGET = PortTarget(lease_id="l-1", port=8000, prefix=b"/v1/leases/l-1/ports/8000", path=b"/x")


class DeafProgram:
    """A connection to a program that accepts a WebSocket, and sends nothing from then on, not even the answer to a close."""

    def __init__(self) -> None:
        self._protocol = ServerProtocol()
        self._sent: asyncio.Queue[bytes] = asyncio.Queue()
        self.frames: list[Frame] = []
        self.has_read_the_end = False

    async def write(self, data: bytes) -> None:
        self._protocol.receive_data(data)
        for event in self._protocol.events_received():
            if isinstance(event, Request):
                self._protocol.send_response(self._protocol.accept(event))
                self._sent.put_nowait(b"".join(self._protocol.data_to_send()))
            elif isinstance(event, Frame):
                self.frames.append(event)

    async def read(self) -> bytes:
        return await self._sent.get()

    def end_writing(self) -> None:
        self.has_read_the_end = True


class GoneClient:
    """A client that closes its connection with 4123 as soon as it is open."""

    def __init__(self) -> None:
        self.scope: dict[str, Any] = {"headers": [], "scheme": "ws", "subprotocols": []}
        self.sent: list[dict[str, Any]] = []

    async def receive(self) -> dict[str, Any]:
        return {"type": "websocket.disconnect", "code": 4123, "reason": "enough"}

    async def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)


async def test_a_program_that_does_not_close_its_side_is_left_after_a_while() -> None:
    program, client = DeafProgram(), GoneClient()
    relay = WebSocketRelay(cast(WebSocket, client), cast(PortConnection, program), TARGET, 1.0, 0.05)
    await relay.shake_hands()
    await relay.accept_client()
    with pytest.raises(ClientDisconnected):
        await run_until_first_ends(relay.forward_to_client(), relay.forward_to_program())

    assert [message["type"] for message in client.sent] == ["websocket.accept"]
    assert [(frame.opcode, bytes(frame.data)[2:]) for frame in program.frames] == [(8, b"enough")]
    assert program.has_read_the_end
