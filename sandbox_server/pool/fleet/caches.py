"""The shared caches of a pool's sandboxes: which ones exist, and when they are deleted.

A cache belongs to one run, in one sandbox. It is deleted when the run is released, when the run has held no lease in the pool for a while, or with
its sandbox.
"""

from __future__ import annotations

from collections.abc import Iterable

from sandbox_server.pool.fleet.effects import DropCache
from sandbox_server.pool.fleet.sandbox import Cache, Sandbox
from sandbox_server.pool.leasing.lease_book import LeaseBook
from sandbox_server.store.base import CacheRecord

#: How long a cache is kept after its run's last lease has ended, in seconds: as long as a kept slot.
KEPT_CACHE_LIMIT_S = 60.0


def use_cache(sandbox: Sandbox, record: CacheRecord) -> bool:
    """Note that a lease is about to use a cache.

    Args:
        sandbox: the sandbox of the lease's slot.
        record: the cache.

    Returns:
        Whether the cache is new in this sandbox, so that the sandbox's record has to be written.
    """
    cache = sandbox.caches.get(record.key)
    if cache is None or cache.dropping:
        # The agent handles requests in order: a cache that is being deleted is gone before the agent learns of this use.
        sandbox.caches[record.key] = Cache(record)
        return True
    cache.idle_since = None
    return False


def end_caches_of_run(sandboxes: Iterable[Sandbox], tenant: str, run_id: str) -> None:
    """Let the caches of a released run be deleted as soon as none of its leases is held."""
    for sandbox in sandboxes:
        for cache in sandbox.caches.values():
            if (cache.record.tenant, cache.record.run_id) == (tenant, run_id):
                cache.idle_since = float("-inf")


def choose_caches_to_drop(sandboxes: Iterable[Sandbox], book: LeaseBook, now: float) -> list[DropCache]:
    """Choose the caches whose time is over, and note that they are being deleted.

    Args:
        sandboxes: the pool's sandboxes.
        book: the pool's leases.
        now: the monotonic time.
    """
    chosen = []
    for sandbox in sandboxes:
        for cache in sandbox.caches.values():
            if _is_used(cache, book):
                cache.idle_since = None
                continue
            if cache.idle_since is None:
                cache.idle_since = now if cache.record.lease_id is None else float("-inf")
            if not cache.dropping and sandbox.reachable and not sandbox.destroying and cache.idle_since + KEPT_CACHE_LIMIT_S <= now:
                cache.dropping = True
                chosen.append(DropCache(sandbox_id=sandbox.sandbox_id, cache=cache))
    return chosen


def _is_used(cache: Cache, book: LeaseBook) -> bool:
    if cache.record.lease_id is not None:
        return cache.record.lease_id in book.held
    return bool(book.lease_index.of_run(cache.record.tenant, cache.record.run_id))
