"""Waiting in the event loop until a file descriptor can be read."""

from __future__ import annotations

import asyncio


async def wait_readable(fd: int, timeout_s: float) -> bool:
    """Wait until a descriptor is readable.

    Returns:
        True if it became readable within `timeout_s` seconds.
    """
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    is_registered = True

    def set_ready() -> None:
        nonlocal is_registered
        is_registered = False
        loop.remove_reader(fd)
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(fd, set_ready)
    try:
        await asyncio.wait_for(ready, timeout_s)
    except asyncio.TimeoutError:
        return False
    finally:
        if is_registered:
            loop.remove_reader(fd)
    return True
