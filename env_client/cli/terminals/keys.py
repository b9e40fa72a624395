"""What a person types at a terminal of a slot: the keys for the program, and those with which the person leaves."""

from __future__ import annotations

import asyncio
from typing import NoReturn

from env_client.cli.terminals.escapes import EscapeReader
from env_client.cli.terminals.local_terminal import read_keys

#: The service keeps a message within 64 KiB.
_MESSAGE_BYTES = 32 << 10
#: How much is read while the program takes no keys. It is more than a person types: `~.` behind it is read, too.
_MAX_WAITING_BYTES = 64 << 10
#: How long the keys typed before `~.` may take to be sent.
_SEND_WITHIN_S = 1.0
_INTERRUPT_KEY = b"\x03"  # Ctrl-C
_WATCHER_KEYS = b"\x03\x04"  # Ctrl-C and Ctrl-D, with which a person leaves what is only watched


class Left(Exception):
    """The person has left. The terminal runs on."""


class KeyReader:
    """Reads what a person types, whether there is a connection or not. What is typed without a connection goes to no program.

    Args:
        fd: the local terminal.
        watches: whether the person only watches.
    """

    def __init__(self, fd: int, *, watches: bool) -> None:
        self._fd = fd
        self._watches = watches
        self._escapes = EscapeReader()
        self._is_connected = False
        self._waiting = bytearray()
        self._is_sending = False
        self._changed = asyncio.Condition()

    async def read_until_left(self) -> NoReturn:
        """Read keys until the person leaves.

        Raises:
            Left: the person has left, or the local terminal has gone.
        """
        while True:
            data = await read_keys(self._fd)
            typed = self._escapes.read(data)
            if self._watches or not self._is_connected:
                if any(key in (_WATCHER_KEYS if self._watches else _INTERRUPT_KEY) for key in data):
                    raise Left
            else:
                await self._keep(typed.keys)
            if typed.leaves or not data:
                await self._wait_until_sent()
                raise Left

    async def next_keys(self) -> bytes:
        """Wait for keys to send. By the next question for keys, these have been sent."""
        async with self._changed:
            self._is_sending = False
            self._changed.notify_all()
            await self._changed.wait_for(lambda: self._waiting)
            keys = bytes(self._waiting[:_MESSAGE_BYTES])
            del self._waiting[:_MESSAGE_BYTES]
            self._is_sending = True
            self._changed.notify_all()
            return keys

    async def set_connected(self, is_connected: bool) -> None:
        """Note that there is a connection, or that it was lost. The keys that wait are dropped with it: nobody wants them to run a minute later."""
        async with self._changed:
            self._is_connected = is_connected
            self._is_sending = False
            self._waiting.clear()
            self._changed.notify_all()

    async def _keep(self, keys: bytes) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._waiting) < _MAX_WAITING_BYTES or not self._is_connected)
            if self._is_connected:
                self._waiting += keys
                self._changed.notify_all()

    async def _wait_until_sent(self) -> None:
        """Wait until all keys have been sent, but not for a program that takes none."""
        try:
            async with asyncio.timeout(_SEND_WITHIN_S), self._changed:
                await self._changed.wait_for(lambda: not self._waiting and not self._is_sending)
        except TimeoutError:
            return
