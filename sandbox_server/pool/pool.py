"""One pool: its leases, its sandboxes, and the loop that applies observations to both.

Tasks put what they observe into the pool's inbox. The pool applies each value to its state in one step, in which nothing is awaited, and then carries
out the effects that the step has returned.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from sandbox_server.core.errors import Draining, QuotaExceeded, Stopping
from sandbox_server.core.types import Acquired, AcquireRequest, Lease, PoolId, PoolSpec, SandboxState
from sandbox_server.pool.dependencies import PoolDependencies
from sandbox_server.pool.effect_runner import EffectRunner
from sandbox_server.pool.fleet import caches
from sandbox_server.pool.fleet import plan as planning
from sandbox_server.pool.fleet.effects import AnnounceLeaseEnd, CountMetric, Effect
from sandbox_server.pool.fleet.fleet import Fleet
from sandbox_server.pool.fleet.snapshot import capacity, claimant_view, take_snapshot
from sandbox_server.pool.fleet.supervision.backend_access import BackendAccess
from sandbox_server.pool.fleet.supervision.supervisor_set import SupervisorSet
from sandbox_server.pool.fleet.ticker import Ticker
from sandbox_server.pool.granting.grant_service import AcquireAbandoned, GrantService, PoolValue, PreparationEnded
from sandbox_server.pool.inbox import Inbox, confirm_applied
from sandbox_server.pool.lease_directory import LeaseDirectory
from sandbox_server.pool.leasing.ended_leases import EndedLeases
from sandbox_server.pool.leasing.lease_book import LeaseBook
from sandbox_server.pool.leasing.request_keys import TenantKey
from sandbox_server.pool.leasing.wait_queue import Waiter, longest_wait_s
from sandbox_server.pool.pool_events import PoolEvents
from sandbox_server.store.base import State

log = logging.getLogger(__name__)


class Pool:
    """A named set of identical sandboxes, whose slots are leased.

    Args:
        pool_id: its name, and the tenant that owns it.
        spec: how its sandboxes are created, and its limits.
        access: the backend, with the creation budget and the observer that its pools share.
        dependencies: the clock, the store, the timers, and the function that connects to agents.
        directory: the index of held leases; default one of the pool's own.
        ended: the memory of ended leases, if it outlives the pool.

    Attributes:
        book: the pool's leases and slots, and the acquires that wait.
        fleet: the pool's sandboxes.
        supervisors: the supervisors of the sandboxes.
        pace: limits how many acquires of ready slots are granted within a short time.
        events: publishes the pool's events.
        closing: whether no new lease begins any more.
        closing_reason: why, as shown to clients.
        closed_by: the tenant that deleted the pool; None for the service itself.
        gone: is set once a closed pool has no sandbox left.
        tasks: the tasks of the pool itself.
    """

    def __init__(
        self,
        pool_id: PoolId,
        spec: PoolSpec,
        access: BackendAccess,
        dependencies: PoolDependencies,
        directory: LeaseDirectory[Pool] | None = None,
        ended: EndedLeases | None = None,
    ) -> None:
        clock = dependencies.clock
        self.pool_id, self.name = pool_id, pool_id.name
        self.spec = spec
        self.book = LeaseBook(
            *(pool_id, spec, clock, dependencies.store.put, dependencies.weight, dependencies.lease_id, ended),
            claim_after_s=dependencies.claim_after_s,
            admits=dependencies.admits,
            capacity=self._capacity,
        )
        self.fleet = Fleet(pool_id, self.book, access.backend.traits, clock, dependencies.jitter)
        self.clock, self.pace = clock, access.pace
        self.events = PoolEvents(pool_id, dependencies.events)
        self.closing, self.closing_reason = False, "the service is stopping"
        self.closed_by: str | None = None
        self.gone = asyncio.Event()
        self.tasks: set[asyncio.Task[None]] = set()
        self._dependencies = dependencies
        self._directory: LeaseDirectory[Pool] = LeaseDirectory() if directory is None else directory
        self._inbox: Inbox[PoolValue] = Inbox()
        self.supervisors = SupervisorSet(self._inbox, access, dependencies, lambda: len(self.book.queue) > 0)
        self._ticker = Ticker(self._tick, clock, dependencies.timers)
        self._grant_service = GrantService(self.book, self.fleet, spec, self._inbox, dependencies)
        self._effect_runner = EffectRunner(self, self._directory, self.events, self.supervisors, self._grant_service, dependencies)
        self._used_at = clock.monotonic()
        self._is_closed = False
        #: the claimant that was published last
        self._published_claimant: Waiter | None = None

    # The life of the pool.

    @property
    def shared(self) -> bool:
        """Whether every tenant may use it. A pool that no tenant owns always is shared."""
        return self.pool_id.tenant is None or self.spec.shared

    def restore(self, state: State) -> None:
        """Take over what an earlier service has recorded of this pool. Call it before `start`.

        Args:
            state: the records of all pools.
        """
        self.fleet.adopt_sandboxes([record for record in state.sandboxes if record.pool_id == self.pool_id], self.spec)
        slots = [slot for slot in state.slots if slot.pool_id == self.pool_id and slot.ref.sandbox_id in self.book.table.slots_by_sandbox]
        self.book.restore_leases(slots, [lease for lease in state.leases if lease.pool_id == self.pool_id])
        for lease_id in self.book.held:
            self._directory.add_lease(lease_id, self)

    def start(self) -> None:
        """Start the supervisors of the restored sandboxes, and begin to create new ones."""
        task = asyncio.create_task(self._apply_observations())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        self.fleet.hold_adopted_leases()
        for sandbox in list(self.fleet.sandboxes.values()):
            self.supervisors.start_supervisor(sandbox)
        self._ticker.start_ticking()

    async def stop(self, *, destroy: bool) -> None:
        """Refuse all waiters. Then destroy the sandboxes, or leave them for another service to adopt.

        Args:
            destroy: whether to destroy them. Sandboxes whose creation is not finished are destroyed in any case.
        """
        self.closing = True
        self._grant_service.refuse_all_waiters(self._closing_error)
        self._ticker.stop_ticking()
        self._apply_pending()
        for sandbox in list(self.fleet.sandboxes.values()):
            if destroy or sandbox.state is SandboxState.STARTING:
                self._effect_runner.carry_out(self.fleet.retire_sandbox(sandbox, "the service is stopping"))
        await self.supervisors.stop_supervisors([sandbox.sandbox_id for sandbox in self.fleet.sandboxes.values() if not sandbox.destroying])
        await asyncio.gather(*self._grant_service.tasks, return_exceptions=True)
        self._apply_pending()
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def drain_pool(self, reason: str, *, force: bool = False, by: str | None = None) -> None:
        """Let no new lease begin. `gone` is set when the last sandbox is gone, which is when its last lease has ended, or earlier with `force`.

        Args:
            reason: why, as shown to clients.
            force: whether all leases end now.
            by: the tenant that asked for it; None for the service itself.
        """
        if not self._is_closed:
            self.closing, self._is_closed, self.closing_reason, self.closed_by = True, True, reason, by
            self.publish_event("pool.draining", detail=reason, by=by)
        self._grant_service.refuse_all_waiters(self._closing_error)
        if force:
            for sandbox in list(self.fleet.sandboxes.values()):
                self._effect_runner.carry_out(self.fleet.retire_sandbox(sandbox, reason))
        self._serve_and_plan()

    def _closing_error(self) -> Draining:
        if not self._is_closed:
            return Stopping(f"pool {self.name!r} gives no new leases: the service is stopping: ask again when it is back")
        return Draining(f"pool {self.name!r} gives no new leases: {self.closing_reason}")

    def change_spec(self, spec: PoolSpec) -> None:
        """Replace the spec. Sandboxes that were created from other values drain, and new ones are created beside them, within `max_sandboxes`.

        Args:
            spec: the new spec.
        """
        self.spec = self.book.spec = spec
        self._used_at = self.now()
        self.fleet.forget_creation_errors()
        for sandbox in list(self.fleet.sandboxes.values()):
            if sandbox.state in (SandboxState.STARTING, SandboxState.READY) and planning.is_outdated(sandbox.spec, spec):
                self._effect_runner.carry_out(self.fleet.drain_sandbox(sandbox, "the pool's spec has changed"))
        self._grant_service.change_spec(spec, is_shared=self.shared)
        self._serve_and_plan()

    def drain_sandbox(self, sandbox_id: str, reason: str, *, by: str | None) -> None:
        """Give a sandbox no new leases. It is destroyed when its last lease ends. Nothing changes if it drains already.

        Args:
            sandbox_id: the sandbox.
            reason: why, as shown to clients.
            by: the tenant that asked for it.
        """
        sandbox = self.fleet.sandboxes[sandbox_id]
        if sandbox.state in (SandboxState.STARTING, SandboxState.READY):
            self._effect_runner.carry_out(self.fleet.drain_sandbox(sandbox, reason, by=by))
            log.info("a sandbox was drained", extra={**sandbox.fields, "by": by})
            self._serve_and_plan()

    # Leases.

    async def acquire(self, request: AcquireRequest, check_may_wait: Callable[[str], None], arrived: float) -> Acquired:
        """Wait for slots. A request that is cancelled leaves the queue, or gives back what it was granted.

        Args:
            request: the acquire.
            check_may_wait: is called with the tenant if the request cannot be served at once; raises QuotaExceeded if it may not wait.
            arrived: when the request arrived, monotonic. It waits from then on.

        Raises:
            QuotaExceeded: too many acquires are waiting already.
            NoCapacity: not enough slots came free in time.
            BackendUnavailable: no sandbox can be created, and the pool has too few slots to serve the request.
            Draining: the pool gives no new leases.
            InvalidRequest: the pool can never serve the request.
            NotImplementedHere: the agent cannot give or take these rights.
            StorageUnavailable: the lease cannot be written to disk, so it is not given.
        """
        if self.closing:
            raise self._closing_error()
        self._grant_service.refuse_impossible(request)
        waiter = self.book.enqueue(request, longest_wait_s(request, self.spec), arrived)
        self._used_at = now = self.now()
        self._serve_and_plan()
        if waiter.waiting and waiter.deadline <= now:
            # The pool creates a sandbox all the same, so that a client which asks repeatedly without waiting gets a slot in the end.
            self._tick()
        elif waiter.waiting:
            self._check_may_wait(waiter, check_may_wait)
        return await self._grant_service.wait_for_leases(waiter)

    def _check_may_wait(self, waiter: Waiter, check_may_wait: Callable[[str], None]) -> None:
        try:
            check_may_wait(waiter.request.tenant)
        except QuotaExceeded:
            self.book.remove_waiter(waiter)  # before the plan counts its slots as wanted
            raise

    def release_lease(self, lease_id: str, *, keep: bool) -> Lease:
        """End a held lease. The reset of its slot goes on in the background.

        Args:
            lease_id: the lease.
            keep: whether the slot's files stay for the next lease of the same run.
        """
        lease = self.book.release_lease(lease_id, keep=keep)
        self._effect_runner.carry_out([AnnounceLeaseEnd(lease)])
        self._serve_and_plan()
        return lease

    def release_run(self, tenant: str, run_id: str, *, keep: bool) -> list[str]:
        """End all leases of a run. Unless `keep` is set, its kept slots are reclaimed and its caches deleted as well.

        Returns:
            The ids of the leases.
        """
        lease_ids = self.book.lease_index.of_run(tenant, run_id)
        self._effect_runner.carry_out([AnnounceLeaseEnd(self.book.release_lease(lease_id, keep=keep)) for lease_id in lease_ids])
        if not keep:
            self.book.reclaim_kept_slots(tenant, run_id)
            caches.end_caches_of_run(self.fleet.sandboxes.values(), tenant, run_id)
        self._serve_and_plan()
        return lease_ids

    def release_request_key(self, tenant_key: TenantKey) -> None:
        """Refuse the acquires with a request key whose response has not been sent, and end the leases that they were granted."""
        effects = self._grant_service.release_request_key(tenant_key)
        if effects is not None:
            self._effect_runner.carry_out(effects)
            self._serve_and_plan()

    async def flush(self) -> None:
        """Return once everything that was decided so far is on disk.

        Raises:
            StorageUnavailable: it cannot be written.
        """
        await self._dependencies.store.flush()

    def now(self) -> float:
        """The monotonic time, in seconds."""
        return self.clock.monotonic()

    def publish_event(self, kind: str, **data: Any) -> None:
        """Publish an event about the pool. See `PoolEvents.publish_pool_event`."""
        self.events.publish_pool_event(kind, is_shared=self.shared, **data)

    # Applying observations.

    async def _apply_observations(self) -> None:
        while True:
            await self._inbox.wait_until_filled()
            try:
                self._apply_pending()
            except Exception:  # a fault in serving the waiters must not end the loop that the whole pool depends on
                log.exception("serving the waiters of a pool failed", extra=self.pool_id.fields)

    def _apply_pending(self) -> None:
        """Apply everything that is in the inbox, then serve the waiters once."""
        is_changed = False
        while (taken := self._inbox.take_next()) is not None:
            value, applied = taken
            self._apply_value(value)
            confirm_applied(applied)
            is_changed = True
        if is_changed:
            self._serve_and_plan()

    def _apply_value(self, value: PoolValue) -> None:
        try:
            self._effect_runner.carry_out(self._decide(value))
        except Exception as error:  # a fault in applying one value must not end the loop that the whole pool depends on
            log.exception("an observation could not be applied to the state of its pool", extra=self.pool_id.fields)
            supervisor = None if isinstance(value, PreparationEnded | AcquireAbandoned) else self.supervisors.supervisor_of(value.sandbox_id)
            if supervisor is not None:
                supervisor.abort_sandbox(f"the service could not keep it: {type(error).__name__}: {error}")

    def _decide(self, value: PoolValue) -> list[Effect]:
        match value:
            case PreparationEnded():
                return self._grant_service.finish_preparation(value)
            case AcquireAbandoned():
                return self._grant_service.give_back(value.waiter)
            case _:
                return self.fleet.apply(value)

    # Serving the waiters, and planning.

    def _serve_and_plan(self) -> None:
        """Serve the waiters that can be served, order the resets that are due, and let the plan run soon."""
        self._serve_waiters()
        self._ticker.request_tick()

    def _serve_waiters(self) -> None:
        served = self.book.assign_slots()
        # The end of a claim is published before the grants, and the beginning of the next one after them: grants in between were made under it.
        if self._published_claimant is not None and self.book.claims.claimant is not self._published_claimant:
            self._publish_claimant(None)
        self._effect_runner.carry_out(self._grant_service.grant_or_prepare(served))
        if self.book.claims.claimant is not self._published_claimant:
            self._publish_claimant(self.book.claims.claimant)
        orders, self.book.resets = self.book.resets, []
        self.fleet.note_resets(orders)
        self.supervisors.reset_slots(orders)

    def _publish_claimant(self, claimant: Waiter | None) -> None:
        self._published_claimant = claimant
        self.events.publish_claimant(None if claimant is None else claimant_view(self.book, self.now()))

    def _tick(self) -> float:
        """Do everything that is due.

        Returns:
            The monotonic time at which something will be due next.
        """
        now = self.now()
        for lease in self.book.expire_leases():
            self._effect_runner.carry_out([CountMetric(name="sandbox_leases_expired_total", labels=self.pool_id.labels), AnnounceLeaseEnd(lease)])
        self._effect_runner.carry_out(self.fleet.quarantine_stuck_slots(now))
        self._serve_waiters()
        self._close_if_idle(now)
        self._effect_runner.carry_out(caches.choose_caches_to_drop(self.fleet.sandboxes.values(), self.book, now))
        self.fleet.clear_backoff()
        before = self._snapshot()
        actions = planning.plan(before, now)
        for action in actions:
            self._carry_out_action(action)
        # After the plan, so that it has counted the slots that these waiters want.
        if self._grant_service.refuse_overdue_waiters():
            # The slots that were reserved or held for them can be leased to other waiters now.
            self._ticker.request_tick()
        if self._is_closed and not self.fleet.sandboxes:
            self.gone.set()
        return min(self.book.next_due(), planning.next_due(self._snapshot() if actions else before, now))

    def _carry_out_action(self, action: planning.Action) -> None:
        if isinstance(action, planning.Create):
            sandbox, effects = self.fleet.add_sandbox(self._dependencies.sandbox_id(), self.spec)
            self._effect_runner.carry_out(effects)
            self.supervisors.start_supervisor(sandbox)
        elif isinstance(action, planning.Drain):
            self._effect_runner.carry_out(self.fleet.drain_sandbox(self.fleet.sandboxes[action.sandbox_id], action.reason))
            self._ticker.request_tick()
        else:
            self._effect_runner.carry_out(self.fleet.retire_sandbox(self.fleet.sandboxes[action.sandbox_id], action.reason))

    def _snapshot(self) -> planning.Snapshot:
        return take_snapshot(self.spec, self.fleet.sandboxes.values(), self.book, self.fleet.retry_at, closing=self.closing)

    def _capacity(self) -> int:
        return capacity(self.spec, self.fleet.sandboxes.values(), self.book, can_grow=not self.fleet.creating_fails)

    def _close_if_idle(self, now: float) -> None:
        limit_s = self.spec.delete_after_idle_s
        if self.book.held or len(self.book.queue):
            self._used_at = now
        elif limit_s is not None and not self.closing and now - self._used_at >= limit_s:
            log.info("the pool has been idle for delete_after_idle_s", extra=self.pool_id.fields)
            self.drain_pool(f"idle for delete_after_idle_s of {limit_s:.10g} s")
