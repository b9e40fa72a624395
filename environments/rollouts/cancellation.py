"""Waiting for what must not be left half done, such as the release of slots, in a task that is being cancelled."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

V = TypeVar("V")


class Closable(Protocol):
    """What is closed with a blocking call."""

    def close(self) -> None:
        """Close it."""


C = TypeVar("C", bound=Closable)


def was_cancelled() -> bool:
    """Return whether the block whose `finally` or `except` clause runs was cancelled."""
    return isinstance(sys.exception(), asyncio.CancelledError)


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


async def close_when_started(start: asyncio.Future[C], start_error: type[Exception]) -> None:
    """Wait for the end of a start in a thread, which nothing can interrupt, and close what was started, in a thread as well.

    Args:
        start: the start.
        start_error: what the start raises if there is nothing to close; whoever asked for the start has got it.
    """
    try:
        started = await start
    except start_error:
        return
    await asyncio.to_thread(started.close)
