"""A WebSocket client of a terminal, for tests: it collects output and reports, and waits for either."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any
from urllib.parse import urlencode

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

WAIT_S = 30.0


class TerminalClient:
    """One connection to a terminal.

    Args:
        websocket: the connection.

    Attributes:
        output: what the terminal has shown so far.
        reports: the text frames so far.
    """

    def __init__(self, websocket: ClientConnection) -> None:
        self.websocket = websocket
        self.output = bytearray()
        self.reports: list[dict[str, Any]] = []

    @property
    def session(self) -> str:
        """The name of the terminal, as the first report says it."""
        return str(self.reports[0]["session"])

    async def receive(self) -> None:
        """Wait for one frame."""
        async with asyncio.timeout(WAIT_S):
            frame = await self.websocket.recv()
        if isinstance(frame, bytes):
            self.output += frame
        else:
            self.reports.append(json.loads(frame))

    async def type(self, keys: str | bytes) -> None:
        """Send keys."""
        await self.websocket.send(keys if isinstance(keys, bytes) else keys.encode())

    async def send(self, **report: Any) -> None:
        """Send a text frame."""
        await self.websocket.send(json.dumps(report))

    async def until(self, text: bytes) -> bytes:
        """Wait until the terminal shows a text. Returns all that came up to its end, and forgets it."""
        try:
            searched_bytes = 0
            while (at := self.output.find(text, searched_bytes)) < 0:
                searched_bytes = max(0, len(self.output) - len(text))
                await self.receive()
        except TimeoutError:
            raise AssertionError(f"{text!r} did not come within {WAIT_S:g} s: {self.output[-2000:]!r} {self.reports}") from None
        shown = bytes(self.output[: at + len(text)])
        del self.output[: at + len(text)]
        return shown

    async def run(self, command: str) -> str:
        """Type a command, and wait until it has ended. Returns what it has shown."""
        # The line that is typed is shown, too, and so may be earlier ones: the marks are new ones, which printf joins.
        mark = secrets.token_hex(4)
        await self.type(f"printf %s%s BEGIN {mark}; {command}; printf %s%s END {mark}\n")
        await self.until(b"BEGIN" + mark.encode())
        return (await self.until(b"END" + mark.encode())).decode().replace("\r\n", "\n").removesuffix("END" + mark)

    async def until_report(self, is_wanted: Callable[[Mapping[str, Any]], bool]) -> dict[str, Any]:
        """Wait for a report."""
        while not (found := [report for report in self.reports if is_wanted(report)]):
            await self.receive()
        return found[0]

    async def closed(self) -> tuple[int, str]:
        """Wait until the service closes the connection. Returns the close code and the reason."""
        try:
            while True:
                await self.receive()
        except ConnectionClosed as closed:
            return (closed.rcvd.code, closed.rcvd.reason) if closed.rcvd is not None else (1006, "")

    async def exit_code(self) -> int | None:
        """Wait until the connection is closed because the shell has ended. Returns its exit code."""
        code, reason = await self.closed()
        assert code == 1000, (code, reason)
        assert self.reports[-1]["type"] == "exit", self.reports
        exit_code: int | None = self.reports[-1]["exit_code"]
        return exit_code


@contextlib.asynccontextmanager
async def open_terminal(url: str, token: str, lease_id: str, options: Mapping[str, Any] | None = None, **fields: Any) -> AsyncIterator[TerminalClient]:
    """Connect to a terminal, and wait for its first report.

    Args:
        url: the address of the service.
        token: the token of the tenant.
        lease_id: the lease.
        options: further options of the WebSocket library.
        fields: the query of the handshake.
    """
    address = f"{url.replace('http', 'ws', 1)}/v1/leases/{lease_id}/terminal?{urlencode(fields)}"
    async with connect(address, additional_headers={"Authorization": f"Bearer {token}"}, proxy=None, compression=None, **(options or {})) as websocket:
        client = TerminalClient(websocket)
        while not client.reports:
            await client.receive()
        yield client
