"""One WebSocket connection to a terminal: bytes in binary frames both ways, everything else as JSON in text frames."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, NoReturn

from starlette.types import Message, Receive, Send

from sandbox_server.api.body import ClientDisconnected, ClientStalled
from sandbox_server.api.contract.render import dumps
from sandbox_server.api.websocket import close_reason
from sandbox_server.core.errors import BackendUnavailable, LeaseLost, Stopping
from sandbox_server.dispatch.terminals import OpenTerminal
from sandbox_server.link.terminal_stream import MAX_SIDE, TerminalStream

OPEN_WITHIN_S = 30.0
"""How long a terminal may take to open. The agent gives up sooner."""
NORMAL, INVALID_DATA, NOT_ALLOWED, TOO_LARGE = 1000, 1007, 1008, 1009
"""The close codes of RFC 6455 that a terminal uses."""
MAX_KEYS_BYTES = 64 << 10
"""The longest message that a client may send to a terminal, in bytes."""
PROBE_INTERVAL_S = 1.0
"""How often an empty frame is sent to a client whose keys wait, in seconds. While messages wait, only sending shows whether the connection was lost."""


class _WrongMessage(Exception):
    """The client has sent a message for which its connection is closed.

    Args:
        code: the close code.
        reason: what is wrong with it, and what the client may send.
    """

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class TerminalConnection:
    """Carries the messages between a client and a terminal, at the pace of the slower one.

    Args:
        receive: gives the messages of the client.
        send: takes the messages to the client.
        terminal: the terminal.
        may_write: whether the client may write.
        stopping: done once the service begins to stop.
        stall_s: for how long the client may read nothing, in seconds.
    """

    def __init__(self, receive: Receive, send: Send, terminal: OpenTerminal, *, may_write: bool, stopping: asyncio.Future[None], stall_s: float) -> None:
        self._receive = receive
        self._send = send
        self._terminal = terminal
        self._may_write = may_write
        self._stopping = stopping
        self._stall_s = stall_s

    async def serve(self) -> None:
        """Accept the handshake once the terminal is open, and serve the connection until the client, the shell, the lease or the service ends it.

        Raises:
            PoolServiceError: the terminal cannot be opened, or has ended without its shell: with its lease, its sandbox or this service.
            ClientDisconnected: the client has ended the connection.
            ClientStalled: the client reads nothing.
        """
        stream = self._terminal.stream
        opened = await self._wait_until_open(stream)
        await self._send({"type": "websocket.accept"})
        output = asyncio.create_task(self._send_output(stream, opened))
        keys = asyncio.create_task(self._receive_keys(stream))
        try:
            ends: set[asyncio.Future[Any]] = {output, keys, self._stopping, self._terminal.lease_ended}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if output.done():
                output.result()
                await self._close(NORMAL, "the shell has ended")
            elif keys.done():
                keys.result()
            else:
                self._raise_end()
        except _WrongMessage as wrong:
            await self._close(wrong.code, wrong.reason)
        finally:
            await _cancel(output, keys)

    async def _wait_until_open(self, stream: TerminalStream) -> bytes | Mapping[str, Any] | None:
        """Wait for the first message of the terminal, unless the lease or the service ends first."""
        first = asyncio.create_task(stream.next_message())
        ends: set[asyncio.Future[Any]] = {first, self._stopping, self._terminal.lease_ended}
        try:
            await asyncio.wait(ends, timeout=OPEN_WITHIN_S, return_when=asyncio.FIRST_COMPLETED)
            if not first.done():
                self._raise_end()
            return first.result()
        finally:
            await _cancel(first)

    def _raise_end(self) -> NoReturn:
        """Raise the error that says why the connection ends although neither its shell nor its client has ended it."""
        if self._terminal.lease_ended.done():
            raise self._terminal.lease_ended.result() or LeaseLost("the lease has ended")
        if self._stopping.done():
            raise Stopping
        raise BackendUnavailable(f"the terminal was not opened within {OPEN_WITHIN_S:g} s")

    async def _send_output(self, stream: TerminalStream, message: bytes | Mapping[str, Any] | None) -> None:
        """Send this message of the terminal, and all later ones."""
        while message is not None:
            frame: Message = {"type": "websocket.send"}
            if isinstance(message, bytes):
                frame["bytes"] = message
            else:
                frame["text"] = dumps(message).decode()
            await self._send_frame(frame)
            message = await stream.next_message()

    async def _send_frame(self, frame: Message) -> None:
        try:
            async with asyncio.timeout(self._stall_s):
                await self._send(frame)
        except TimeoutError:
            raise ClientStalled(f"the client has not read the output of a terminal within the {self._stall_s:g} s of `limits.answer_stall_s`") from None

    async def _receive_keys(self, stream: TerminalStream) -> NoReturn:
        """Pass the messages of the client on. The next one is always asked for, so that the end of the connection is seen while the program reads no keys."""
        following = asyncio.ensure_future(self._receive())
        try:
            while True:
                message = await following
                _check_connected(message)
                following = asyncio.ensure_future(self._receive())
                taking = asyncio.create_task(self._take_message(stream, message))
                try:
                    await self._wait_until_taken(taking, following)
                finally:
                    await _cancel(taking)
        finally:
            await _cancel(following)

    async def _wait_until_taken(self, taking: asyncio.Task[None], following: asyncio.Future[Message]) -> None:
        """Wait until a message has been taken, unless the connection ends first.

        Once the following message is there as well, no more are received: the memory for the keys that wait stays bounded. From then on only sending
        shows whether the client is still connected.
        """
        while not taking.done():
            awaited: set[asyncio.Future[Any]] = {taking} if following.done() else {taking, following}
            done, _ = await asyncio.wait(awaited, timeout=PROBE_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED)
            if following in done:
                _check_connected(following.result())
            elif not done and following.done():
                await self._send_frame({"type": "websocket.send", "bytes": b""})
        taking.result()

    async def _take_message(self, stream: TerminalStream, message: Message) -> None:
        data, text = message.get("bytes"), message.get("text")
        if data is None and text is None:  # the handshake itself
            return
        if not self._may_write:
            raise _WrongMessage(NOT_ALLOWED, "this connection only watches; open one with mode=write to type")
        if len(data if data is not None else text or "") > MAX_KEYS_BYTES:
            raise _WrongMessage(TOO_LARGE, f"a message may have at most {MAX_KEYS_BYTES} bytes")
        if data is not None:
            await stream.send_keys(data)
        else:
            await _apply(stream, text or "")

    async def _close(self, code: int, reason: str) -> None:
        await self._send({"type": "websocket.close", "code": code, "reason": close_reason(reason)})


def _check_connected(message: Message) -> None:
    if message["type"] == "websocket.disconnect":
        raise ClientDisconnected


async def _apply(stream: TerminalStream, text: str) -> None:
    """Do what a text frame of the client asks for."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        raise _WrongMessage(INVALID_DATA, "a text frame must be a JSON object; send keys as binary frames") from None
    kind = document.get("type") if isinstance(document, dict) else None
    if kind == "writer":
        await stream.become_writer()
    elif kind == "resize":
        await stream.resize(_side(document, "cols"), _side(document, "rows"))
    else:
        raise _WrongMessage(INVALID_DATA, 'a text frame must be a JSON object whose type is "resize" or "writer"')


def _side(document: Mapping[str, Any], name: str) -> int:
    value = document.get(name)
    if type(value) is not int or not 1 <= value <= MAX_SIDE:
        raise _WrongMessage(INVALID_DATA, f"resize: {name} must be a whole number from 1 to {MAX_SIDE}")
    return value


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait for their end. What they raise has been handled, or does not matter any more."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()
