"""The memory of request keys: the same key and body is the same acquire, queued or granted, for an hour."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from sandbox_server.core.clock import Clock, monotonic_at
from sandbox_server.core.errors import CallConflict
from sandbox_server.core.types import Acquired, AcquireRequest, Lease
from sandbox_server.store.base import Deletion, KeyRecord, Store

KEPT_S = 3600.0
MAX_KEYS = 100_000

Name = tuple[str, str]
"""A tenant and its key."""


@dataclass(slots=True, eq=False)
class _Attempt:
    """One acquire under a key. `callers` counts those who still want its answer."""

    request: AcquireRequest
    task: asyncio.Task[Acquired]
    callers: int = 0


class RequestKeys:
    """Remembers what each key was used for.

    Args:
        clock: for the hour.
        store: where what was granted is recorded.
    """

    def __init__(self, clock: Clock, store: Store) -> None:
        self._clock = clock
        self._store = store
        self._attempts: dict[Name, _Attempt] = {}
        self._granted: dict[Name, KeyRecord] = {}
        self._order: deque[tuple[float, Name]] = deque()

    def granted(self, request: AcquireRequest) -> KeyRecord | None:
        """What this request's key was granted before.

        Raises:
            CallConflict: the key was used with another body.
        """
        self.purge()
        name = _name(request)
        record = self._granted.get(name)
        attempt = self._attempts.get(name)
        known = record.request if record is not None else attempt.request if attempt is not None else request
        if known != request:
            raise CallConflict(f"request_key {name[1]!r} was used before with another body")
        return record

    async def join(self, request: AcquireRequest, acquire: Callable[[], Awaitable[Acquired]]) -> Acquired:
        """Acquire under the key, or join who is at it. Whoever is the last to be cancelled takes the attempt along; a failed one is not remembered."""
        name = _name(request)
        attempt = self._attempts.get(name)
        if attempt is None:
            attempt = self._attempts[name] = _Attempt(request, asyncio.create_task(self._run(name, request, acquire)))
            attempt.task.add_done_callback(_mark_seen)
        attempt.callers += 1
        try:
            return await asyncio.shield(attempt.task)
        finally:
            attempt.callers -= 1
            if not attempt.callers and not attempt.task.done():
                attempt.task.cancel()
                # At once, so that a retry that comes before the task has noticed begins anew and does not join a dying one.
                if self._attempts.get(name) is attempt:
                    del self._attempts[name]

    async def _run(self, name: Name, request: AcquireRequest, acquire: Callable[[], Awaitable[Acquired]]) -> Acquired:
        here = asyncio.current_task()
        try:
            acquired = await acquire()
            self._remember(request, acquired)
            return acquired
        finally:
            attempt = self._attempts.get(name)
            if attempt is not None and attempt.task is here:
                del self._attempts[name]

    def _remember(self, request: AcquireRequest, acquired: Acquired) -> None:
        # On record since the moment it was granted, with its leases.
        self.restore([key_record(request, acquired.leases, self._clock.wall())])

    def restore(self, records: Iterable[KeyRecord]) -> None:
        """Remember what is on record already."""
        for record in sorted(records, key=lambda record: record.granted_at):
            name = (record.tenant, record.key)
            self._granted[name] = record
            self._order.append((monotonic_at(self._clock, record.granted_at), name))

    def purge(self) -> None:
        """Forget what was granted more than an hour ago, and the oldest beyond `MAX_KEYS`."""
        now = self._clock.monotonic()
        while self._order and (self._order[0][0] + KEPT_S <= now or len(self._order) > MAX_KEYS):
            name = self._order.popleft()[1]
            del self._granted[name]
            self._store.put(Deletion(key=name))


def _mark_seen(task: asyncio.Task[Acquired]) -> None:
    """Everybody who wanted its answer may have gone, and then its failure is nobody's."""
    if not task.cancelled():
        task.exception()


def key_record(request: AcquireRequest, leases: Iterable[Lease], granted_at: float) -> KeyRecord:
    """What is to be remembered of a request with a key: its leases, and when it was granted them, by the wall clock."""
    tenant, key = _name(request)
    return KeyRecord(tenant=tenant, key=key, request=request, lease_ids=tuple(lease.lease_id for lease in leases), granted_at=granted_at)


def _name(request: AcquireRequest) -> Name:
    assert request.request_key is not None, "only keyed requests are remembered"
    return (request.tenant, request.request_key)
