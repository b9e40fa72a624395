"""One WebSocket connection between a client and a program in a slot. Messages are passed on; pings are answered on each side."""

from __future__ import annotations

import asyncio

from starlette.types import Message
from starlette.websockets import WebSocket
from websockets.client import ClientProtocol
from websockets.exceptions import InvalidStatus, ProtocolError, WebSocketException
from websockets.frames import Frame, Opcode
from websockets.protocol import State
from websockets.typing import Subprotocol
from websockets.uri import WebSocketURI

from sandbox_server.api.body import ClientDisconnected, ClientStalled
from sandbox_server.api.ports.directions import run_until_first_ends
from sandbox_server.api.ports.headers import forwarded_headers
from sandbox_server.api.ports.program_input import ProgramInput
from sandbox_server.api.ports.target import PortTarget
from sandbox_server.api.request_context import REQUEST_CONTEXT_KEY, SERVICE_KEY, RequestContext, Service
from sandbox_server.api.websocket import BEARER_SUBPROTOCOL, MAX_MESSAGE_BYTES
from sandbox_server.core.errors import InvalidRequest, PortClosed
from sandbox_server.link.port_connection import PortConnection

CLOSE_WITHIN_S = 2.0
PARSED_AT_ONCE_BYTES = 8 << 10
"""How much of what a program sends is parsed before other requests have their turn: it may be thousands of frames without content."""
NO_STATUS, ABNORMAL, GOING_AWAY, NORMAL = 1005, 1006, 1001, 1000
_DATA_OPCODES = (Opcode.TEXT, Opcode.BINARY, Opcode.CONT)


async def relay_websocket(websocket: WebSocket, target: PortTarget) -> None:
    """Connect a client with a program, until one of them closes the connection or the lease ends.

    Args:
        websocket: the client's connection, whose handshake is not answered yet.
        target: what the handshake asks for.

    Raises:
        PoolServiceError: those of `SlotPorts.connect`; PortClosed also where the program does not accept the handshake.
    """
    service: Service = websocket.scope[SERVICE_KEY]
    context: RequestContext = websocket.scope[REQUEST_CONTEXT_KEY]
    await websocket.receive()  # the handshake
    async with service.ports.connect(context.tenant.name, target.lease_id, target.port) as connection:
        relay = WebSocketRelay(websocket, connection, target, service.limits.answer_stall_s)
        await run_until_first_ends(relay.shake_hands(), relay.wait_for_disconnect())
        await relay.accept_client()  # only now: nothing that it sends is lost, because nothing else receives it any more
        await relay.forward_messages()


class WebSocketRelay:
    """The two connections, and the messages between them.

    Args:
        websocket: the client's connection.
        connection: the connection to the program.
        target: what the handshake asks for.
        stall_s: for how long the client may read nothing, and the program nothing of what the client has sent, in seconds.
        close_within_s: how long the program may take to close its side after its client has closed the other one, in seconds.
    """

    def __init__(self, websocket: WebSocket, connection: PortConnection, target: PortTarget, stall_s: float, close_within_s: float = CLOSE_WITHIN_S) -> None:
        self._websocket = websocket
        self._connection = connection
        self._input = ProgramInput(connection, target.port, stall_s)
        self._target = target
        self._stall_s = stall_s
        self._close_within_s = close_within_s
        offered = [Subprotocol(name) for name in websocket.scope.get("subprotocols", ()) if not name.startswith(BEARER_SUBPROTOCOL)]
        uri = WebSocketURI(secure=False, host="localhost", port=target.port, path="/", query="")
        self._protocol = ClientProtocol(uri, subprotocols=offered or None, max_size=MAX_MESSAGE_BYTES)
        self._write_lock = asyncio.Lock()
        self._unsent: list[bytes] = []
        self._pong = b""  # the answer to the last ping of the program, until it is sent
        self._has_pong = asyncio.Event()
        self._message = bytearray()  # as far as it has come; not a list of its frames, of which there may be any number without content
        self._unparsed = b""
        self._is_text = False
        self._is_closed_by_client = False

    async def shake_hands(self) -> None:
        """Open the connection to the program.

        Raises:
            PortClosed: the program does not accept the handshake.
            InvalidRequest: a part of the handshake is not valid HTTP.
        """
        request = self._protocol.connect()
        try:
            request.path = self._target.path.decode("ascii")
        except UnicodeDecodeError:
            raise InvalidRequest("path: must be ASCII, with other characters percent-encoded", field="path") from None
        for name, value in forwarded_headers(self._websocket.scope["headers"], self._target, self._websocket.scope["scheme"]):
            if name.lower() != b"host" and name.isascii() and value.isascii():
                request.headers[name.decode()] = value.decode()
        self._protocol.send_request(request)
        await self._flush()
        while self._protocol.state is State.CONNECTING:
            if not await self._receive_data():
                break
        if self._protocol.handshake_exc is not None or self._protocol.state is State.CONNECTING:
            raise PortClosed(f"the program on port {self._target.port} of the slot has not accepted the WebSocket: {self._refusal()}")

    async def accept_client(self) -> None:
        """Accept the client's connection, with the subprotocol that the program has chosen."""
        await self._websocket.send({"type": "websocket.accept", "subprotocol": self._protocol.subprotocol})

    async def wait_for_disconnect(self) -> None:
        """Wait until the client disconnects, although its handshake is not answered yet. It cannot send messages before that.

        Raises:
            ClientDisconnected: always.
        """
        await self._websocket.receive()
        raise ClientDisconnected

    def _refusal(self) -> str:
        error = self._protocol.handshake_exc
        if isinstance(error, InvalidStatus):
            return f"it answered the handshake with HTTP {error.response.status_code}"
        return str(error)[:200] if isinstance(error, WebSocketException) else "the connection ended before its answer was complete"

    async def forward_messages(self) -> None:
        """Pass on messages in both directions until one side has closed its connection.

        Raises:
            ClientDisconnected, PortClosed, ClientStalled: as `forward_to_client` and `forward_to_program`.
        """
        await run_until_first_ends(self.forward_to_client(), run_until_first_ends(self._send_pongs(), self.forward_to_program()))

    # From the program.

    async def forward_to_client(self) -> None:
        """Pass on the program's messages until the connection to it has ended, and close the client's connection as it was closed.

        Raises:
            PortClosed: the program has broken the connection, or the protocol.
            ClientStalled: the client has read nothing for too long.
        """
        more = True
        while True:
            for event in self._protocol.events_received():
                if isinstance(event, Frame) and event.opcode in _DATA_OPCODES:
                    await self._forward_frame(event)
            await self._answer_program()
            await asyncio.sleep(0)  # other requests have their turn
            if not more or self._protocol.close_rcvd is not None or self._protocol.parser_exc is not None:
                break
            more = await self._receive_data()
        if not self._is_closed_by_client:
            await self._close_client()

    async def _forward_frame(self, frame: Frame) -> None:
        if frame.opcode is not Opcode.CONT:
            self._is_text = frame.opcode is Opcode.TEXT
        self._message += frame.data
        if not frame.fin:
            return
        data, self._message = bytes(self._message), bytearray()
        message: Message = {"type": "websocket.send"}
        if self._is_text:
            try:
                message["text"] = data.decode()
            except UnicodeDecodeError:
                raise PortClosed(f"the program on port {self._target.port} of the slot has sent a text message that is not UTF-8") from None
        else:
            message["bytes"] = data
        try:
            async with asyncio.timeout(self._stall_s):
                await self._websocket.send(message)
        except TimeoutError:
            raise ClientStalled(f"the client has not read a message within the {self._stall_s:g} s of `limits.answer_stall_s`") from None

    async def _answer_program(self) -> None:
        """Send what the protocol itself answers to the program: a close; or the answer to a ping, for which nothing waits here.

        A program that sends pings and does not read their answers would otherwise stop its own messages. Answering the last ping answers those before it
        (RFC 6455, section 5.5.3).
        """
        if self._protocol.state is not State.OPEN:
            await self._flush()
        elif pongs := self._protocol.data_to_send():
            self._pong = pongs[-1]
            self._has_pong.set()

    async def _close_client(self) -> None:
        received = self._protocol.close_rcvd
        if received is None:
            error = self._protocol.parser_exc
            is_end = error is None or isinstance(error, EOFError)
            why = "has ended the connection without closing it" if is_end else f"has broken the protocol: {error}"
            raise PortClosed(f"the program on port {self._target.port} of the slot {why}")
        code = received.code if received.code != NO_STATUS else NORMAL
        await self._websocket.send({"type": "websocket.close", "code": code, "reason": received.reason})

    # From the client.

    async def forward_to_program(self) -> None:
        """Pass on the client's messages until it closes its connection, and close the program's as it was closed.

        Raises:
            ClientDisconnected: the client has closed its connection, and the program has not closed its own in time.
            PortClosed: the program has read nothing for too long.
        """
        while (message := await self._websocket.receive())["type"] == "websocket.receive":
            text = message.get("text")
            if self._protocol.state is not State.OPEN:
                return  # the program has closed the connection, and the client will read that
            if text is not None:
                self._protocol.send_text(text.encode())
            else:
                self._protocol.send_binary(message["bytes"])
            await self._flush()
        self._is_closed_by_client = True
        try:
            async with asyncio.timeout(self._close_within_s):  # which holds for a program that reads nothing, not even the close, as well
                if self._protocol.state is State.OPEN:
                    self._send_close(message.get("code", NO_STATUS), message.get("reason") or "")
                    await self._flush()
                self._input.end()
                await asyncio.Event().wait()  # `forward_to_client` ends as soon as the program has closed its side
        except TimeoutError:
            raise ClientDisconnected from None

    def _send_close(self, code: int, reason: str) -> None:
        try:
            if code == NO_STATUS:
                self._protocol.send_close()
            else:
                self._protocol.send_close(GOING_AWAY if code == ABNORMAL else code, reason)
        except ProtocolError:
            self._protocol.send_close(GOING_AWAY)

    # The connection to the program.

    async def _receive_data(self) -> bool:
        """Receive data of the program, and parse some of it. Returns False at its end."""
        data = self._unparsed or await self._connection.read()
        if data:
            self._protocol.receive_data(data[:PARSED_AT_ONCE_BYTES])
            self._unparsed = data[PARSED_AT_ONCE_BYTES:]
        else:
            self._protocol.receive_eof()
        return bool(data)

    async def _send_pongs(self) -> None:
        """Send the answer to the last ping of the program, whenever it reads. Those to earlier pings are left out.

        Raises:
            PortClosed: the program has read nothing for too long.
        """
        while True:
            await self._has_pong.wait()
            async with self._write_lock:
                pong = self._pong
                self._has_pong.clear()
                if self._protocol.state is State.OPEN:  # nothing may follow a close
                    await self._input.write(pong)

    async def _flush(self) -> None:
        """Send what the protocol has for the program.

        A direction that has nothing to send does not wait for the other one: the program may read again only once it is read.

        Raises:
            PortClosed: the program has read nothing for too long.
        """
        self._unsent += self._protocol.data_to_send()
        if not self._unsent:
            return
        async with self._write_lock:
            chunks, self._unsent = self._unsent, []
            await self._input.write(b"".join(chunks))
            if b"" in chunks:  # how the protocol says that nothing follows
                self._input.end()
