"""The response to one WebSocket handshake: reads the token from its subprotocol, and sends errors as problem documents or close codes. `edge` authenticates."""

from __future__ import annotations

import logging
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from sandbox_server.api.body import ClientDisconnected
from sandbox_server.api.problems import close_code_of, problem_of
from sandbox_server.api.response_tracker import abort_connection, headers_of
from sandbox_server.core.errors import PoolServiceError

log = logging.getLogger(__name__)

BEARER_SUBPROTOCOL = "bearer."
"""A subprotocol with this prefix carries the token: the WebSocket interface of browsers cannot set an `Authorization` header."""
CLOSED_AFTER_ACCEPT = frozenset({"unauthorized", "lease_not_found", "lease_lost", "sandbox_lost"})
"""The errors for which the connection is accepted and closed with a close code: a page in a browser can read that, but not why a handshake was refused."""
HTTP_RESPONSE_EXTENSION = "websocket.http.response"
MAX_CLOSE_REASON_BYTES = 123
"""The longest reason that a close frame can carry (RFC 6455, section 5.5.1)."""
SWITCHING_PROTOCOLS = 101
MAX_MESSAGE_BYTES = 4 << 20
"""The longest message over a WebSocket connection, in bytes."""


def bearer_subprotocol(scope: Scope) -> str | None:
    """The subprotocol that carries a token; None if the handshake offers none."""
    return next((name for name in scope.get("subprotocols", ()) if name.startswith(BEARER_SUBPROTOCOL)), None)


def authorization_of_subprotocol(subprotocol: str) -> bytes:
    """The `Authorization` header that a `bearer.TOKEN` subprotocol stands for."""
    return b"Bearer " + subprotocol.removeprefix(BEARER_SUBPROTOCOL).encode()


def close_reason(text: str) -> str:
    """A text cut to what a close frame can carry, without a character that is cut in half."""
    return text.encode()[:MAX_CLOSE_REASON_BYTES].decode(errors="ignore")


class WebSocketTracker:
    """The response to a WebSocket handshake, and the end of the connection that it opens.

    Args:
        scope: the handshake's.
        receive: the server's; gives the handshake, then the client's messages.
        send: the server's; takes the response to the handshake, then messages to the client.
        request_id: the id of the handshake's request.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, request_id: str) -> None:
        self._receive = receive
        self._send = send
        self._subprotocol = bearer_subprotocol(scope)
        self._can_refuse = HTTP_RESPONSE_EXTENSION in scope.get("extensions", {})
        self._is_handshake_received = False
        self._is_ended = False
        self.request_id = request_id
        self.status = 0
        self.closes_connection = False

    async def receive(self) -> Message:
        """Receive the handshake, or the next message of the client."""
        message = await self._receive()
        self._is_handshake_received = True
        self._is_ended = self._is_ended or message["type"] == "websocket.disconnect"
        return message

    async def send(self, message: Message) -> None:
        """Send the response to the handshake, or a message to the client.

        An accepted handshake gets the subprotocol that carried the token, if the route chose no other: browsers give up a
        connection whose server chose none of the subprotocols that they offered.

        Raises:
            ClientDisconnected: the connection is closed already.
        """
        kind = message["type"]
        if kind in ("websocket.accept", "websocket.http.response.start"):
            self.status = SWITCHING_PROTOCOLS if kind == "websocket.accept" else message["status"]
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", self.request_id.encode())]
        if kind == "websocket.accept" and message.get("subprotocol") is None:
            message["subprotocol"] = self._subprotocol
        if kind == "websocket.close" or (kind == "websocket.http.response.body" and not message.get("more_body", False)):
            self._is_ended = True
        try:
            await self._send(message)
        except OSError:  # how an ASGI server says that the connection is closed
            self._is_ended = True
            raise ClientDisconnected from None

    async def send_error(self, error: PoolServiceError) -> None:
        """Refuse the handshake with a problem document, or close the connection with the close code of the error.

        A handshake is refused where the server can send a response for it, except for the errors of `CLOSED_AFTER_ACCEPT`.

        Raises:
            ClientDisconnected: the connection is closed already.
        """
        if self._is_ended or self.status not in (0, SWITCHING_PROTOCOLS):
            log.warning("an error could not be sent: the WebSocket connection has ended", extra={"code": error.code, "detail": error.detail})
            return
        if not self._is_handshake_received:
            await self.receive()
        if not self.status and self._can_refuse and error.code not in CLOSED_AFTER_ACCEPT:
            problem = problem_of(error, self.request_id)
            await self.send({"type": "websocket.http.response.start", "status": problem.status, "headers": headers_of(problem)})
            await self.send({"type": "websocket.http.response.body", "body": problem.body})
            return
        if not self.status:
            accept: dict[str, Any] = {"type": "websocket.accept"}
            await self.send(accept)
        await self.send({"type": "websocket.close", "code": close_code_of(error.code), "reason": close_reason(error.detail)})

    def abort(self) -> None:
        """Close the connection at once."""
        abort_connection(self._send)
