"""The death of a service's pools in a process that lives on."""

from __future__ import annotations

import asyncio

from sandbox_server.pool.service import PoolService
from sandbox_server.testing import settle


async def kill(pools: PoolService) -> None:
    """End a service's pools as SIGKILL does: nothing is told to anybody, nothing is written."""
    tasks = [*pools._catalog.tasks, *pools._orphans.tasks]
    for pool in pools._pools.values():
        pool._ticker.stop()
        tasks += [*pool.supervisors.tasks.values(), *pool._grant_service.tasks, *pool.tasks]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await settle()
