"""Grants or refuses waiting acquires. Slots are prepared before the response, and released if the client has disconnected."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sandbox_server.core.cleanup import cleanup_on_failure
from sandbox_server.core.errors import BackendUnavailable, InvalidRequest, NoCapacity, PoolNotFound, PoolServiceError, QuotaExceeded
from sandbox_server.core.types import Acquired, AcquireRequest, Lease, PoolSpec
from sandbox_server.link import LinkLost
from sandbox_server.link.errors import NotSupportedByAgent, RequestInvalid
from sandbox_server.pool.dependencies import PoolDependencies
from sandbox_server.pool.fleet.caches import use_cache
from sandbox_server.pool.fleet.effects import AnnounceLeaseBegin, AnnounceLeaseEnd, Effect
from sandbox_server.pool.fleet.fleet import Fleet
from sandbox_server.pool.fleet.observed import Observed
from sandbox_server.pool.granting.overdue import explain_overdue
from sandbox_server.pool.granting.slot_rights import prepare_slot_of
from sandbox_server.pool.granting.undelivered import UndeliveredAcquires
from sandbox_server.pool.inbox import InboxWriter
from sandbox_server.pool.leasing import rights
from sandbox_server.pool.leasing.lease_book import LeaseBook
from sandbox_server.pool.leasing.request_keys import TenantKey, key_record, released_key_error
from sandbox_server.pool.leasing.wait_queue import Waiter
from sandbox_server.store.base import Deletion


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparationEnded:
    """The slots of a waiter's leases have been prepared, or could not be.

    Attributes:
        waiter: the acquire that was granted the leases.
        errors: what went wrong; empty if all slots are prepared.
    """

    waiter: Waiter
    errors: Sequence[BaseException]


@dataclass(frozen=True, slots=True)
class AcquireAbandoned:
    """The client of an acquire has disconnected, or the leases could not be written to the store."""

    waiter: Waiter


PoolValue = Observed | PreparationEnded | AcquireAbandoned
"""What a pool's inbox takes."""


class GrantService:
    """Grants or refuses the acquires of one pool.

    Args:
        book: the pool's lease book.
        fleet: the pool's sandboxes.
        spec: the pool's spec.
        inbox: takes the ends of preparations and the acquires that are abandoned.
        dependencies: clock, store and metrics.

    Attributes:
        spec: the pool's spec; see `change_spec`.
        tasks: the preparations that are under way.
    """

    def __init__(self, book: LeaseBook, fleet: Fleet, spec: PoolSpec, inbox: InboxWriter[PoolValue], dependencies: PoolDependencies) -> None:
        self.spec = spec
        self.tasks: set[asyncio.Task[None]] = set()
        self._book = book
        self._fleet = fleet
        self._inbox = inbox
        self._dependencies = dependencies
        self._outcomes: dict[int, asyncio.Future[None]] = {}
        self._undelivered = UndeliveredAcquires()
        #: the sequence numbers of waiters whose slots are being prepared, and of those among them that are given up
        self._preparing: set[int] = set()
        self._abandoned: set[int] = set()

    def refuse_impossible(self, request: AcquireRequest) -> None:
        """Refuse an acquire that the pool could not serve however long it waited, or that it cannot let wait.

        Raises:
            InvalidRequest: the pool can never serve the request.
            NotImplementedHere: the request asks for rights that the pool's isolation mode cannot give.
            QuotaExceeded: too many acquires are waiting already.
            BackendUnavailable: no sandbox can be created, and the pool has too few slots to serve the request.
        """
        if request.count > self.spec.max_slots:
            raise InvalidRequest(f"count is {request.count}, and pool {request.pool!r} can never hold more than {self.spec.max_slots} slots", field="count")
        report = self._fleet.last_report
        rights.check_possible(request, self.spec, report.capabilities if report is not None else {})
        most = self._dependencies.limits.max_waiters
        if len(self._book.queue) >= most:
            full = f"{most} acquires wait for pool {request.pool!r} already, and `limits.waiters` is {most}"
            raise QuotaExceeded(f"{full}: ask again later", limit="waiters", retry_after_s=5)
        # Once it is time for another attempt to create a sandbox, acquires wait for its outcome.
        has_permanent_error = self._fleet.permanent_error is not None and self._dependencies.clock.monotonic() < self._fleet.retry_at
        if has_permanent_error and request.count > self._book.table.usable():
            raise self._permanent_error()

    def grant_or_prepare(self, served: Sequence[Waiter]) -> list[Effect]:
        """Grant the leases of the waiters that the book has given slots, or begin to prepare their slots first."""
        for waiter in served:
            if rights.needs_preparing(waiter.request, self.spec):
                self._preparing.add(waiter.seq)
                task = asyncio.create_task(self._prepare_slots(waiter))
                self.tasks.add(task)
                task.add_done_callback(self.tasks.discard)
            else:
                self._grant(waiter)
        return [AnnounceLeaseBegin(lease) for waiter in served for lease in waiter.leases]

    def _grant(self, waiter: Waiter) -> None:
        # The leases and what their request key was granted go to disk in one commit: never one without the other.
        if waiter.request.request_key is not None:
            self._dependencies.store.put(key_record(waiter.request, waiter.leases, self._dependencies.clock.wall()))
        self._end_wait(waiter, None)

    def refuse_waiter(self, waiter: Waiter, error: PoolServiceError) -> None:
        """Take a waiter out of the queue and refuse it with an error."""
        self._book.remove_waiter(waiter)
        self._end_wait(waiter, error)

    def refuse_all_waiters(self, make_error: Callable[[], PoolServiceError]) -> None:
        """Take all waiters out of the queue and refuse each with an error.

        Args:
            make_error: makes one error. Each waiter gets its own, because raising an error adds to its traceback.
        """
        for waiter in self._book.queue.all():
            self.refuse_waiter(waiter, make_error())

    def refuse_unservable_waiters(self) -> None:
        """Refuse every acquire that could only be served by a sandbox which cannot be created."""
        for waiter in self._book.queue.all():
            if waiter.request.count > self._book.table.usable():
                self.refuse_waiter(waiter, self._permanent_error())

    def _permanent_error(self) -> PoolServiceError:
        return BackendUnavailable(f"pool {self._fleet.pool_id.name!r} cannot make sandboxes: {self._fleet.permanent_error}")

    def refuse_overdue_waiters(self) -> bool:
        """Refuse every acquire that has waited as long as it may.

        Returns:
            Whether there was one.
        """
        overdue = explain_overdue(self._fleet.pool_id.name, self.spec, self._book, self._fleet, self._dependencies.clock.monotonic())
        for waiter, error in overdue:
            self.refuse_waiter(waiter, error)
        return bool(overdue)

    def change_spec(self, spec: PoolSpec, *, is_shared: bool) -> None:
        """Replace the pool's spec, and refuse every acquire that the pool may not or cannot serve any more.

        Args:
            spec: the new spec.
            is_shared: whether every tenant may use the pool from now on.
        """
        self.spec = spec
        pool_id = self._fleet.pool_id
        for waiter in self._book.queue.all():
            if not is_shared and waiter.request.tenant != pool_id.tenant:
                self.refuse_waiter(waiter, PoolNotFound(f"pool {pool_id.name!r} is no longer shared with this tenant"))
            elif waiter.request.count > spec.max_slots:
                detail = f"count is {waiter.request.count}, and pool {pool_id.name!r} can no longer hold more than {spec.max_slots} slots"
                self.refuse_waiter(waiter, InvalidRequest(detail, field="count"))

    def _end_wait(self, waiter: Waiter, error: PoolServiceError | None) -> None:
        if error is None and waiter.seq not in self._outcomes:
            return  # served in the same step that queued it: `wait_for_leases` finds the leases
        future = self._outcome_of(waiter)
        if not future.done():
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

    def _outcome_of(self, waiter: Waiter) -> asyncio.Future[None]:
        future = self._outcomes.get(waiter.seq)
        if future is None:
            future = self._outcomes[waiter.seq] = asyncio.get_running_loop().create_future()
        return future

    async def wait_for_leases(self, waiter: Waiter) -> Acquired:
        """Wait until a queued waiter is granted its leases, and they are on disk.

        Raises:
            PoolServiceError: the error that the waiter was refused with.
            LeaseLost: its request key was released.
        """
        self._undelivered.add_waiter(waiter)
        try:
            with cleanup_on_failure(lambda: self._inbox.put(AcquireAbandoned(waiter))):
                if not waiter.leases or waiter.seq in self._preparing or waiter.seq in self._outcomes:
                    await self._outcome_of(waiter)
                await self._dependencies.store.flush()
                if not waiter.leases:
                    raise released_key_error(waiter.request.request_key or "")
        finally:
            self._outcomes.pop(waiter.seq, None)
        self._undelivered.remove_waiter(waiter)
        waited_s = self._dependencies.clock.monotonic() - waiter.arrived
        self._dependencies.meter.observe("sandbox_acquire_seconds", waited_s, **self._fleet.pool_id.labels)
        return Acquired(leases=waiter.leases, waited_s=waited_s)

    def give_back(self, waiter: Waiter) -> list[Effect]:
        """Remove a waiter whose client has disconnected from the queue, and release its leases: those whose slots are being prepared after the preparation."""
        self._book.remove_waiter(waiter)
        if waiter.seq in self._preparing:
            self._abandoned.add(waiter.seq)
            return []
        self._undelivered.remove_waiter(waiter)
        if waiter.leases and waiter.request.request_key is not None:
            self._dependencies.store.put(Deletion(key=(waiter.request.tenant, waiter.request.request_key)))
        return self._release_leases(waiter.leases, "the client of the acquire did not receive the response")

    def release_request_key(self, tenant_key: TenantKey) -> list[Effect] | None:
        """Refuse the acquires with a request key whose response has not been sent, and release at once what they were granted.

        Returns:
            What is to be carried out; None if there is no such acquire.
        """
        waiters = self._undelivered.take_waiters(tenant_key)
        if not waiters:
            return None
        effects: list[Effect] = []
        for waiter in waiters:
            self._book.remove_waiter(waiter)
            if waiter.seq in self._preparing:
                self._abandoned.add(waiter.seq)
            elif waiter.leases:
                self._dependencies.store.put(Deletion(key=tenant_key))
            effects += self._release_leases(waiter.leases, "the request_key of its acquire was released")
            waiter.leases = ()
            if waiter.seq in self._outcomes:
                self._end_wait(waiter, released_key_error(tenant_key[1]))
        return effects

    def _release_leases(self, leases: Sequence[Lease], detail: str) -> list[Effect]:
        return [AnnounceLeaseEnd(self._book.release_lease(lease.lease_id, detail=detail)) for lease in leases if lease.lease_id in self._book.held]

    def finish_preparation(self, ended: PreparationEnded) -> list[Effect]:
        """Grant the leases of a waiter whose slots are prepared. If they could not be, release the leases, and let it wait again or refuse it."""
        waiter, errors, leases = ended.waiter, ended.errors, ended.waiter.leases
        self._preparing.discard(waiter.seq)
        if waiter.seq in self._abandoned:
            self._abandoned.discard(waiter.seq)
            return self.give_back(waiter)
        if not errors and all(lease.lease_id in self._book.held for lease in leases):
            self._grant(waiter)
            return []
        waiter.leases = ()
        effects = self._release_leases(leases, "its slot could not be prepared")
        unable = next((error for error in errors if isinstance(error, NotSupportedByAgent | RequestInvalid)), None)
        unrecorded = next((error for error in errors if isinstance(error, PoolServiceError)), None)
        if unable is not None:
            self._end_wait(waiter, rights.rights_not_supported(leases[0], unable.detail))
        elif unrecorded is not None:
            self._end_wait(waiter, unrecorded)
        elif waiter.seq in self._outcomes:
            self._wait_again(waiter)
        return effects

    def _wait_again(self, waiter: Waiter) -> None:
        if self._dependencies.clock.monotonic() >= waiter.deadline:
            waited_s = round(waiter.deadline - waiter.arrived, 3)
            self._end_wait(waiter, NoCapacity("no slot could be prepared in time: ask again", queue_position=1, waited_s=waited_s))
        else:
            self._book.requeue_waiter(waiter)

    async def _prepare_slots(self, waiter: Waiter) -> None:
        results = await asyncio.gather(*(self._prepare_slot(lease) for lease in waiter.leases), return_exceptions=True)
        self._inbox.put(PreparationEnded(waiter=waiter, errors=[result for result in results if result is not None]))

    async def _prepare_slot(self, lease: Lease) -> None:
        sandbox = self._fleet.sandboxes.get(lease.sandbox_id)
        if sandbox is not None and lease.cache != rights.NO_CACHE and use_cache(sandbox, rights.cache_of(lease)):
            self._dependencies.store.put(sandbox.record(self._dependencies.clock))
            # The cache's record is on disk before the cache exists, so that there is never a cache without a record.
            await self._dependencies.store.flush()
        if sandbox is None or sandbox.agent is None:
            raise LinkLost("the link was lost before the slot was prepared")
        await prepare_slot_of(sandbox.agent, lease)
