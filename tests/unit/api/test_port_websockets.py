"""The end of a WebSocket connection to a program that does not close its side."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from starlette.websockets import WebSocket
from websockets.frames import Frame, Opcode
from websockets.http11 import Request
from websockets.server import ServerProtocol

from sandbox_server.api.body import ClientDisconnected
from sandbox_server.api.ports.target import PortTarget
from sandbox_server.api.ports.websocket_relay import WebSocketRelay
from sandbox_server.core.errors import PortClosed
from sandbox_server.link.port_connection import PortConnection

TARGET = PortTarget(lease_id="l-1", port=8000, prefix=b"/v1/leases/l-1/ports/8000", path=b"/x")


class DeafProgram:
    """A connection to a program that accepts a WebSocket, and sends nothing by itself from then on, not even the answer to a close."""

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

    def send_pings_and_a_message(self) -> None:
        for number in range(100):
            self._protocol.send_ping(b"%d" % number)
        self._protocol.send_text(b"after the pings")
        self._sent.put_nowait(b"".join(self._protocol.data_to_send()))


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
    relay = await opened(client, program, 1.0, 0.05)
    with pytest.raises(ClientDisconnected):
        await relay.forward_messages()

    assert [message["type"] for message in client.sent] == ["websocket.accept"]
    assert [(frame.opcode, bytes(frame.data)[2:]) for frame in program.frames] == [(8, b"enough")]
    assert program.has_read_the_end


class BlockedProgram(DeafProgram):
    """A connection to a program that accepts a WebSocket, and reads nothing from then on."""

    def __init__(self) -> None:
        super().__init__()
        self.has_accepted = False

    async def write(self, data: bytes) -> None:
        if self.has_accepted:
            await asyncio.Event().wait()
        await super().write(data)
        self.has_accepted = True


class SendingClient(GoneClient):
    """A client that sends one message, and stays."""

    def __init__(self) -> None:
        super().__init__()
        self._messages = [{"type": "websocket.receive", "text": "hello"}]
        self.has_message = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        if not self._messages:
            await asyncio.Event().wait()
        return self._messages.pop()

    async def send(self, message: dict[str, Any]) -> None:
        await super().send(message)
        if message["type"] == "websocket.send":
            self.has_message.set()


async def opened(client: GoneClient, program: DeafProgram, stall_s: float, close_within_s: float) -> WebSocketRelay:
    relay = WebSocketRelay(cast(WebSocket, client), cast(PortConnection, program), TARGET, stall_s, close_within_s)
    await relay.shake_hands()
    await relay.accept_client()
    return relay


async def test_a_program_that_reads_not_even_the_close_is_left_after_a_while() -> None:
    relay = await opened(GoneClient(), BlockedProgram(), 3600, 0.05)
    async with asyncio.timeout(30):
        with pytest.raises(ClientDisconnected):
            await relay.forward_messages()


async def test_a_program_that_reads_no_message_for_too_long_is_left() -> None:
    relay = await opened(SendingClient(), BlockedProgram(), 0.05, 3600)
    async with asyncio.timeout(30):
        with pytest.raises(PortClosed, match=r"has read nothing of what was sent to it for the 0\.05 s of `limits\.answer_stall_s`"):
            await relay.forward_messages()


async def test_pings_whose_answers_the_program_does_not_read_do_not_stop_its_messages() -> None:
    client, program = SendingClient(), BlockedProgram()
    relay = await opened(client, program, 3600, 3600)
    forwarding = asyncio.create_task(relay.forward_messages())
    try:
        async with asyncio.timeout(30):
            program.send_pings_and_a_message()
            await client.has_message.wait()
    finally:
        forwarding.cancel()
        await asyncio.wait([forwarding])

    assert client.sent[-1] == {"type": "websocket.send", "text": "after the pings"}


async def test_the_last_ping_of_many_is_answered() -> None:
    client, program = SendingClient(), DeafProgram()
    relay = await opened(client, program, 3600, 3600)
    forwarding = asyncio.create_task(relay.forward_messages())
    try:
        async with asyncio.timeout(30):
            program.send_pings_and_a_message()
            while not any(frame.opcode is Opcode.PONG for frame in program.frames):
                await asyncio.sleep(0)
    finally:
        forwarding.cancel()
        await asyncio.wait([forwarding])

    assert [bytes(frame.data) for frame in program.frames if frame.opcode is Opcode.PONG] == [b"99"]
