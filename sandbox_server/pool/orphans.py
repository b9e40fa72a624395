"""What a backend has of this service's and no record tells of: made in the moment before a crash. It is destroyed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection

from sandbox_server.backends.base import Backend
from sandbox_server.core.types import Handle

log = logging.getLogger(__name__)


async def sweep(backend: Backend, owner: str, known: Collection[str]) -> None:
    """Destroy what this owner has there and is not known.

    Args:
        backend: where to look.
        owner: this service, by its state.
        known: the sandbox ids on record.
    """
    try:
        orphans = [handle for handle in await backend.list_owned(owner) if handle.sandbox_id not in known]
    except OSError as error:
        log.error("orphaned sandboxes could not be looked for: %s", error, extra={"backend": backend.name})
        return
    await asyncio.gather(*(_destroy(backend, handle) for handle in orphans))


async def _destroy(backend: Backend, handle: Handle) -> None:
    fields = {"sandbox_id": handle.sandbox_id, "pool": handle.pool}
    try:
        await backend.destroy(handle)
    except OSError as error:
        log.error("an orphaned sandbox could not be destroyed: %s", error, extra=fields)
    else:
        log.info("an orphaned sandbox was destroyed", extra=fields)
