"""One HTTP request to a program in a slot, and its answer. Both are streamed, each at the pace of its reader.

Each request has a connection of its own, so that no answer can be taken for that of another request.
"""

from __future__ import annotations

import asyncio

import h11
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sandbox_server.api.body import ClientDisconnected, check_length, read_chunks
from sandbox_server.api.ports.directions import run_until_first_ends
from sandbox_server.api.ports.headers import answered_headers, body_headers, forwarded_headers
from sandbox_server.api.ports.program_input import ProgramInput
from sandbox_server.api.ports.target import PortTarget
from sandbox_server.api.request_context import service_of, tenant_of
from sandbox_server.api.streams import body_part, send_part, wait_for_disconnect
from sandbox_server.core.errors import InvalidRequest, PortClosed
from sandbox_server.link.port_connection import PortConnection

MAX_HEAD_BYTES = 64 << 10
"""The longest head of an answer, and the longest line of a chunked one, in bytes."""
MAX_INTERIM_ANSWERS = 16
"""How many answers with a status below 200 may precede the answer."""
STATUSES = range(200, 600)
EVENTS_AT_ONCE = 64
"""How many parts of a body are parsed before other requests have their turn: a program may send it in parts of one byte."""


class PortResponse(Response):
    """The answer of a program in a slot to one request.

    Args:
        target: what the request asks for.
    """

    def __init__(self, target: PortTarget) -> None:
        super().__init__()
        self._target = target

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        service, tenant = service_of(request), tenant_of(request).name
        check_length(request, service.limits, "upload_bytes")
        async with service.ports.connect(tenant, self._target.lease_id, self._target.port) as connection:
            exchange = HttpExchange(connection, self._target, service.limits.answer_stall_s)
            head = exchange.request_head(scope)
            await run_until_first_ends(exchange.send_answer(send), exchange.send_request(head, request))


class HttpExchange:
    """The request and the answer on one connection.

    Args:
        connection: the connection to the program.
        target: what the request asks for.
        stall_s: for how long the client may read nothing of the answer, and the program nothing of the request, in seconds.
    """

    def __init__(self, connection: PortConnection, target: PortTarget, stall_s: float) -> None:
        self._connection = connection
        self._input = ProgramInput(connection, target.port, stall_s)
        self._target = target
        self._stall_s = stall_s
        self._protocol = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
        self._is_cut_off = False

    def request_head(self, scope: Scope) -> bytes:
        """The head of the request as the program gets it.

        Raises:
            InvalidRequest: a part of it is not valid HTTP.
        """
        received = scope["headers"]
        headers = [*forwarded_headers(received, self._target, scope["scheme"]), *body_headers(received), (b"connection", b"close")]
        try:
            head = self._protocol.send(h11.Request(method=scope["method"], target=self._target.path, headers=headers))
        except h11.LocalProtocolError as error:
            raise InvalidRequest(f"the request cannot be sent to a program: {error}") from None
        return head or b""

    async def send_request(self, head: bytes, request: Request) -> None:
        """Send the request to the program, then wait until the client disconnects.

        Raises:
            ClientDisconnected: the client has disconnected.
            PayloadTooLarge: the body is larger than `limits.upload_bytes`.
            PortClosed: the program has read nothing of it for too long.
        """
        await self._input.write(head)
        async for chunk in read_chunks(request, service_of(request).limits, "upload_bytes"):
            await self._input.write(self._protocol.send(h11.Data(data=chunk)) or b"")
        await self._input.write(self._protocol.send(h11.EndOfMessage()) or b"")
        await wait_for_disconnect(request.receive)
        raise ClientDisconnected

    async def send_answer(self, send: Send) -> None:
        """Send the program's answer to the client, each part as soon as it is there.

        Args:
            send: the send function of the ASGI application.

        Raises:
            PortClosed: the program has not answered, or not with valid HTTP.
            ClientStalled: the client has read nothing for too long.
        """
        head = await self._receive_head()
        headers = answered_headers(head.headers, head.status_code, self._target)
        await send({"type": "http.response.start", "status": head.status_code, "headers": headers})
        part: list[bytes] = []
        while not isinstance(event := self._parse_event(), h11.EndOfMessage):
            if isinstance(event, h11.Data):
                part.append(bytes(event.data))
                if len(part) % EVENTS_AT_ONCE == 0:
                    await asyncio.sleep(0)
                continue
            if part:
                await send_part(send, b"".join(part), self._stall_s)
                part = []
            await self._receive_data()
        await send(body_part(b"".join(part), more=False))

    async def _receive_head(self) -> h11.Response:
        for _ in range(MAX_INTERIM_ANSWERS + 1):
            event = await self._next_event()
            if isinstance(event, h11.Response):
                if event.status_code not in STATUSES:
                    raise self._not_valid(f"its status is {event.status_code}")
                return event
        raise self._not_valid(f"more than {MAX_INTERIM_ANSWERS} interim answers")

    async def _next_event(self) -> object:
        while (event := self._parse_event()) is h11.NEED_DATA:
            await self._receive_data()
        return event

    def _parse_event(self) -> object:
        """Parse the next event of what has been received; `h11.NEED_DATA` if more is needed for it."""
        try:
            return self._protocol.next_event()
        except h11.RemoteProtocolError as error:
            raise self._not_valid("the connection ended before its answer was complete" if self._is_cut_off else str(error)) from None

    async def _receive_data(self) -> None:
        data = await self._connection.read()
        self._is_cut_off = not data
        self._protocol.receive_data(data)

    def _not_valid(self, why: str) -> PortClosed:
        return PortClosed(f"the program on port {self._target.port} of the slot has not given a valid HTTP answer: {why}")
