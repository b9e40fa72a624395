"""Waiting for what must not be left half done, such as the release of slots, in a task that is being cancelled."""

from __future__ import annotations

import asyncio
import sys

from env_client.transport.cancellation import finish_despite_cancellation

__all__ = ["finish_despite_cancellation", "was_cancelled"]


def was_cancelled() -> bool:
    """Return whether the block whose `finally` or `except` clause runs was cancelled."""
    return isinstance(sys.exception(), asyncio.CancelledError)
