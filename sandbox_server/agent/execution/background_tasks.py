"""Tasks that outlive the function that started them."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Coroutine

log = logging.getLogger(__name__)


class BackgroundTasks:
    """Keeps the background tasks of one slot alive until they end, and logs those that fail.

    Args:
        slot_id: the slot, for the log.
    """

    def __init__(self, slot_id: str) -> None:
        self._slot_id = slot_id
        self._tasks: set[asyncio.Task[None]] = set()

    def start_task(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the background."""
        task = asyncio.get_event_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._forget_task)

    def _forget_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a background task of a slot failed", extra={"slot_id": self._slot_id}, exc_info=task.exception())
