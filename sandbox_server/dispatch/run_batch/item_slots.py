"""Leases the slots of items."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from sandbox_server.core.clock import Clock
from sandbox_server.core.errors import BackendUnavailable, NoCapacity, QuotaExceeded, StorageUnavailable
from sandbox_server.core.types import Acquired, AcquireRequest, PoolView
from sandbox_server.pool.access import Actor

ACQUIRE_PAUSE_S = 1.0
"""A refused acquire is repeated so many seconds after it was sent at the earliest."""
UNAVAILABLE_S = 60.0
"""How long acquires are repeated while the pool's backend or the store is unavailable, once an item has begun."""


class LeasePools(Protocol):
    """What a run-batch needs of the pools. `pool.service.PoolService` implements it."""

    async def acquire(self, request: AcquireRequest) -> Acquired: ...

    def release(
        self, tenant: str, lease_ids: Sequence[str] | None = None, run_id: str | None = None, reset_workspace: bool = True
    ) -> tuple[Sequence[str], Sequence[str]]: ...

    def view(self, name: str, *, actor: Actor, tenant: str | None = None) -> PoolView: ...


async def acquire_slot(pools: LeasePools, clock: Clock, request: AcquireRequest, has_begun: Callable[[], bool]) -> str:
    """Acquire a slot for an item, however long that takes.

    It waits at the end of the queue of its tenant: whoever waited before, such as a gang, is served first.

    Args:
        pools: leases slots.
        clock: measures how long the pool has been unavailable.
        request: the acquire.
        has_begun: whether the run-batch has begun, so that its client cannot be told any more that it failed as a whole.

    Returns:
        The id of the lease.

    Raises:
        BackendUnavailable, StorageUnavailable: the run-batch has not begun, or they have lasted for `UNAVAILABLE_S`.
        PoolServiceError: the pool cannot give a slot at all.
    """
    unavailable_since: float | None = None
    while True:
        sent_at = clock.monotonic()
        try:
            return (await pools.acquire(request)).leases[0].lease_id
        except (NoCapacity, QuotaExceeded):
            unavailable_since = None
        except (BackendUnavailable, StorageUnavailable):
            unavailable_since = sent_at if unavailable_since is None else unavailable_since
            if not has_begun() or clock.monotonic() - unavailable_since >= UNAVAILABLE_S:
                raise
        await asyncio.sleep(max(0.0, sent_at + ACQUIRE_PAUSE_S - clock.monotonic()))
