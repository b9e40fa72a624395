"""A person at a terminal of a slot: passes keys and output on, connects again when the connection is lost, and leaves when the person wants to."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import time
from collections.abc import Callable
from typing import Any, NoReturn

from env_client.cli.terminals.connection import TerminalConnection, TerminalOptions, open_connection
from env_client.cli.terminals.keys import KeyReader
from env_client.cli.terminals.local_terminal import window_size, write_output
from env_client.cli.terminals.screen_modes import ScreenModes
from env_client.discovery import Endpoint
from env_client.errors import BackendUnavailable, Draining, TransportError

RECONNECT_WITHIN_S = 60.0
_PAUSE_S = 0.5
_CLEAR_SCREEN = b"\x1b[0m\x1b[H\x1b[2J"


class TerminalSession:
    """One terminal on the local terminal.

    Args:
        endpoint: the address of the service and the token.
        options: which terminal.
        keys_fd: the local terminal; -1 if nobody types.
        output_fd: where the output goes.
        note: shows a note to the person.
    """

    def __init__(self, endpoint: Endpoint, options: TerminalOptions, keys_fd: int, output_fd: int, note: Callable[[str], None]) -> None:
        self._endpoint = endpoint
        self._options = options
        self._keys = KeyReader(keys_fd, watches=options.watches) if keys_fd >= 0 else None
        self._output_fd = output_fd
        self._note = note
        self._resized = asyncio.Event()
        self._was_reported = False
        self.modes = ScreenModes()
        self.session = options.session

    async def follow(self) -> int | None:
        """Show the terminal until its shell ends.

        Returns:
            The exit code of the shell.

        Raises:
            Left: the person has left.
            SandboxError: the terminal cannot be reached, or has ended with its lease.
        """
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGWINCH, self._resized.set)
        try:
            tasks: list[asyncio.Task[Any]] = [asyncio.create_task(self._stay_connected())]
            if self._keys is not None:
                tasks.append(asyncio.create_task(self._keys.read_until_left()))
            return await _first_result(tasks)
        finally:
            loop.remove_signal_handler(signal.SIGWINCH)

    async def _stay_connected(self) -> int | None:
        """Show the terminal until its shell ends. Connect again for as long as `RECONNECT_WITHIN_S` after the last connection that gave a report."""
        lost_at: float | None = None
        while True:
            try:
                return await self._connect_and_converse(is_again=lost_at is not None)
            except (TransportError, Draining, BackendUnavailable) as error:
                if not self._was_reported and (lost_at is None or time.monotonic() > lost_at + RECONNECT_WITHIN_S):
                    raise
                if self._was_reported:
                    lost_at = time.monotonic()
                    self._note(f"{error.detail}; connecting again")
            await asyncio.sleep(_PAUSE_S)

    async def _connect_and_converse(self, is_again: bool) -> int | None:
        self._was_reported = False
        options = dataclasses.replace(self._options, session=self.session)
        async with open_connection(self._endpoint, options, *window_size(self._output_fd)) as connection:
            if is_again:
                await write_output(self._output_fd, self.modes.undo() + _CLEAR_SCREEN)  # what was shown comes again
            tasks = [asyncio.create_task(self._show_output(connection)), asyncio.create_task(self._pass_sizes(connection))]
            if self._keys is None:
                return await _first_result(tasks)
            await self._keys.set_connected(True)
            try:
                return await _first_result([*tasks, asyncio.create_task(_pass_keys(self._keys, connection))])
            finally:
                await self._keys.set_connected(False)

    async def _show_output(self, connection: TerminalConnection) -> int | None:
        exit_code: int | None = None
        while (message := await connection.receive()) is not None:
            if isinstance(message, bytes):
                self.modes.follow(message)
                await write_output(self._output_fd, message)
            elif message.get("type") == "session":
                self.session = str(message["session"])
                self._was_reported = True
            elif message.get("type") == "writer" and not self._options.watches:
                self._note("you type again" if message["writer"] else "somebody else types in this terminal now; you only watch")
            elif message.get("type") == "exit":
                exit_code = int(message["exit_code"])
        return exit_code

    async def _pass_sizes(self, connection: TerminalConnection) -> None:
        while True:
            await self._resized.wait()
            self._resized.clear()
            if not self._options.watches:
                await connection.resize(*window_size(self._output_fd))


async def _pass_keys(keys: KeyReader, connection: TerminalConnection) -> NoReturn:
    while True:
        await connection.send_keys(await keys.next_keys())


async def _first_result(tasks: list[asyncio.Task[Any]]) -> int | None:
    """Return the result of the task that is done first, or raise its error; end the others."""
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task in done:
                result: int | None = task.result()
                return result
        return None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
