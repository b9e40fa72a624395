"""The sandboxes of one pool: making, finding again, draining and retiring them, and what their keepers saw."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from sandbox_server.backends.base import CreateFailed, RateLimited
from sandbox_server.core.lifecycle import SandboxEvent
from sandbox_server.core.types import Lease, LeaseState, PoolId, PoolSpec, SandboxState, SlotRef, SlotState
from sandbox_server.link import AgentClient
from sandbox_server.link.agent_reports import AgentReport, SlotReport
from sandbox_server.pool.dependencies import PoolDependencies
from sandbox_server.pool.fleet import plan as planning
from sandbox_server.pool.fleet.backend_access import BackendAccess
from sandbox_server.pool.fleet.sandbox import Cache, Sandbox
from sandbox_server.pool.fleet.supervisor import SandboxSupervisor
from sandbox_server.pool.leasing.held_lease import ResetOrder
from sandbox_server.pool.leasing.lease_book import LeaseBook
from sandbox_server.store.base import SandboxRecord

log = logging.getLogger(__name__)

#: A sandbox that ends sooner than this counts as a failing creation, so that a crash loop backs off too.
SHORT_LIFE_S = 10.0


class FleetListener(Protocol):
    """Who goes by what the fleet sees: its pool."""

    pool_id: PoolId

    def work(self) -> None:
        """Something has changed: look."""

    def lease_over(self, lease: Lease) -> None:
        """A lease has ended."""

    def on_permanent_error(self, why: str) -> None:
        """No sandbox can be made until something changes; who waits for one need not."""


class Fleet:
    """The sandboxes of one pool, in the making, in use and on their way out.

    Args:
        pool: whose they are.
        book: its leases and slots.
        access: the backend, with the budget and the observer that its pools share.
        wiring: clock, store, timers, how to connect.
    """

    def __init__(self, pool: FleetListener, book: LeaseBook, access: BackendAccess, dependencies: PoolDependencies) -> None:
        self.sandboxes: dict[str, Sandbox] = {}
        self.supervisors: dict[str, SandboxSupervisor] = {}
        #: those found on record of which nobody knows yet whether they are there
        self.adopting: set[str] = set()
        self.last_error: str | None = None
        self.permanent_error: str | None = None
        #: whether the last sandbox that was to be made could not be, the backend's requests for patience aside
        self.creating_fails = False
        self.retry_at = 0.0
        self.shown: AgentReport | None = None
        self._pool = pool
        self._book = book
        self._access = access
        self._dependencies = dependencies
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._failures = 0
        #: adopted leases under which commands may still run, by sandbox
        self._not_quiet: dict[str, set[str]] = {}

    # Doing.

    def create(self, spec: PoolSpec) -> None:
        """Make one."""
        pool, clock = self._pool.pool_id, self._dependencies.clock
        sandbox = Sandbox(sandbox_id=self._dependencies.sandbox_id(), pool=pool.name, pool_tenant=pool.tenant, spec=spec, created_wall=clock.wall())
        self.sandbox_changed(sandbox)
        self._tell("starting", sandbox)
        self._keep(sandbox)

    def adopt(self, records: Iterable[SandboxRecord], spec: PoolSpec) -> None:
        """Find again what an earlier life of this service made, as far as it was whole; the rest is destroyed. Before the book is restored."""
        for record in records:
            sandbox = Sandbox.restored(record, spec, self._dependencies.clock)
            if sandbox.boot is None or sandbox.state is SandboxState.FAILED:
                sandbox.destroying = True
                if sandbox.state is SandboxState.STARTING:
                    sandbox.happen(SandboxEvent.DRAIN)
            else:
                self.adopting.add(sandbox.sandbox_id)
                self._book.add_sandbox(sandbox.sandbox_id)
                # Nothing is handed out there before its agent has shown its slots.
                self._book.table.cordon_sandbox(sandbox.sandbox_id)
            self.sandboxes[sandbox.sandbox_id] = sandbox

    def begin(self) -> None:
        """Go and find those that were adopted. Calls may still run under their leases, so that these do not end before the agents have spoken."""
        for lease_id, held_lease in self._book.held.items():
            held_lease.calls_unknown = True
            self._not_quiet.setdefault(held_lease.lease.sandbox_id, set()).add(lease_id)
        for sandbox in list(self.sandboxes.values()):
            self._keep(sandbox)
            if sandbox.destroying:
                self.supervisors[sandbox.sandbox_id].end()

    def _keep(self, sandbox: Sandbox) -> None:
        self.sandboxes[sandbox.sandbox_id] = sandbox
        supervisor = self.supervisors[sandbox.sandbox_id] = SandboxSupervisor(sandbox, self, self._access, self._dependencies)
        task = self._tasks[sandbox.sandbox_id] = asyncio.create_task(supervisor.run())
        task.add_done_callback(lambda task: self._tasks.pop(sandbox.sandbox_id, None))

    def drain(self, sandbox: Sandbox, why: str, *, by: str | None = None) -> None:
        """No new leases there; the plan retires it when the last one ends. `by`: the tenant that wants it; None: the service itself."""
        sandbox.why = why
        sandbox.happen(SandboxEvent.DRAIN)
        if sandbox.sandbox_id in self._book.table.slots_by_sandbox:
            self._book.table.cordon_sandbox(sandbox.sandbox_id)
        self.sandbox_changed(sandbox)
        self._tell("draining", sandbox, detail=why, by=by)
        self._pool.work()

    def retire(self, sandbox: Sandbox, why: str) -> None:
        """Take it away now; its leases are lost."""
        if sandbox.destroying:
            return
        if sandbox.state is not SandboxState.DRAINING:
            self.drain(sandbox, why)
        self._end_leases(sandbox, why)
        self.supervisors[sandbox.sandbox_id].end()

    def reset(self, orders: Iterable[ResetOrder]) -> None:
        """Have agents reset slots."""
        for order in orders:
            sandbox = self.sandboxes[order.ref.sandbox_id]
            sandbox.idle_since = self._dependencies.clock.monotonic()
            supervisor = self.supervisors.get(sandbox.sandbox_id)
            if supervisor is not None:
                supervisor.reset(order)

    async def stop(self, *, destroy: bool) -> None:
        """Destroy them all, or leave those that are whole to whoever adopts them."""
        for sandbox in list(self.sandboxes.values()):
            if destroy or sandbox.state is SandboxState.STARTING:
                self.retire(sandbox, "the service was told to stop")
        tasks = dict(self._tasks)
        for sandbox_id, task in tasks.items():
            if not self.sandboxes[sandbox_id].destroying:
                task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)

    def clear_backoff(self) -> None:
        """What lives long enough shows that creating works."""
        now = self._dependencies.clock.monotonic()
        if self._failures and any(s.state is SandboxState.READY and now - (s.ready_at or now) >= SHORT_LIFE_S for s in self.sandboxes.values()):
            self._failures = 0

    def forget_permanent_error(self) -> None:
        """The spec has changed: what could not be made may be made now."""
        self._failures, self.retry_at, self.permanent_error, self.last_error = 0, 0.0, None, None
        self.creating_fails = False

    def _end_leases(self, sandbox: Sandbox, why: str) -> None:
        self.adopting.discard(sandbox.sandbox_id)
        self._not_quiet.pop(sandbox.sandbox_id, None)
        if sandbox.sandbox_id in self._book.table.slots_by_sandbox:
            for lease in self._book.remove_sandbox(sandbox.sandbox_id, why):
                self._pool.lease_over(lease)
        sandbox.wake()

    def _tell(self, what: str, sandbox: Sandbox, **data: Any) -> None:
        self._dependencies.events.publish(f"sandbox.{what}", admin_only=True, **sandbox.fields, **data)

    # What keepers saw.

    def sandbox_changed(self, sandbox: Sandbox) -> None:
        """What must be known of it after a crash has changed."""
        self._dependencies.store.put(sandbox.record(self._dependencies.clock))

    def sandbox_connected(self, sandbox: Sandbox, agent: AgentClient, report: AgentReport) -> None:
        """Its agent answers, for the first time or again."""
        sandbox.agent, sandbox.boot, sandbox.isolation = agent, report.boot, report.isolation
        self.shown = report
        self._book.order.exclusive = report.isolation == "none"
        now = self._dependencies.clock.monotonic()
        if sandbox.state is SandboxState.STARTING:
            sandbox.happen(SandboxEvent.CONNECT)
            sandbox.ready_at = now
            self.last_error = self.permanent_error = None
            self.creating_fails = False
            self._dependencies.meter.count("sandbox_backend_calls_total", backend=sandbox.spec.backend, op="create", outcome="ok")
            self._tell("ready", sandbox)
        if sandbox.idle_since is None:
            sandbox.idle_since = now
        if sandbox.sandbox_id not in self._book.table.slots_by_sandbox:
            self._book.add_sandbox(sandbox.sandbox_id)
            if sandbox.state is not SandboxState.READY:
                self._book.table.cordon_sandbox(sandbox.sandbox_id)
        self._reset_again(sandbox)
        for lease_id in self._not_quiet.get(sandbox.sandbox_id, ()):
            if lease_id in self._book.held:
                self.supervisors[sandbox.sandbox_id].await_quiet(self._book.held[lease_id].lease)
        for cache in sandbox.caches.values():
            cache.dropping = False
        self.sandbox_changed(sandbox)
        sandbox.wake()
        self._pool.work()

    def _reset_again(self, sandbox: Sandbox) -> None:
        """What was being reset when the link went; asking twice for one epoch is asking once."""
        for slot in self._book.table.slots_by_sandbox[sandbox.sandbox_id].slots.values():
            if slot.state is SlotState.RESETTING and not slot.fresh:
                self._book.resets.append(ResetOrder(ref=slot.ref, epoch=slot.epoch, keep=slot.keep is not None))

    def sandbox_unreachable(self, sandbox: Sandbox) -> None:
        """The link is gone; whether the sandbox is, is being found out. Nothing is leased there meanwhile."""
        self._book.table.cordon_sandbox(sandbox.sandbox_id)
        sandbox.wake()

    def sandbox_failed(self, sandbox: Sandbox, error: Exception) -> None:
        """It could not be made, or has ended."""
        now = self._dependencies.clock.monotonic()
        created, patience = sandbox.ready_at is not None, isinstance(error, RateLimited)
        self.last_error = sandbox.why = str(error)
        if not created:
            outcome = "limited" if patience else "failed"
            self._dependencies.meter.count("sandbox_backend_calls_total", backend=sandbox.spec.backend, op="create", outcome=outcome)
            self.creating_fails = self.creating_fails or not patience
        if not patience and (not created or now - (sandbox.ready_at or now) < SHORT_LIFE_S) and now >= self.retry_at:
            self._failures += 1
            self.retry_at = now + planning.backoff_s(self._failures, self._dependencies.jitter)
        sandbox.happen(SandboxEvent.FAIL)
        self._tell("failed", sandbox, detail=str(error))
        self._end_leases(sandbox, str(error))
        if isinstance(error, CreateFailed) and error.permanent:
            self.permanent_error = error.detail
            self.retry_at = now + planning.BACKOFF_MAX_S
            self._pool.on_permanent_error(error.detail)
        log.warning("sandbox failed: %s", error, extra=sandbox.fields)
        self.sandbox_changed(sandbox)
        self._pool.work()

    def sandbox_gone(self, sandbox: Sandbox) -> None:
        """The backend says that nothing of it is left."""
        sandbox.happen(SandboxEvent.DESTROY)
        del self.sandboxes[sandbox.sandbox_id], self.supervisors[sandbox.sandbox_id]
        self.sandbox_changed(sandbox)
        self._tell("gone", sandbox)
        self._pool.work()

    def effective_seen(self, effective: Mapping[str, int | None]) -> None:
        """An agent says which limits hold for each slot now."""
        if self.shown is not None:
            self.shown = replace(self.shown, effective=effective)

    def slots_seen(self, sandbox: Sandbox, slots: Sequence[SlotReport]) -> None:
        """Its agent shows slots."""
        if sandbox.sandbox_id not in self._book.table.slots_by_sandbox:
            return  # retired while the agent spoke
        for seen in slots:
            self._slot_seen(sandbox, seen)
        self.adopting.discard(sandbox.sandbox_id)
        if sandbox.state is SandboxState.READY and sandbox.reachable:
            self._book.table.uncordon_sandbox(sandbox.sandbox_id)
        self._pool.work()

    def _slot_seen(self, sandbox: Sandbox, seen: SlotReport) -> None:
        sandbox_slots = self._book.table.slots_by_sandbox[sandbox.sandbox_id]
        if seen.ref.slot_id not in sandbox_slots.slots and len(sandbox_slots.slots) >= sandbox.spec.slots_per_sandbox:
            log.warning("an agent shows more slots than it was given", extra=sandbox.fields)
            return
        slot = self._book.observe_slot(seen.ref, max(seen.epoch, 1), seen.workspace, seen.isolation or sandbox.isolation)
        detail = seen.detail or f"its agent says that it is {seen.state}"
        if seen.state == "quarantined" or (seen.state == "broken" and slot.fresh):
            self.reset_done(seen.ref, slot.epoch, detail)
        elif seen.epoch > slot.epoch:
            self._over(self._book.accept_newer_epoch(seen.ref, seen.epoch))
        elif seen.state == "broken" and seen.epoch == slot.epoch:
            self._over(self._book.reset_broken_slot(seen.ref, f"the slot's own init died: {detail}", seen.evidence))
        elif seen.state == "ready":
            self._book.mark_clean(seen.ref, seen.epoch)

    def reset_done(self, ref: SlotRef, epoch: int, problem: str | None) -> None:
        """A reset has ended, proven clean unless there is a problem."""
        slot = self._book.table.get(ref)
        if slot is None or slot.epoch != epoch or slot.state is SlotState.QUARANTINED:
            return
        if problem is None:
            self._book.mark_clean(ref, epoch)
        else:
            self._dependencies.meter.count("sandbox_slot_dirty_total", **self._pool.pool_id.labels)
            where = {**self._pool.pool_id.fields, "sandbox_id": ref.sandbox_id, "slot_id": ref.name}
            log.warning("slot in quarantine: %s", problem, extra=where)
            self._dependencies.events.publish("slot.quarantined", admin_only=True, detail=problem, **where)
            self._over(self._book.quarantine_slot(ref, problem))
        self._pool.work()

    def _over(self, lease: Lease | None) -> None:
        if lease is not None and lease.state is LeaseState.SANDBOX_LOST:
            self._pool.lease_over(lease)

    def cache_dropped(self, sandbox: Sandbox, cache: Cache, *, gone: bool) -> None:
        """The agent has deleted a cache, or could not be asked."""
        cache.dropping = False
        # It may have been made anew meanwhile.
        if gone and sandbox.caches.get(cache.record.key) is cache:
            del sandbox.caches[cache.record.key]
            self.sandbox_changed(sandbox)

    def lease_quiet(self, sandbox: Sandbox, lease_id: str, *, ran: bool) -> None:
        """No call runs any more in the slot of this adopted lease; `ran`: one did when its agent was found again."""
        not_quiet = self._not_quiet.get(sandbox.sandbox_id)
        if not_quiet is not None and lease_id in not_quiet:
            not_quiet.discard(lease_id)
            self._book.lease_index.confirm_calls_ended(lease_id, self._dependencies.clock.monotonic() if ran else None)
