"""Waiting in the event loop until a file descriptor can be read or written."""

from __future__ import annotations

import asyncio
from typing import Callable


async def wait_readable(fd: int, timeout_s: float) -> bool:
    """Wait until a descriptor is readable.

    Returns:
        True if it became readable within `timeout_s` seconds.
    """
    loop = asyncio.get_running_loop()
    try:
        await asyncio.wait_for(_wait_for_callback(lambda ready: loop.add_reader(fd, ready), lambda: loop.remove_reader(fd)), timeout_s)
    except asyncio.TimeoutError:
        return False
    return True


async def wait_writable(fd: int) -> None:
    """Wait until a descriptor is writable."""
    loop = asyncio.get_running_loop()
    await _wait_for_callback(lambda ready: loop.add_writer(fd, ready), lambda: loop.remove_writer(fd))


async def _wait_for_callback(register: Callable[[Callable[[], None]], None], unregister: Callable[[], object]) -> None:
    ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def set_ready() -> None:
        unregister()
        if not ready.done():
            ready.set_result(None)

    register(set_ready)
    try:
        await ready
    finally:
        unregister()
