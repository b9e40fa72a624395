"""Destroys orphaned sandboxes: a backend has them, but no record names them, because the service was killed while they were created."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from sandbox_server.backends.base import Backend
from sandbox_server.core.errors import PoolServiceError
from sandbox_server.core.types import Handle
from sandbox_server.pool.dependencies import PoolDependencies
from sandbox_server.pool.fleet.plan import backoff_s

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class OrphanProblem:
    """Why a backend may still have orphaned sandboxes.

    Attributes:
        detail: what failed.
        is_unreachable: whether the backend could not be asked for its sandboxes at all.
    """

    detail: str
    is_unreachable: bool


class OrphanCollector:
    """Looks for orphaned sandboxes on each backend, and destroys them, until none is left.

    Args:
        owner: the owner of this service's sandboxes.
        known_sandbox_ids: returns the ids of the sandboxes that are on record or being created now.
        dependencies: timers and jitter.

    Attributes:
        problems: the backends that may still have orphaned sandboxes, by name.
    """

    def __init__(self, owner: str, known_sandbox_ids: Callable[[], Collection[str]], dependencies: PoolDependencies) -> None:
        self.problems: dict[str, OrphanProblem] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self._owner = owner
        self._known_sandbox_ids = known_sandbox_ids
        self._dependencies = dependencies

    async def collect_from(self, backends: Mapping[str, Backend]) -> None:
        """Look on every backend once. Where that fails, go on in the background."""
        await asyncio.gather(*(self._collect_first(name, backend) for name, backend in backends.items()))

    async def stop_collecting(self) -> None:
        """Stop looking."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def _collect_first(self, name: str, backend: Backend) -> None:
        await self._collect(name, backend)
        if name in self.problems:
            task = asyncio.create_task(self._collect_until_done(name, backend))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def _collect_until_done(self, name: str, backend: Backend) -> None:
        failures = 0
        while name in self.problems:
            failures += 1
            await self._dependencies.timers.sleep(backoff_s(failures, self._dependencies.jitter))
            await self._collect(name, backend)

    async def _collect(self, name: str, backend: Backend) -> None:
        known = set(self._known_sandbox_ids())
        try:
            found = await backend.list_owned(self._owner)
        except (OSError, PoolServiceError) as error:
            detail = f"backend {name!r} could not be asked for orphaned sandboxes: {error}"
            self._note_problem(name, OrphanProblem(detail=detail, is_unreachable=True))
            return
        # Sandboxes that were created or destroyed while the backend was asked are no orphans.
        known.update(self._known_sandbox_ids())
        failures = await asyncio.gather(*(_destroy_orphan(backend, handle) for handle in found if handle.sandbox_id not in known))
        left = [failure for failure in failures if failure is not None]
        count = "an orphaned sandbox" if len(left) == 1 else f"{len(left)} orphaned sandboxes"
        detail = f"{count} on backend {name!r} could not be destroyed: {left[0]}" if left else ""
        self._note_problem(name, OrphanProblem(detail=detail, is_unreachable=False) if left else None)

    def _note_problem(self, name: str, problem: OrphanProblem | None) -> None:
        before = self.problems.pop(name, None)
        if problem is None:
            if before is not None:
                log.info("no orphaned sandboxes are left", extra={"backend": name})
            return
        self.problems[name] = problem
        if before != problem:
            log.error("%s; it is tried again", problem.detail, extra={"backend": name})


async def _destroy_orphan(backend: Backend, handle: Handle) -> str | None:
    """Destroy an orphaned sandbox.

    Returns:
        Why it may still exist; None if it is gone.
    """
    try:
        await backend.destroy(handle)
    except (OSError, PoolServiceError) as error:
        return f"{handle.sandbox_id}: {error}"
    log.info("an orphaned sandbox was destroyed", extra={"sandbox_id": handle.sandbox_id, "pool_key": handle.pool})
    return None
