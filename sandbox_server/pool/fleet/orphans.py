"""What a backend has of this service's and no record tells of: made in the moment before a crash. It is destroyed, however long that takes."""

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
class Trouble:
    """Why a backend may still have orphans. `is_blind`: it could not even be asked."""

    detail: str
    is_blind: bool


class Orphans:
    """Looks for orphans on each backend until none is left there.

    Args:
        owner: this service, by its state.
        known: the ids of the sandboxes that are on record or in the making, as of now.
        wiring: timers and jitter.
    """

    def __init__(self, owner: str, known: Callable[[], Collection[str]], dependencies: PoolDependencies) -> None:
        #: the backends that may still have some, by name
        self.troubles: dict[str, Trouble] = {}
        self._owner = owner
        self._known = known
        self._dependencies = dependencies
        self._tasks: set[asyncio.Task[None]] = set()

    async def sweep(self, backends: Mapping[str, Backend]) -> None:
        """Look on every backend once; what could not be done then is tried again behind."""
        await asyncio.gather(*(self._first(name, backend) for name, backend in backends.items()))

    async def stop(self) -> None:
        """Try no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _first(self, name: str, backend: Backend) -> None:
        await self._look(name, backend)
        if name in self.troubles:
            task = asyncio.create_task(self._again(name, backend))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _again(self, name: str, backend: Backend) -> None:
        failures = 0
        while name in self.troubles:
            failures += 1
            await self._dependencies.timers.sleep(backoff_s(failures, self._dependencies.jitter))
            await self._look(name, backend)

    async def _look(self, name: str, backend: Backend) -> None:
        known = set(self._known())
        try:
            found = await backend.list_owned(self._owner)
        except (OSError, PoolServiceError) as error:
            self._note(name, Trouble(detail=f"backend {name!r} could not be asked for orphaned sandboxes: {error}", is_blind=True))
            return
        # What this life has made or ended meanwhile is no orphan.
        known.update(self._known())
        problems = await asyncio.gather(*(_destroy(backend, handle) for handle in found if handle.sandbox_id not in known))
        left = [problem for problem in problems if problem is not None]
        count = "an orphaned sandbox" if len(left) == 1 else f"{len(left)} orphaned sandboxes"
        self._note(name, Trouble(detail=f"{count} on backend {name!r} could not be destroyed: {left[0]}", is_blind=False) if left else None)

    def _note(self, name: str, trouble: Trouble | None) -> None:
        before = self.troubles.pop(name, None)
        if trouble is None:
            if before is not None:
                log.info("no orphaned sandboxes are left", extra={"backend": name})
            return
        self.troubles[name] = trouble
        if before != trouble:
            log.error("%s; it is tried again", trouble.detail, extra={"backend": name})


async def _destroy(backend: Backend, handle: Handle) -> str | None:
    """Destroy an orphan; why it is still there, if it is."""
    try:
        await backend.destroy(handle)
    except (OSError, PoolServiceError) as error:
        return f"{handle.sandbox_id}: {error}"
    log.info("an orphaned sandbox was destroyed", extra={"sandbox_id": handle.sandbox_id, "pool_key": handle.pool})
    return None
