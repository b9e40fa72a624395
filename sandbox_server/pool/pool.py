"""One pool: holds its leases and its sandboxes, asks `plan`, and lets the fleet act.

Nothing here waits between reading the state and changing it: a method either decides in one step, or only waits for what a step decided.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from sandbox_server.core.errors import (
    BackendUnavailable,
    Draining,
    InvalidRequest,
    NoCapacity,
    PoolNotFound,
    PoolServiceError,
    QuotaExceeded,
    SandboxLost,
    Stopping,
)
from sandbox_server.core.types import Acquired, AcquireRequest, Lease, LeaseState, PoolId, PoolSpec, SandboxState, SlotState
from sandbox_server.link import AgentClient
from sandbox_server.link.slot_client import SlotClient
from sandbox_server.pool.dependencies import PoolDependencies
from sandbox_server.pool.fleet import caches
from sandbox_server.pool.fleet import plan as planning
from sandbox_server.pool.fleet.backend_access import BackendAccess
from sandbox_server.pool.fleet.fleet import Fleet
from sandbox_server.pool.fleet.sandbox import Sandbox
from sandbox_server.pool.fleet.snapshot import capacity, claimant_view, snapshot
from sandbox_server.pool.fleet.ticker import Ticker
from sandbox_server.pool.grants import GrantService
from sandbox_server.pool.leasing.ended_leases import EndedLeases, end_error
from sandbox_server.pool.leasing.lease_book import LeaseBook
from sandbox_server.pool.leasing.no_capacity import crowded_out, held_back, none_free
from sandbox_server.pool.leasing.wait_queue import Waiter
from sandbox_server.store.base import CacheRecord, State

log = logging.getLogger(__name__)

#: An agent that has not finished a reset by then never will.
RESET_LIMIT_S = 120.0
EVENT_OF_END = {LeaseState.RELEASED: "lease.released", LeaseState.EXPIRED: "lease.expired", LeaseState.SANDBOX_LOST: "lease.lost"}


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotLocation:
    """Where the work of a held lease goes."""

    lease: Lease
    spec: PoolSpec
    agent: AgentClient
    slot_id: str
    epoch: int

    @property
    def slot(self) -> SlotClient:
        """The client for the calls and files of the slot."""
        return self.agent.slot(self.slot_id, self.epoch)


class Pool:
    """A named set of identical sandboxes.

    Args:
        pool_id: its name, and who owns it.
        spec: what it is made of.
        access: the backend, with the budget and the observer that its pools share.
        wiring: clock, store, timers, how to connect.
        ended: where ended leases are remembered, if that outlives the pool.
    """

    def __init__(self, pool_id: PoolId, spec: PoolSpec, access: BackendAccess, dependencies: PoolDependencies, ended: EndedLeases | None = None) -> None:
        self.pool_id = pool_id
        self.name = pool_id.name
        self.spec = spec
        self.book = LeaseBook(
            *(pool_id, spec, dependencies.clock, dependencies.store.put, dependencies.weight, dependencies.lease_id, ended),
            claim_after_s=dependencies.claim_after_s,
            admits=dependencies.admits,
            capacity=self._capacity,
        )
        self.fleet = Fleet(self, self.book, access, dependencies)
        self.clock = dependencies.clock
        self.closing = False
        self.why_closing = "the service is stopping"
        #: the tenant that deleted it; None: the service itself
        self.closed_by: str | None = None
        #: set once a pool that was closed has no sandbox left
        self.over = asyncio.Event()
        self._dependencies = dependencies
        self._ticker = Ticker(self._tick, dependencies.clock, dependencies.timers)
        self._grant_service = GrantService(self.book, self.fleet, spec, self, dependencies)
        self._used_at = dependencies.clock.monotonic()
        self._closed = False
        #: the claimant that those who follow the events know of
        self._told_claimant: Waiter | None = None

    # For callers.

    @property
    def shared(self) -> bool:
        """Whether every tenant may use it. A pool that no tenant owns always is."""
        return self.pool_id.tenant is None or self.spec.shared

    def restore(self, state: State) -> None:
        """Take over what an earlier life of this service recorded of this pool. Before `start`."""
        records = [record for record in state.sandboxes if record.pool_id == self.pool_id]
        self.fleet.adopt(records, self.spec)
        slots = [slot for slot in state.slots if slot.pool_id == self.pool_id and slot.ref.sandbox_id in self.book.table.slots_by_sandbox]
        self.book.restore(slots, [lease for lease in state.leases if lease.pool_id == self.pool_id])

    def start(self) -> None:
        """Find again what was restored, and begin to fill."""
        self.fleet.begin()
        self._ticker.start()

    async def stop(self, *, destroy: bool) -> None:
        """Refuse and fail whoever waits, then destroy the sandboxes, or leave them to whoever adopts them."""
        self.closing = True
        self._refuse_all()
        self._ticker.stop()
        await self.fleet.stop(destroy=destroy)
        await asyncio.gather(*self._grant_service.tasks, return_exceptions=True)

    def close(self, why: str, *, force: bool = False, by: str | None = None) -> None:
        """Let no new lease begin; `over` is set when the last sandbox has gone, which, unless forced, its leases hold up.

        Args:
            why: what callers are told.
            force: its leases end now.
            by: the tenant that wants it; None: the service itself.
        """
        if not self._closed:
            self.closing, self._closed, self.why_closing, self.closed_by = True, True, why, by
            self.pool_event("pool.draining", detail=why, by=by)
        self._refuse_all()
        if force:
            for sandbox in list(self.fleet.sandboxes.values()):
                self.fleet.retire(sandbox, why)
        self.work()

    def _refuse_all(self) -> None:
        for waiter in self.book.queue.all():
            self._grant_service.refuse(waiter, self._going())

    def _going(self) -> Draining:
        if not self._closed:
            return Stopping(f"pool {self.name!r} gives no new leases: the service is stopping: ask again when it is back")
        return Draining(f"pool {self.name!r} gives no new leases: {self.why_closing}")

    def change(self, spec: PoolSpec) -> None:
        """Go by another spec. What is made otherwise than it says drains; new sandboxes come beside, within `max_sandboxes`."""
        self.spec = self.book.spec = self._grant_service.spec = spec
        self._used_at = self._dependencies.clock.monotonic()
        self.fleet.forget_permanent_error()
        for sandbox in list(self.fleet.sandboxes.values()):
            if sandbox.state in (SandboxState.STARTING, SandboxState.READY) and planning.is_outdated(sandbox.spec, spec):
                self.fleet.drain(sandbox, "the pool's spec has changed")
        for waiter in self.book.queue.all():
            if not self.shared and waiter.request.tenant != self.pool_id.tenant:
                self._grant_service.refuse(waiter, PoolNotFound(f"pool {self.name!r} is no longer shared with this tenant"))
            elif waiter.request.count > spec.max_slots:
                detail = f"count is {waiter.request.count}, and pool {self.name!r} can no longer hold more than {spec.max_slots} slots"
                self._grant_service.refuse(waiter, InvalidRequest(detail, field="count"))
        self.work()

    async def acquire(self, request: AcquireRequest, may_wait: Callable[[str], None]) -> Acquired:
        """Wait for slots. A caller that is cancelled leaves the queue, or gives back what it had been granted.

        Args:
            request: what is wanted.
            may_wait: is asked, with the tenant, where it cannot be served at once; raises QuotaExceeded if it may not wait.

        Raises:
            QuotaExceeded: too many wait already.
            NoCapacity: nothing came free in time.
            BackendUnavailable: there is no hope of more slots, and too few to serve this.
            Draining: the pool is going away.
            InvalidRequest: the pool can never serve this.
            NotImplementedHere: the agent cannot give or take these rights.
            StorageUnavailable: the lease cannot be recorded, so it is not given.
        """
        if self.closing:
            raise self._going()
        self._grant_service.refuse_impossible(request)
        # Once it is time to try again there is hope again, until that has failed too.
        has_permanent_error = self.fleet.permanent_error is not None and self._dependencies.clock.monotonic() < self.fleet.retry_at
        if has_permanent_error and request.count > self.book.table.usable():
            raise self._permanent_error()
        wait_s = self.spec.acquire_timeout_s if request.wait_s is None else min(request.wait_s, self.spec.acquire_timeout_s)
        waiter = self.book.enqueue(request, wait_s)
        self._used_at = self._dependencies.clock.monotonic()
        self.work()
        if waiter.waiting and wait_s <= 0:
            # The pool grows all the same: who asks again and again without waiting gets a slot, and one that nobody takes goes as idle.
            self._tick()
        elif waiter.waiting:
            self._check_may_wait(waiter, may_wait)
        return await self._grant_service.answer(waiter)

    def _check_may_wait(self, waiter: Waiter, may_wait: Callable[[str], None]) -> None:
        try:
            may_wait(waiter.request.tenant)
        except QuotaExceeded:
            self.book.remove_waiter(waiter)  # before the plan has seen that it wants something
            raise

    def release(self, lease_id: str, *, keep: bool) -> Lease:
        """End a held lease; its slot's reset runs behind."""
        lease = self.book.release_lease(lease_id, keep=keep)
        self.lease_over(lease)
        self.work()
        return lease

    def release_run(self, tenant: str, run_id: str, *, keep: bool) -> list[str]:
        """End all leases of a run, and keep nothing for it any more unless `keep`."""
        lease_ids = self.book.lease_index.of_run(tenant, run_id)
        for lease_id in lease_ids:
            self.lease_over(self.book.release_lease(lease_id, keep=keep))
        if not keep:
            self.book.reclaim_kept_slots(tenant, run_id)
            caches.run_over(self.fleet.sandboxes.values(), tenant, run_id)
        self.work()
        return lease_ids

    def agent_of(self, lease: Lease) -> AgentClient:
        """The client of the agent that has the slot of a held lease.

        Raises:
            BackendUnavailable: the agent cannot be reached now; whether its sandbox is lost is being found out.
        """
        sandbox = self.fleet.sandboxes[lease.sandbox_id]
        if sandbox.agent is None or not sandbox.reachable:
            raise BackendUnavailable(f"the agent of sandbox {lease.sandbox_id} cannot be reached at the moment", lease_id=lease.lease_id)
        return sandbox.agent

    def route(self, lease: Lease) -> SlotLocation:
        """Where the work of a held lease goes now.

        Raises:
            BackendUnavailable: its agent cannot be reached at the moment.
        """
        return SlotLocation(lease=lease, spec=self.spec, agent=self.agent_of(lease), slot_id=lease.slot_id, epoch=lease.epoch)

    async def wait_for_reconnect_or_loss(self, lease_id: str) -> SandboxLost | None:
        """Wait until it is known whether this lease's sandbox is gone. None: it is there and its link is back, or the lease ended otherwise."""
        while True:
            held_lease = self.book.held.get(lease_id)
            if held_lease is None:
                ended = self.book.ended_leases.get(lease_id)
                error = end_error(ended) if ended is not None else None
                return error if isinstance(error, SandboxLost) else None
            sandbox = self.fleet.sandboxes[held_lease.lease.sandbox_id]
            if sandbox.reachable:
                return None
            await sandbox.changed.wait()

    async def flush(self) -> None:
        """Return once everything decided so far is on record.

        Raises:
            StorageUnavailable: it cannot be recorded.
        """
        await self._dependencies.store.flush()

    def crowded_out(self) -> str | None:
        """Why it may make no sandbox for who waits, where that is because of leases in draining ones."""
        slots_by_sandbox = self.book.table.slots_by_sandbox
        draining = [sandbox.sandbox_id for sandbox in self.fleet.sandboxes.values() if sandbox.state is SandboxState.DRAINING]
        leases = [count for count in (slots_by_sandbox[name].counts[SlotState.LEASED] for name in draining if name in slots_by_sandbox) if count]
        is_empty = len(draining) == len(self.fleet.sandboxes)
        if not leases or len(self.fleet.sandboxes) < self.spec.max_sandboxes or not (is_empty or len(self.book.queue)):
            return None
        return crowded_out(self.spec.max_sandboxes, len(leases), sum(leases))

    def now(self) -> float:
        """Monotonic seconds."""
        return self._dependencies.clock.monotonic()

    # What happens.

    def lease_begins(self, lease: Lease) -> None:
        """A slot has been assigned."""
        self.lease_event("lease.acquired", lease, expires_at=lease.expires_at)

    def lease_over(self, lease: Lease) -> None:
        """A lease has ended."""
        level = logging.DEBUG if lease.state is LeaseState.RELEASED else logging.INFO
        fields = {"lease_id": lease.lease_id, **self.pool_id.fields, "tenant": lease.tenant, "run_id": lease.run_id, "sandbox_id": lease.sandbox_id}
        log.log(level, "lease ended: %s", lease.end_detail, extra=fields)
        self.lease_event(EVENT_OF_END[lease.state], lease, detail=lease.end_detail)
        for hear in self._dependencies.lease_watchers:
            hear(lease.lease_id)

    def pool_event(self, kind: str, **more: Any) -> None:
        """Tell whoever follows, and may see the pool, what became of it."""
        owner = None if self.shared else self.pool_id.tenant
        self._dependencies.events.publish(kind, tenant=owner, admins_too=True, **self.pool_id.fields, **more)

    def lease_event(self, kind: str, lease: Lease, **more: Any) -> None:
        """Tell whoever follows what became of a lease."""
        self._dependencies.events.publish(
            kind,
            tenant=lease.tenant,
            lease_id=lease.lease_id,
            pool=lease.pool,
            sandbox_id=lease.sandbox_id,
            slot_id=lease.slot.name,
            run_id=lease.run_id,
            trajectory_id=lease.trajectory_id,
            **more,
        )

    def on_permanent_error(self, why: str) -> None:
        """No sandbox can be made; who waits for one need not."""
        for waiter in self.book.queue.all():
            if waiter.request.count > self.book.table.usable():
                self._grant_service.refuse(waiter, self._permanent_error())

    def cache_used(self, sandbox: Sandbox, record: CacheRecord) -> bool:
        """A lease is about to share this cache. Returns whether it is new in this sandbox."""
        is_new = caches.use(sandbox, record)
        if is_new:
            self.fleet.sandbox_changed(sandbox)
        return is_new

    # Deciding.

    def work(self) -> None:
        """Serve whoever can be served, have reset what must be, and let the plan look again."""
        self._serve()
        self._ticker.kick()

    def _serve(self) -> None:
        served = self.book.assign_slots()
        # The end of a claim is told before, and its beginning after what was granted then: what lies between the two was granted under it.
        if self._told_claimant is not None and self.book.claims.claimant is not self._told_claimant:
            self._tell_claimant(None)
        self._grant_service.serve(served)
        if self.book.claims.claimant is not self._told_claimant:
            self._tell_claimant(self.book.claims.claimant)
        orders, self.book.resets = self.book.resets, []
        self.fleet.reset(orders)

    def _tell_claimant(self, claimant: Waiter | None) -> None:
        self._told_claimant = claimant
        view = None if claimant is None else claimant_view(self.book, self.now())
        if view is not None:
            who = {"pool": self.name, "tenant": view.tenant, "run_id": view.run_id}
            log.info("what comes free is held for an acquire of %d that has waited for %.1f s", view.count, view.waited_s, extra=who)
        self._dependencies.events.publish("pool.claimant", admin_only=True, **self.pool_id.fields, claimant=None if view is None else asdict(view))

    def _tick(self) -> float:
        now = self._dependencies.clock.monotonic()
        for lease in self.book.expire_leases():
            self._dependencies.meter.count("sandbox_leases_expired_total", **self.pool_id.labels)
            self.lease_over(lease)
        self._quarantine_stuck(now)
        self._serve()
        self._close_if_idle(now)
        caches.drop_idle(self.fleet, self.book, now)
        self.fleet.clear_backoff()
        seen = self._snapshot()
        actions = planning.plan(seen, now)
        for action in actions:
            self._act(action)
        # Last, so that what was wanted in vain has been seen by the plan.
        self._refuse_overdue()
        if self._closed and not self.fleet.sandboxes:
            self.over.set()
        return min(self.book.next_due(), planning.next_due(self._snapshot() if actions else seen, now))

    def _refuse_overdue(self) -> None:
        claimant = self.book.claims.claimant
        late = [(waiter, self.book.queue.position(waiter, claimant)) for waiter in self.book.overdue_waiters()]
        making = sum(sandbox.state is SandboxState.STARTING for sandbox in self.fleet.sandboxes.values()) if late else 0
        for waiter, position in late:
            waited_s = self.now() - waiter.arrived
            held = None
            if claimant is not None and waiter is not claimant and self.book.table.free_count >= waiter.request.count:
                held = held_back(self.book.table.free_count, claimant.request.count, self.now() - claimant.arrived)
            detail = none_free(
                *(self.name, waiter.request.count, waited_s), making=making, held=held, crowded=self.crowded_out(), last_error=self.fleet.last_error
            )
            self._grant_service.refuse(waiter, NoCapacity(detail, queue_position=position, waited_s=round(waited_s, 3)))
        if late:
            # What was reserved or held for them may be somebody else's now.
            self._ticker.kick()

    def _act(self, action: planning.Action) -> None:
        if isinstance(action, planning.Create):
            self.fleet.create(self.spec)
        elif isinstance(action, planning.Drain):
            self.fleet.drain(self.fleet.sandboxes[action.sandbox_id], action.why)
        else:
            self.fleet.retire(self.fleet.sandboxes[action.sandbox_id], action.why)

    def _snapshot(self) -> planning.Snapshot:
        return snapshot(self.spec, self.fleet.sandboxes.values(), self.book, self.fleet.retry_at, closing=self.closing)

    def _capacity(self) -> int:
        return capacity(self.spec, self.fleet.sandboxes.values(), self.book, can_grow=not self.fleet.creating_fails)

    def _quarantine_stuck(self, now: float) -> None:
        if not self.book.table.counts[SlotState.RESETTING]:
            return
        for slot in [slot for slot in self.book.table if slot.state is SlotState.RESETTING and slot.since <= now - RESET_LIMIT_S]:
            self.fleet.reset_done(slot.ref, slot.epoch, f"its reset did not end within {RESET_LIMIT_S:g} s")

    def _close_if_idle(self, now: float) -> None:
        limit_s = self.spec.delete_after_idle_s
        if self.book.held or len(self.book.queue):
            self._used_at = now
        elif limit_s is not None and not self.closing and now - self._used_at >= limit_s:
            log.info("the pool has been idle for delete_after_idle_s", extra=self.pool_id.fields)
            self.close(f"idle for delete_after_idle_s of {limit_s:.10g} s")

    def _permanent_error(self) -> PoolServiceError:
        return BackendUnavailable(f"pool {self.name!r} cannot make sandboxes: {self.fleet.permanent_error}")
