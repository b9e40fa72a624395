"""From a place in the line to an answer: waking who is served, preparing slots before the grant counts, giving back what nobody took."""

from __future__ import annotations

import asyncio
from typing import Protocol

from sandbox_server.core.errors import InvalidRequest, NoCapacity, PoolServiceError, QuotaExceeded
from sandbox_server.core.types import Acquired, AcquireRequest, Lease, PoolId, PoolSpec
from sandbox_server.link import LinkLost
from sandbox_server.link.errors import NotSupportedByAgent, RequestInvalid
from sandbox_server.pool.dependencies import PoolDependencies
from sandbox_server.pool.fleet.fleet import Fleet
from sandbox_server.pool.fleet.sandbox import Sandbox
from sandbox_server.pool.leasing import rights
from sandbox_server.pool.leasing.lease_book import LeaseBook
from sandbox_server.pool.leasing.request_keys import key_record
from sandbox_server.pool.leasing.wait_queue import Waiter
from sandbox_server.pool.slot_rights import prepare_slot_of
from sandbox_server.store.base import CacheRecord, Deletion


class GrantListener(Protocol):
    """Who is told of grants: their pool."""

    pool_id: PoolId

    def work(self) -> None:
        """Go on after something was given back."""

    def lease_begins(self, lease: Lease) -> None:
        """A slot has been assigned."""

    def lease_over(self, lease: Lease) -> None:
        """A lease has ended."""

    def cache_used(self, sandbox: Sandbox, record: CacheRecord) -> bool:
        """A lease is about to share this cache. Returns whether it is new in this sandbox."""
        ...


class GrantService:
    """Answers the acquires of one pool.

    Args:
        book: the pool's lease book.
        fleet: the pool's sandboxes.
        spec: the pool's spec.
        pool: is told of leases that begin and end, and goes on after something was given back.
        wiring: clock and store.
    """

    def __init__(self, book: LeaseBook, fleet: Fleet, spec: PoolSpec, pool: GrantListener, dependencies: PoolDependencies) -> None:
        self.spec = spec
        self.tasks: set[asyncio.Task[None]] = set()
        self._book = book
        self._fleet = fleet
        self._pool = pool
        self._dependencies = dependencies
        self._answers: dict[int, asyncio.Future[None]] = {}
        #: waiters whose slots are being changed for them, and those of them whose caller has gone
        self._preparing: set[int] = set()
        self._unwanted: set[int] = set()

    def refuse_impossible(self, request: AcquireRequest) -> None:
        """Refuse at once what waiting cannot help.

        Raises:
            InvalidRequest: the pool can never serve it.
            NotImplementedHere: it asks for what the pool's isolation mode cannot give.
            QuotaExceeded: too many wait already.
        """
        if request.count > self.spec.max_slots:
            raise InvalidRequest(f"count is {request.count}, and pool {request.pool!r} can never hold more than {self.spec.max_slots} slots", field="count")
        shown = self._fleet.shown
        rights.check_possible(request, self.spec, shown.capabilities if shown is not None else {})
        most = self._dependencies.limits.max_waiters
        if len(self._book.queue) >= most:
            full = f"{most} acquires wait for pool {request.pool!r} already, and `limits.waiters` is {most}"
            raise QuotaExceeded(f"{full}: ask again later", limit="waiters", retry_after_s=5)

    def serve(self, served: list[Waiter]) -> None:
        """Answer those whom the book has given slots."""
        for waiter in served:
            for lease in waiter.leases:
                self._pool.lease_begins(lease)
            if rights.needs_preparing(waiter.request, self.spec):
                self._preparing.add(waiter.seq)
                task = asyncio.create_task(self._prepare_first(waiter))
                self.tasks.add(task)
                task.add_done_callback(self.tasks.discard)
            else:
                self._granted(waiter)

    def _granted(self, waiter: Waiter) -> None:
        """What a request key was granted goes on record in one commit with the leases: never one without the other."""
        if waiter.request.request_key is not None:
            self._dependencies.store.put(key_record(waiter.request, waiter.leases, self._dependencies.clock.wall()))
        self._answer(waiter, None)

    def refuse(self, waiter: Waiter, error: PoolServiceError) -> None:
        """It waits no more, and this is why."""
        self._book.remove_waiter(waiter)
        self._answer(waiter, error)

    def _answer(self, waiter: Waiter, error: PoolServiceError | None) -> None:
        future = self._answers.get(waiter.seq)
        if future is None:
            if error is None:
                return  # served in the very step that queued it: `answer` finds the leases
            future = self._answers[waiter.seq] = asyncio.get_running_loop().create_future()
        if not future.done():
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

    async def answer(self, waiter: Waiter) -> Acquired:
        """Wait for what becomes of a queued waiter.

        Raises:
            PoolServiceError: what it was refused with.
        """
        try:
            if not waiter.leases or waiter.seq in self._preparing or waiter.seq in self._answers:
                future = self._answers.get(waiter.seq)
                if future is None:
                    future = self._answers[waiter.seq] = asyncio.get_running_loop().create_future()
                await future
            await self._dependencies.store.flush()
        except BaseException:
            self.give_back(waiter)
            raise
        finally:
            self._answers.pop(waiter.seq, None)
        waited_s = self._dependencies.clock.monotonic() - waiter.arrived
        self._dependencies.meter.observe("sandbox_acquire_seconds", waited_s, **self._pool.pool_id.labels)
        return Acquired(leases=waiter.leases, waited_s=waited_s)

    def give_back(self, waiter: Waiter) -> None:
        """Nobody takes the answer: leave the line, and release what was granted; a slot that is being prepared only once it is."""
        self._book.remove_waiter(waiter)
        if waiter.seq in self._preparing:
            self._unwanted.add(waiter.seq)
            return
        if waiter.leases and waiter.request.request_key is not None:
            self._dependencies.store.put(Deletion(key=(waiter.request.tenant, waiter.request.request_key)))
        self.release_all(waiter.leases, "nobody took the answer to the acquire")

    def release_all(self, leases: tuple[Lease, ...], detail: str) -> None:
        """Release those of these leases that are still held."""
        for lease in leases:
            if lease.lease_id in self._book.held:
                self._pool.lease_over(self._book.release_lease(lease.lease_id, detail=detail))
        self._pool.work()

    async def _prepare_first(self, waiter: Waiter) -> None:
        leases = waiter.leases
        results = await asyncio.gather(*(self._prepare(lease) for lease in leases), return_exceptions=True)
        self._preparing.discard(waiter.seq)
        errors = [error for error in results if isinstance(error, BaseException)]
        if waiter.seq in self._unwanted:
            self._unwanted.discard(waiter.seq)
            self.give_back(waiter)
            return
        if not errors and all(lease.lease_id in self._book.held for lease in leases):
            self._granted(waiter)
            return
        waiter.leases = ()
        self.release_all(leases, "its slot could not be prepared")
        unable = next((e for e in errors if isinstance(e, NotSupportedByAgent | RequestInvalid)), None)
        unrecorded = next((e for e in errors if isinstance(e, PoolServiceError)), None)
        if unable is not None:
            self._answer(waiter, rights.rights_not_supported(leases[0], unable.detail))
        elif unrecorded is not None:
            self._answer(waiter, unrecorded)
        elif waiter.seq not in self._answers:
            return  # nobody waits for it any more
        elif self._dependencies.clock.monotonic() >= waiter.deadline:
            waited_s = round(waiter.deadline - waiter.arrived, 3)
            self._answer(waiter, NoCapacity("no slot could be prepared in time: ask again", queue_position=1, waited_s=waited_s))
        else:
            self._book.requeue_waiter(waiter)
            self._pool.work()

    async def _prepare(self, lease: Lease) -> None:
        sandbox = self._fleet.sandboxes[lease.sandbox_id]
        if lease.cache != rights.NO_CACHE and self._pool.cache_used(sandbox, rights.cache_of(lease)):
            # On record before it is there, so that it is never there and unknown.
            await self._dependencies.store.flush()
        if sandbox.agent is None:
            raise LinkLost("the link went before the slot was prepared")
        await prepare_slot_of(sandbox.agent, lease)
