"""Ending a service's pools as a crash does, while the test process goes on."""

from __future__ import annotations

import asyncio

from sandbox_server.pool.service import PoolService
from sandbox_server.testing import settle


async def kill_pools(pools: PoolService) -> None:
    """End a service's pools as SIGKILL does: nothing is sent to an agent or a client, and nothing is stored."""
    tasks = [*pools._catalog.tasks, *pools._orphans.tasks]
    for pool in pools._pools.values():
        pool._ticker.stop_ticking()
        tasks += [*pool.supervisors.tasks.values(), *pool._grant_service.tasks, *pool.tasks]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await settle()
