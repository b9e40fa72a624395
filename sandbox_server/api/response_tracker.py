"""Tracks what of the response to one request has been sent, and sends an error where one can still be sent."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from starlette.types import Message, Receive, Send

from sandbox_server.api.problems import Problem, problem_of
from sandbox_server.core.errors import PoolServiceError

log = logging.getLogger(__name__)

DISCARDED_BODY_BYTES = 64 << 20
"""How much of the body of a refused request is read and thrown away before its connection is closed."""
DISCARD_WITHIN_S = 5.0
"""For how long that is done, in seconds."""
CONNECTION_CLOSE = (b"connection", b"close")


class ResponseTracker(Protocol):
    """The response to one request, or to one WebSocket handshake."""

    request_id: str
    """The id of the request, which the response carries in `X-Request-ID`."""
    status: int
    """The HTTP status that has been sent; 0 while there is none."""
    closes_connection: bool
    """Whether the connection is to be closed after the response; further requests on it are not read."""

    async def receive(self) -> Message:
        """Receive the next message of the client."""

    async def send(self, message: Message) -> None:
        """Send a message of the application, with the request id among the headers of a response."""

    async def send_error(self, error: PoolServiceError) -> None:
        """Respond with an error. Where the response has begun already, end it in a way that the client recognises as an error."""

    def abort(self) -> None:
        """Close the connection at once, without sending what is still buffered for it."""


def headers_of(problem: Problem) -> list[tuple[bytes, bytes]]:
    """The headers of a problem document, its length included, as ASGI takes them."""
    headers = [(name.encode(), value.encode()) for name, value in problem.headers.items()]
    return [*headers, (b"content-length", str(len(problem.body)).encode())]


def abort_connection(send: Send) -> None:
    """Abort the connection to which an ASGI server's `send` belongs. Only uvicorn gives access to it; another server sends its buffer first."""
    transport = getattr(getattr(send, "__self__", None), "transport", None)
    if isinstance(transport, asyncio.Transport):
        transport.abort()


class HttpResponseTracker:
    """The response to an HTTP request.

    Args:
        receive: the server's; gives the body of the request.
        send: the server's; takes the response.
        request_id: the id of the request.
    """

    __slots__ = ("_receive", "_send", "closes_connection", "request_id", "status")

    def __init__(self, receive: Receive, send: Send, request_id: str) -> None:
        self._receive = receive
        self._send = send
        self.request_id = request_id
        self.status = 0
        self.closes_connection = False

    async def receive(self) -> Message:
        """Receive the next part of the request's body."""
        return await self._receive()

    async def send(self, message: Message) -> None:
        """Send the head or a part of the body of the response."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            request_id = (b"x-request-id", self.request_id.encode())
            message["headers"] = [*message.get("headers", ()), request_id, *((CONNECTION_CLOSE,) if self.closes_connection else ())]
        await self._send(message)

    async def send_error(self, error: PoolServiceError) -> None:
        """Respond with a problem document. A response that has begun is left incomplete, which makes the server break the connection."""
        if self.status:
            log.warning("a response was cut off", extra={"code": error.code, "detail": error.detail})
            return
        problem = problem_of(error, self.request_id)
        closes = self.closes_connection or problem.headers.get("connection") == "close"
        await self.send({"type": "http.response.start", "status": problem.status, "headers": headers_of(problem)})
        await self.send({"type": "http.response.body", "body": problem.body, "more_body": closes})
        if closes:
            # Closing while the client still sends its body would reset the connection, and the client might never read the response.
            await self._discard_body()
            await self.send({"type": "http.response.body", "body": b"", "more_body": False})

    def abort(self) -> None:
        """Close the connection at once."""
        abort_connection(self._send)

    async def _discard_body(self) -> None:
        discarded_bytes = 0
        try:
            async with asyncio.timeout(DISCARD_WITHIN_S):
                while discarded_bytes < DISCARDED_BODY_BYTES:
                    message = await self._receive()
                    discarded_bytes += len(message.get("body", b""))
                    if message["type"] != "http.request" or not message.get("more_body"):
                        return
        except TimeoutError:
            log.info("the client kept sending the body of a refused request")
