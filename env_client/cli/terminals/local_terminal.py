"""The terminal that the command line runs on."""

from __future__ import annotations

import asyncio
import os
import signal
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_READ_BYTES = 16 << 10


@contextmanager
def raw_terminal(fd: int) -> Iterator[None]:
    """Pass every key on as it is typed, for the duration of a block. Afterwards the terminal is as before, however the block ends, and after SIGQUIT."""
    before = termios.tcgetattr(fd)

    def restore_and_quit(number: int, _frame: FrameType | None) -> None:
        termios.tcsetattr(fd, termios.TCSANOW, before)
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    former_handler = signal.signal(signal.SIGQUIT, restore_and_quit)
    try:
        tty.setraw(fd)
        yield
    finally:
        signal.signal(signal.SIGQUIT, former_handler)
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def window_size(fd: int) -> tuple[int, int]:
    """Return the columns and rows of a terminal, at least 1 and at most 1,000; those of a standard one if it has none."""
    try:
        size = os.get_terminal_size(fd)
    except OSError:
        return 80, 24
    return (min(size.columns, 1000) or 80), (min(size.lines, 1000) or 24)


async def read_keys(fd: int) -> bytes:
    """Wait for keys. Returns no bytes once the terminal has gone."""
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()

    def set_readable() -> None:
        if not readable.done():
            readable.set_result(None)

    loop.add_reader(fd, set_readable)
    try:
        await readable
    finally:
        loop.remove_reader(fd)
    try:
        return os.read(fd, _READ_BYTES)
    except OSError:
        return b""


async def write_output(fd: int, data: bytes) -> None:
    """Write output, without keeping the event loop from reading keys meanwhile."""

    def write_all() -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]

    await asyncio.to_thread(write_all)
