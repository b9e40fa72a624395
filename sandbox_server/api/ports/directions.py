"""Two directions of one connection, each in a task of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine


async def run_until_first_ends(main: Coroutine[None, None, None], beside: Coroutine[None, None, None]) -> None:
    """Run two coroutines until the first has ended, or the second has failed. What still runs then is cancelled and has ended when this returns.

    Args:
        main: the coroutine with whose end all is done.
        beside: the other one. Its end alone ends nothing.

    Raises:
        Exception: what one of them has raised.
    """
    tasks = [asyncio.create_task(main), asyncio.create_task(beside)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            await tasks[1]
            await tasks[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled():
                task.exception()  # retrieved here, because asyncio logs an exception that is never retrieved, and only one of two can be raised
    await tasks[0]
