"""A WebSocket connection to a terminal of a slot, and its errors as those of the client library."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI

from env_client.discovery import Endpoint
from env_client.errors import ConnectFailed, ConnectionLost, error_from_response, service_error
from env_client.messages.message import path_with_query, quote_path_segment
from env_client.transport.connections import environment_proxy

OPEN_WITHIN_S = 30.0
CLOSE_WITHIN_S = 2.0
_NORMAL = 1000
#: The close codes after which connecting again does not help, and the error code that each stands for.
_FINAL_CLOSE_CODES: Mapping[int, str] = {4401: "unauthorized", 4404: "lease_not_found", 4410: "lease_lost"}
_NOT_ALLOWED = range(1002, 1011)  # the service refuses what this client has sent


@dataclass(frozen=True, kw_only=True, slots=True)
class TerminalOptions:
    """Which terminal to open.

    Args:
        lease_id: the lease.
        session: its name; None for a new one, or, to watch, for the one that was last written to.
        watches: whether only to watch.
    """

    lease_id: str
    session: str | None
    watches: bool


class TerminalConnection:
    """One connection. Its methods raise `ConnectionLost` where connecting again may help, and the service's error where it does not.

    Args:
        websocket: the connection.
    """

    def __init__(self, websocket: ClientConnection) -> None:
        self._websocket = websocket

    async def receive(self) -> bytes | Mapping[str, Any] | None:
        """Wait for output or for a report. Returns None once the service has closed the connection because the shell has ended."""
        try:
            frame = await self._websocket.recv()
        except ConnectionClosed as closed:
            if closed.rcvd is not None and closed.rcvd.code == _NORMAL:
                return None
            raise _error_from_close(closed) from closed
        if isinstance(frame, bytes):
            return frame
        report = json.loads(frame)
        return report if isinstance(report, dict) else {}

    async def send_keys(self, keys: bytes) -> None:
        """Send keys to the program, and wait while many have not been taken."""
        await self._send(keys)

    async def resize(self, cols: int, rows: int) -> None:
        """Change the size of the window."""
        await self._send(json.dumps({"type": "resize", "cols": cols, "rows": rows}))

    async def _send(self, frame: bytes | str) -> None:
        try:
            await self._websocket.send(frame)
        except ConnectionClosed as closed:
            raise _error_from_close(closed) from closed


def _error_from_close(closed: ConnectionClosed) -> Exception:
    code, reason = (closed.rcvd.code, closed.rcvd.reason) if closed.rcvd is not None else (0, "")
    if code in _FINAL_CLOSE_CODES:
        return service_error(_FINAL_CLOSE_CODES[code], reason or None)
    if code in _NOT_ALLOWED and code != 1006:
        return service_error("invalid_request", reason or f"the service has closed the connection with code {code}")
    return ConnectionLost(f"the connection to the terminal was lost{': ' + reason if reason else ''}")


@asynccontextmanager
async def open_connection(endpoint: Endpoint, options: TerminalOptions, cols: int, rows: int) -> AsyncIterator[TerminalConnection]:
    """Connect to a terminal.

    Args:
        endpoint: the address of the service and the token.
        options: which terminal.
        cols: the width of the window in columns.
        rows: its height in rows.

    Raises:
        ConnectFailed: the service cannot be reached.
        ServiceError: the service has refused it.
    """
    url = httpx.URL(endpoint.url)
    mode = "watch" if options.watches else "write"
    path = path_with_query(f"/v1/leases/{quote_path_segment(options.lease_id)}/terminal", cols=cols, rows=rows, session=options.session, mode=mode)
    headers = {"Authorization": f"Bearer {endpoint.token}"} if endpoint.token else {}
    is_tls = url.scheme == "https"
    tls: dict[str, ssl.SSLContext] = {"ssl": httpx.create_ssl_context()} if is_tls else {}
    address = ("wss" if is_tls else "ws") + endpoint.url.removeprefix(url.scheme) + path
    connecting = connect(
        address, additional_headers=headers, proxy=environment_proxy(url), compression=None, open_timeout=OPEN_WITHIN_S,
        ping_interval=None,  # the service sends them
        **tls,  # type: ignore[arg-type]
    )  # fmt: skip
    try:
        websocket = await connecting
    except InvalidStatus as refused:
        response = refused.response
        received = {name.lower(): value for name, value in response.headers.raw_items()}
        raise error_from_response(response.status_code, received, bytes(response.body)) from refused
    except (OSError, TimeoutError, InvalidHandshake, InvalidURI) as error:
        raise ConnectFailed(f"no connection to {endpoint.url}: {error}") from error
    try:
        yield TerminalConnection(websocket)
    finally:
        try:
            async with asyncio.timeout(CLOSE_WITHIN_S):  # the library waits without end for a service that takes no keys
                await websocket.close()
        except TimeoutError:
            websocket.transport.abort()
