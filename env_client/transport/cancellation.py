"""Waiting for what must not be left half done, such as the release of slots, in a task that is being cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

V = TypeVar("V")


async def finish_despite_cancellation(work: Coroutine[Any, Any, V]) -> V:
    """Run a coroutine to its end, however often the waiting task is cancelled meanwhile.

    Args:
        work: the coroutine. It must end by itself within a bounded time.

    Returns:
        What the coroutine returns.

    Raises:
        asyncio.CancelledError: the waiting task was cancelled; the coroutine has ended.
    """
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():  # somebody cancelled the work itself, as `asyncio.run` does at its end
                raise
            cancelled = True
        except BaseException:  # the work has failed: its error is raised below
            break
    if cancelled:
        task.exception()  # an error that comes with a cancellation has nobody to be raised to; asking for it keeps it out of the log
        raise asyncio.CancelledError
    return task.result()
