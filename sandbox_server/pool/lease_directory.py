"""An index from held leases to their pools, and a stream of the leases that end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, MutableMapping
from typing import Generic, TypeVar
from weakref import WeakSet

AnyPool = TypeVar("AnyPool")


class _EndedLeaseQueue(asyncio.Queue[str]):
    """The ends that one reader has not read yet. Compared by identity, so that it can be kept in a weak set."""


class LeaseDirectory(Generic[AnyPool]):
    """An index from a held lease to its pool, kept where leases begin and end, so that no call has to search every pool."""

    def __init__(self) -> None:
        self._pools: MutableMapping[str, AnyPool] = {}
        self._followers: WeakSet[_EndedLeaseQueue] = WeakSet()

    def add_lease(self, lease_id: str, pool: AnyPool) -> None:
        """Note that a lease of a pool has begun."""
        self._pools[lease_id] = pool

    def remove_lease(self, lease_id: str) -> None:
        """Note that a lease has ended, and pass its id on to everything that iterates over `follow_ended_leases`."""
        self._pools.pop(lease_id, None)
        for queue in self._followers:
            queue.put_nowait(lease_id)

    def pool_of(self, lease_id: str) -> AnyPool | None:
        """The pool of a held lease; None if there is no such lease, or it has ended."""
        return self._pools.get(lease_id)

    def follow_ended_leases(self) -> AsyncIterator[str]:
        """The ids of all leases that end from this call on, in order and without an end."""
        queue = _EndedLeaseQueue()
        self._followers.add(queue)
        return _read_forever(queue)


async def _read_forever(queue: _EndedLeaseQueue) -> AsyncIterator[str]:
    while True:
        yield await queue.get()
