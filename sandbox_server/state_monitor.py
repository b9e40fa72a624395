"""Checks the state folder and the store every second while the service is running."""

from __future__ import annotations

import asyncio
import logging

from sandbox_server.state_dir import StateDir
from sandbox_server.store.base import Store

log = logging.getLogger(__name__)

CHECK_INTERVAL_S = 1.0


class StateMonitor:
    """Notices when the lock file, the state folder or the state file is deleted, moved or replaced, and repairs what can be repaired.

    Args:
        state_dir: the state folder.
        store: the store in it.
    """

    def __init__(self, state_dir: StateDir, store: Store) -> None:
        self._state_dir = state_dir
        self._store = store
        self._lock_problem: str | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def problem(self) -> str | None:
        """One sentence that says why the service must not accept new work, and what to do about it; None if all is well."""
        return self._lock_problem or self._store.problem

    def start_checks(self) -> None:
        """Start the checks in a task."""
        self._task = asyncio.create_task(self._check_periodically())

    async def stop_checks(self) -> None:
        """Stop the checks."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _check_periodically(self) -> None:
        while True:
            try:
                self._lock_problem = self._state_dir.check_lock()
                self._state_dir.retry_server_file()
                await self._store.check_storage()
            except Exception:  # the edge of the loop: a check that fails must not end the checks
                log.exception("the state folder could not be checked")
            await asyncio.sleep(CHECK_INTERVAL_S)
