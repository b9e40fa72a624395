"""Remembers request keys for an hour: a second request with the same key and the same body gets the result of the first one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from sandbox_server.core.clock import Clock, monotonic_at
from sandbox_server.core.errors import CallConflict, LeaseLost
from sandbox_server.core.types import Acquired, AcquireRequest, Lease
from sandbox_server.store.base import Deletion, KeyRecord, Store

REQUEST_KEY_REMEMBERED_S = 3600.0
MAX_KEYS = 100_000
MAX_RELEASED_KEYS_PER_TENANT = 10_000

TenantKey = tuple[str, str]
"""A tenant, and a `request_key` that it used."""


@dataclass(slots=True, eq=False)
class _Attempt:
    """An acquire with a key that has not finished. `request_count`: how many requests wait for its result."""

    request: AcquireRequest
    task: asyncio.Task[Acquired]
    request_count: int = 0


class ReleasedKeys:
    """The request keys that were released within the hour, at most `MAX_RELEASED_KEYS_PER_TENANT` of each tenant: an acquire with one of them is refused.

    They are kept in memory only. An acquire that is on its way when the service ends does not reach the next one, because its connection ends as well.
    """

    def __init__(self) -> None:
        self._released_at: dict[str, dict[str, float]] = {}

    def add_key(self, tenant_key: TenantKey, now: float) -> None:
        """Remember a key, and forget the tenant's oldest keys beyond the limit of number or of age. `now`: monotonic."""
        tenant, key = tenant_key
        released_at = self._released_at.setdefault(tenant, {})
        released_at.pop(key, None)  # so that the keys stay in the order in which they are forgotten
        released_at[key] = now
        while len(released_at) > MAX_RELEASED_KEYS_PER_TENANT or next(iter(released_at.values())) + REQUEST_KEY_REMEMBERED_S <= now:
            del released_at[next(iter(released_at))]

    def holds(self, tenant_key: TenantKey, now: float) -> bool:
        """Return whether a key was released within the hour. `now`: monotonic."""
        tenant, key = tenant_key
        released_at = self._released_at.get(tenant, {}).get(key)
        return released_at is not None and now < released_at + REQUEST_KEY_REMEMBERED_S


class RequestKeys:
    """The request keys of all tenants.

    Args:
        clock: measures how long keys are remembered.
        store: keeps the records of the keys.
    """

    def __init__(self, clock: Clock, store: Store) -> None:
        self._clock = clock
        self._store = store
        self._attempts: dict[TenantKey, _Attempt] = {}
        self._granted: dict[TenantKey, KeyRecord] = {}
        self._keys_by_age: deque[tuple[float, TenantKey]] = deque()
        self._released = ReleasedKeys()

    def release_key(self, tenant_key: TenantKey) -> tuple[str, ...]:
        """Refuse every acquire with a key from now on.

        Returns:
            The ids of the leases that were granted and delivered under the key. An acquire that has not finished is not ended here.
        """
        self.purge()
        self._released.add_key(tenant_key, self._clock.monotonic())
        record = self._granted.get(tenant_key)
        return () if record is None else record.lease_ids

    def check_not_released(self, request: AcquireRequest) -> None:
        """Check that the key of a request, if it has one, was not released.

        Raises:
            LeaseLost: it was released within the hour.
        """
        if request.request_key is not None and self._released.holds(_tenant_key(request), self._clock.monotonic()):
            raise released_key_error(request.request_key)

    def granted(self, request: AcquireRequest) -> KeyRecord | None:
        """Return the leases that were granted before to a request with the same key; None if none were.

        Raises:
            CallConflict: the key was used with another body.
        """
        self.purge()
        tenant_key = _tenant_key(request)
        record = self._granted.get(tenant_key)
        attempt = self._attempts.get(tenant_key)
        known = record.request if record is not None else attempt.request if attempt is not None else request
        if known != request:
            raise CallConflict(f"request_key {tenant_key[1]!r} was used before with another body")
        return record

    async def join(self, request: AcquireRequest, acquire: Callable[[], Awaitable[Acquired]]) -> Acquired:
        """Start the acquire of a request with a key, or wait for the one that another request with the key has started.

        The acquire is cancelled when the last request that waits for it is cancelled. A failed acquire is not remembered, so the key can be used again.

        Args:
            request: the acquire; it must have a key.
            acquire: carries it out.

        Returns:
            What was granted.

        Raises:
            PoolServiceError: the acquire failed.
        """
        tenant_key = _tenant_key(request)
        attempt = self._attempts.get(tenant_key)
        if attempt is None:
            attempt = self._attempts[tenant_key] = _Attempt(request, asyncio.create_task(self._acquire_and_remember(tenant_key, request, acquire)))
            attempt.task.add_done_callback(_retrieve_exception)
        attempt.request_count += 1
        try:
            return await asyncio.shield(attempt.task)
        finally:
            attempt.request_count -= 1
            if not attempt.request_count and not attempt.task.done():
                attempt.task.cancel()
                # The attempt is removed here and not when its task ends: a retry that comes in between must start a new one.
                if self._attempts.get(tenant_key) is attempt:
                    del self._attempts[tenant_key]

    async def _acquire_and_remember(self, tenant_key: TenantKey, request: AcquireRequest, acquire: Callable[[], Awaitable[Acquired]]) -> Acquired:
        this_task = asyncio.current_task()
        try:
            acquired = await acquire()
            # The record was put into the store together with the leases, when they were granted.
            self.remember_keys([key_record(request, acquired.leases, self._clock.wall())])
            return acquired
        finally:
            attempt = self._attempts.get(tenant_key)
            if attempt is not None and attempt.task is this_task:
                del self._attempts[tenant_key]

    def remember_keys(self, records: Iterable[KeyRecord]) -> None:
        """Remember keys whose records are in the store already."""
        for record in sorted(records, key=lambda record: record.granted_at):
            tenant_key = (record.tenant, record.key)
            self._granted[tenant_key] = record
            self._keys_by_age.append((monotonic_at(self._clock, record.granted_at), tenant_key))

    def purge(self) -> None:
        """Forget the keys whose leases were granted more than an hour ago, and the oldest beyond `MAX_KEYS`."""
        now = self._clock.monotonic()
        while self._keys_by_age and (self._keys_by_age[0][0] + REQUEST_KEY_REMEMBERED_S <= now or len(self._keys_by_age) > MAX_KEYS):
            tenant_key = self._keys_by_age.popleft()[1]
            del self._granted[tenant_key]
            self._store.put(Deletion(key=tenant_key))


def _retrieve_exception(task: asyncio.Task[Acquired]) -> None:
    """Retrieve the exception of a task, which asyncio would otherwise log as never retrieved if every request that waited was cancelled."""
    if not task.cancelled():
        task.exception()


def released_key_error(request_key: str) -> LeaseLost:
    """Return the error for an acquire whose `request_key` was released before it was granted, or while it was."""
    return LeaseLost(f"request_key {request_key!r} was released, so nothing is leased under it: acquire with another request_key")


def key_record(request: AcquireRequest, leases: Iterable[Lease], granted_at: float) -> KeyRecord:
    """Return the record of a request with a key.

    Args:
        request: the acquire; it must have a key.
        leases: the leases that it was granted.
        granted_at: when they were granted, wall-clock time in Unix seconds.
    """
    tenant, key = _tenant_key(request)
    return KeyRecord(tenant=tenant, key=key, request=request, lease_ids=tuple(lease.lease_id for lease in leases), granted_at=granted_at)


def _tenant_key(request: AcquireRequest) -> TenantKey:
    assert request.request_key is not None, "only requests with a key are remembered"
    return (request.tenant, request.request_key)
