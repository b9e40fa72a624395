"""Looks after the state folder and the state file while the service runs, every second."""

from __future__ import annotations

import asyncio
import logging

from sandbox_server.state_dir import StateDir
from sandbox_server.store.base import Store

log = logging.getLogger(__name__)

EVERY_S = 1.0


class StateMonitor:
    """Finds out when somebody deletes, moves or replaces what the service keeps on its disk.

    Args:
        state_dir: the folder.
        store: the state file.
    """

    def __init__(self, state_dir: StateDir, store: Store) -> None:
        self._state_dir = state_dir
        self._store = store
        self._lock_trouble: str | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def problem(self) -> str | None:
        """Why nothing new should be begun, and what to do; None: it can."""
        return self._lock_trouble or self._store.problem

    def start(self) -> None:
        """Begin to look."""
        self._task = asyncio.create_task(self._look_for_ever())

    async def stop(self) -> None:
        """Look no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _look_for_ever(self) -> None:
        while True:
            try:
                self._lock_trouble = self._state_dir.check_lock()
                self._state_dir.retry_server_file()
                await self._store.check_storage()
            except Exception:  # the edge of the loop: one bad look must not be the last
                log.exception("the state folder could not be looked after")
            await asyncio.sleep(EVERY_S)
