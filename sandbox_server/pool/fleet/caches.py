"""The shared caches of a pool's sandboxes: which there are, and when their time is over.

A cache is its run's, in one sandbox. It goes when the run is released, or has held no lease in the pool for a while; or with its sandbox.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from sandbox_server.pool.fleet.sandbox import Cache, Sandbox
from sandbox_server.pool.leasing.lease_book import LeaseBook
from sandbox_server.store.base import CacheRecord

if TYPE_CHECKING:
    from sandbox_server.pool.fleet.fleet import Fleet

#: How long a run's cache outlasts its last lease, in seconds: as long as a kept slot does.
KEPT_S = 60.0


def use(sandbox: Sandbox, record: CacheRecord) -> bool:
    """A lease is about to share this cache. Returns whether it is new in this sandbox."""
    cache = sandbox.caches.get(record.key)
    if cache is None or cache.dropping:
        # One that is being dropped is gone when the agent hears of this use: it takes requests in order.
        sandbox.caches[record.key] = Cache(record)
        return True
    cache.idle_since = None
    return False


def run_over(sandboxes: Iterable[Sandbox], tenant: str, run_id: str) -> None:
    """The run was released: its caches go as soon as none of its leases holds."""
    for sandbox in sandboxes:
        for cache in sandbox.caches.values():
            if (cache.record.tenant, cache.record.run_id) == (tenant, run_id):
                cache.idle_since = float("-inf")


def drop_idle(fleet: Fleet, book: LeaseBook, now: float) -> None:
    """Have deleted what is over."""
    for sandbox in fleet.sandboxes.values():
        for cache in sandbox.caches.values():
            if _is_used(cache, book):
                cache.idle_since = None
                continue
            if cache.idle_since is None:
                cache.idle_since = now if cache.record.lease_id is None else float("-inf")
            if not cache.dropping and sandbox.reachable and not sandbox.destroying and cache.idle_since + KEPT_S <= now:
                cache.dropping = True
                fleet.supervisors[sandbox.sandbox_id].drop_cache(cache)


def _is_used(cache: Cache, book: LeaseBook) -> bool:
    if cache.record.lease_id is not None:
        return cache.record.lease_id in book.held
    return bool(book.lease_index.of_run(cache.record.tenant, cache.record.run_id))
