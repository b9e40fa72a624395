"""Cancellation of rollouts: whether a block was cancelled, and what must be finished all the same."""

from __future__ import annotations

import asyncio
import sys
from typing import Protocol, TypeVar

from env_client.transport.cancellation import finish_despite_cancellation

__all__ = ["close_when_started", "finish_despite_cancellation", "was_cancelled"]


class Closable(Protocol):
    """What is closed with a blocking call."""

    def close(self) -> None:
        """Close it."""


C = TypeVar("C", bound=Closable)


def was_cancelled() -> bool:
    """Return whether the block whose `finally` or `except` clause runs was cancelled."""
    return isinstance(sys.exception(), asyncio.CancelledError)


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
