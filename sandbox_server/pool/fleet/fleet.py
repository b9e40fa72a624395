"""The sandboxes of one pool: their state, and what follows from what their supervisors observe. No I/O: decisions are returned as effects."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from sandbox_server.backends.base import BackendTraits, CreateFailed, RateLimited
from sandbox_server.core.clock import Clock
from sandbox_server.core.lifecycle import SandboxEvent
from sandbox_server.core.types import Lease, LeaseState, PoolId, PoolSpec, SandboxState, SlotState
from sandbox_server.link.agent_reports import AgentReport, SlotReport
from sandbox_server.pool.fleet import observed as observations
from sandbox_server.pool.fleet import plan as planning
from sandbox_server.pool.fleet.effects import (
    AnnounceLeaseEnd,
    CountMetric,
    DestroySandbox,
    Effect,
    PublishEvent,
    RecordSandbox,
    RefuseUnservableWaiters,
    WaitForAdoptedCalls,
)
from sandbox_server.pool.fleet.sandbox import Sandbox
from sandbox_server.pool.leasing.held_lease import ResetOrder
from sandbox_server.pool.leasing.lease_book import LeaseBook
from sandbox_server.store.base import SandboxRecord

log = logging.getLogger(__name__)

#: A sandbox that ends sooner than this counts as a failed creation, so that a crash loop is slowed down as well.
SHORT_LIFE_S = 10.0
#: A slot whose reset takes longer than this is quarantined.
RESET_LIMIT_S = 120.0


class Fleet:
    """The sandboxes of one pool that are being created, serve leases or are being destroyed.

    Args:
        pool_id: the pool.
        book: the pool's leases and slots.
        traits: the traits of the pool's backend.
        clock: monotonic and wall time.
        jitter: returns a random number from 0 to 1, which spreads the pauses after failed creations.

    Attributes:
        sandboxes: every sandbox that the backend may still have, by id.
        adopting: the ids of adopted sandboxes whose agents have not reported their slots yet.
        last_error: why the last sandbox failed; None once one has connected.
        permanent_error: why no sandbox can be created until something is changed; None if one can.
        creating_fails: whether the last creation failed. A rate limit is not a failure.
        retry_at: the earliest monotonic time of the next creation.
        last_report: what the agent that connected last has reported about itself.
    """

    def __init__(self, pool_id: PoolId, book: LeaseBook, traits: BackendTraits, clock: Clock, jitter: Callable[[], float]) -> None:
        self.pool_id = pool_id
        self.sandboxes: dict[str, Sandbox] = {}
        self.adopting: set[str] = set()
        self.last_error: str | None = None
        self.permanent_error: str | None = None
        self.creating_fails = False
        self.retry_at = 0.0
        self.last_report: AgentReport | None = None
        self._book = book
        self._traits = traits
        self._clock = clock
        self._jitter = jitter
        self._failures = 0
        #: adopted leases under which calls of an earlier service may still run, by sandbox id
        self._unconfirmed_leases: dict[str, set[str]] = {}

    # What the pool asks for.

    def add_sandbox(self, sandbox_id: str, spec: PoolSpec) -> tuple[Sandbox, list[Effect]]:
        """Add a sandbox that is to be created.

        Args:
            sandbox_id: its id.
            spec: the spec that it is created from.
        """
        end_is_known = not self._traits.ends_sandboxes
        pool = self.pool_id
        sandbox = Sandbox(sandbox_id=sandbox_id, pool=pool.name, pool_tenant=pool.tenant, spec=spec, created_wall=self._clock.wall(), end_is_known=end_is_known)
        self.sandboxes[sandbox_id] = sandbox
        return sandbox, [self._record(sandbox), _event("starting", sandbox)]

    def adopt_sandboxes(self, records: Iterable[SandboxRecord], spec: PoolSpec) -> None:
        """Take over the sandboxes of an earlier service. Those whose creation was not finished will be destroyed.

        Call it before the lease book is restored.

        Args:
            records: the records of the sandboxes.
            spec: the pool's spec, for records that have none.
        """
        for record in records:
            sandbox = Sandbox.restored(record, spec, self._clock)
            sandbox.end_is_known = not self._traits.ends_sandboxes
            if sandbox.boot is None or sandbox.state is SandboxState.FAILED:
                sandbox.destroying = True
                if sandbox.state is SandboxState.STARTING:
                    sandbox.apply_event(SandboxEvent.DRAIN)
            else:
                self.adopting.add(sandbox.sandbox_id)
                self._book.add_sandbox(sandbox.sandbox_id)
                # None of its slots is leased before its agent has reported them.
                self._book.table.cordon_sandbox(sandbox.sandbox_id)
            self.sandboxes[sandbox.sandbox_id] = sandbox

    def hold_adopted_leases(self) -> None:
        """Let no adopted lease expire before its agent has reported whether calls of the earlier service still run."""
        for lease_id, held_lease in self._book.held.items():
            held_lease.calls_unknown = True
            self._unconfirmed_leases.setdefault(held_lease.lease.sandbox_id, set()).add(lease_id)

    def drain_sandbox(self, sandbox: Sandbox, reason: str, *, by: str | None = None) -> list[Effect]:
        """Give a sandbox no new leases. The plan retires it when its last lease ends.

        Args:
            sandbox: the sandbox.
            reason: why, as shown to clients.
            by: the tenant that asked for it; None for the service itself.
        """
        sandbox.reason = reason
        sandbox.apply_event(SandboxEvent.DRAIN)
        if sandbox.sandbox_id in self._book.table.slots_by_sandbox:
            self._book.table.cordon_sandbox(sandbox.sandbox_id)
        return [self._record(sandbox), _event("draining", sandbox, detail=reason, by=by)]

    def retire_sandbox(self, sandbox: Sandbox, reason: str) -> list[Effect]:
        """Destroy a sandbox now. Its leases end as lost.

        Args:
            sandbox: the sandbox.
            reason: why, as shown to the holders of its leases.
        """
        if sandbox.destroying:
            return []
        effects = [] if sandbox.state is SandboxState.DRAINING else self.drain_sandbox(sandbox, reason)
        sandbox.destroying = True
        return [*effects, *self._end_leases(sandbox, reason), DestroySandbox(sandbox.sandbox_id)]

    def note_resets(self, orders: Iterable[ResetOrder]) -> None:
        """Note that slots begin to be reset: from then on their sandboxes may be idle."""
        for order in orders:
            self.sandboxes[order.ref.sandbox_id].idle_since = self._clock.monotonic()

    def clear_backoff(self) -> None:
        """Forget failed creations once a sandbox has run long enough to show that creating works."""
        now = self._clock.monotonic()
        if self._failures and any(s.state is SandboxState.READY and now - (s.ready_at or now) >= SHORT_LIFE_S for s in self.sandboxes.values()):
            self._failures = 0

    def forget_creation_errors(self) -> None:
        """Forget all errors of creations: the spec has changed, and what failed before may work now."""
        self._failures, self.retry_at, self.permanent_error, self.last_error = 0, 0.0, None, None
        self.creating_fails = False

    # What supervisors have observed.

    def apply(self, observed: observations.Observed) -> list[Effect]:
        """Apply what a supervisor has observed to the state of the fleet.

        Args:
            observed: the observation. One about a sandbox that is no longer known changes nothing.

        Returns:
            What the pool has to do about it.
        """
        sandbox = self.sandboxes.get(observed.sandbox_id)
        if sandbox is None:
            return []
        match observed:
            case observations.CheckpointReached():
                sandbox.handle = observed.handle
                return [self._record(sandbox)]
            case observations.SandboxConnected():
                return [] if sandbox.destroying else self._connect_sandbox(sandbox, observed)
            case observations.SandboxDisconnected():
                return self._disconnect_sandbox(sandbox)
            case observations.SandboxEndTimeObserved():
                return self._set_end_time(sandbox, observed.ends_at)
            case observations.SandboxFailed():
                return self._fail_sandbox(sandbox, observed.error)
            case observations.SandboxDestroyed():
                return self._remove_sandbox(sandbox)
            case observations.SlotsObserved():
                return self._apply_slot_reports(sandbox, observed)
            case observations.ResetFailed():
                return self._quarantine_slot(observed)
            case observations.CacheDropEnded():
                return self._finish_cache_drop(sandbox, observed)
            case observations.AdoptedCallsEnded():
                return self._confirm_adopted_lease(sandbox, observed)

    def _connect_sandbox(self, sandbox: Sandbox, observed: observations.SandboxConnected) -> list[Effect]:
        report, now = observed.report, self._clock.monotonic()
        sandbox.agent, sandbox.boot, sandbox.isolation = observed.agent, report.boot, report.isolation
        self.last_report = report
        self._book.order.exclusive = report.isolation == "none"
        effects: list[Effect] = []
        if sandbox.state is SandboxState.STARTING:
            sandbox.apply_event(SandboxEvent.CONNECT)
            sandbox.ready_at = now
            self.last_error = self.permanent_error = None
            self.creating_fails = False
            effects += [_count_create(sandbox, "ok"), _event("ready", sandbox)]
        if sandbox.idle_since is None:
            sandbox.idle_since = now
        if sandbox.sandbox_id not in self._book.table.slots_by_sandbox:
            self._book.add_sandbox(sandbox.sandbox_id)
            if sandbox.state is not SandboxState.READY or not sandbox.end_is_known:
                self._book.table.cordon_sandbox(sandbox.sandbox_id)
        self._repeat_resets(sandbox)
        held = (self._book.held.get(lease_id) for lease_id in self._unconfirmed_leases.get(sandbox.sandbox_id, ()))
        effects += [WaitForAdoptedCalls(held_lease.lease) for held_lease in held if held_lease is not None]
        for cache in sandbox.caches.values():
            cache.dropping = False
        sandbox.notify_waiters()
        return [*effects, self._record(sandbox)]

    def _repeat_resets(self, sandbox: Sandbox) -> None:
        """Order again the resets that were cut off when the link was lost. Resetting a slot to one epoch twice is resetting it once."""
        for slot in self._book.table.slots_by_sandbox[sandbox.sandbox_id].slots.values():
            if slot.state is SlotState.RESETTING and not slot.fresh:
                self._book.resets.append(ResetOrder(ref=slot.ref, epoch=slot.epoch, keep=slot.keep is not None))

    def _disconnect_sandbox(self, sandbox: Sandbox) -> list[Effect]:
        if sandbox.sandbox_id in self._book.table.slots_by_sandbox:
            self._book.table.cordon_sandbox(sandbox.sandbox_id)
        sandbox.notify_waiters()
        return []

    def _set_end_time(self, sandbox: Sandbox, ends_at: float | None) -> list[Effect]:
        sandbox.end_is_known = True
        sandbox.ends_at = None if ends_at is None else self._clock.monotonic() + ends_at - self._clock.wall()
        if sandbox.ends_at is not None and sandbox.sandbox_id in self._book.table.slots_by_sandbox:
            self._book.set_sandbox_end(sandbox.sandbox_id, sandbox.ends_at)
        self._open_if_ready(sandbox)
        now, min_life_s = self._clock.monotonic(), sandbox.spec.min_lease_life_s
        is_new = sandbox.ready_at is not None and now - sandbox.ready_at < SHORT_LIFE_S
        if sandbox.ends_at is None or not is_new or sandbox.ends_at - now > min_life_s:
            return []
        # The plan drains it. A next one would live no longer, so no other is created before the usual pause is over.
        life_s = sandbox.ends_at - now
        self.last_error = self.permanent_error = f"the backend ends its sandboxes after {life_s:.0f} s, and min_lease_life_s is {min_life_s:.10g}: lower it"
        self.retry_at = now + planning.BACKOFF_MAX_S
        return [RefuseUnservableWaiters()]

    def _fail_sandbox(self, sandbox: Sandbox, error: Exception) -> list[Effect]:
        now = self._clock.monotonic()
        created, is_rate_limited = sandbox.ready_at is not None, isinstance(error, RateLimited)
        self.last_error = sandbox.reason = str(error)
        sandbox.destroying = True
        effects: list[Effect] = []
        if not created:
            effects.append(_count_create(sandbox, "limited" if is_rate_limited else "failed"))
            self.creating_fails = self.creating_fails or not is_rate_limited
        is_short_lived = not created or now - (sandbox.ready_at or now) < SHORT_LIFE_S
        if not is_rate_limited and is_short_lived and now >= self.retry_at:
            self._failures += 1
            self.retry_at = now + planning.backoff_s(self._failures, self._jitter)
        sandbox.apply_event(SandboxEvent.FAIL)
        effects += [_event("failed", sandbox, detail=str(error)), *self._end_leases(sandbox, str(error))]
        if isinstance(error, CreateFailed) and error.permanent:
            self.permanent_error = error.detail
            self.retry_at = now + planning.BACKOFF_MAX_S
            effects.append(RefuseUnservableWaiters())
        log.warning("sandbox failed: %s", error, extra=sandbox.fields)
        return [*effects, self._record(sandbox)]

    def _remove_sandbox(self, sandbox: Sandbox) -> list[Effect]:
        sandbox.apply_event(SandboxEvent.DESTROY)
        del self.sandboxes[sandbox.sandbox_id]
        return [self._record(sandbox), _event("gone", sandbox)]

    def _apply_slot_reports(self, sandbox: Sandbox, observed: observations.SlotsObserved) -> list[Effect]:
        if observed.effective is not None and self.last_report is not None:
            self.last_report = replace(self.last_report, effective=observed.effective)
        if sandbox.sandbox_id not in self._book.table.slots_by_sandbox:
            return []  # the sandbox was retired before this report was applied
        effects = [effect for report in observed.slots for effect in self._apply_slot_report(sandbox, report)]
        self.adopting.discard(sandbox.sandbox_id)
        self._open_if_ready(sandbox)
        return effects

    def _open_if_ready(self, sandbox: Sandbox) -> None:
        """Uncordon a sandbox that is READY and reachable, whose agent has reported its slots, and whose end is known."""
        is_listed = sandbox.sandbox_id in self._book.table.slots_by_sandbox and sandbox.sandbox_id not in self.adopting
        if is_listed and sandbox.state is SandboxState.READY and sandbox.reachable and sandbox.end_is_known:
            self._book.table.uncordon_sandbox(sandbox.sandbox_id)

    def _apply_slot_report(self, sandbox: Sandbox, report: SlotReport) -> Sequence[Effect]:
        sandbox_slots = self._book.table.slots_by_sandbox[sandbox.sandbox_id]
        if report.ref.slot_id not in sandbox_slots.slots and len(sandbox_slots.slots) >= sandbox.spec.slots_per_sandbox:
            log.warning("an agent reports more slots than its sandbox has", extra=sandbox.fields)
            return []
        slot = self._book.observe_slot(report.ref, max(report.epoch, 1), report.workspace, report.isolation or sandbox.isolation)
        detail = report.detail or f"its agent says that it is {report.state}"
        if report.state == "quarantined" or (report.state == "broken" and slot.fresh):
            return self._quarantine_slot(observations.ResetFailed(ref=report.ref, epoch=slot.epoch, problem=detail))
        if report.epoch > slot.epoch:
            return _announce_loss(self._book.accept_newer_epoch(report.ref, report.epoch))
        if report.state == "broken" and report.epoch == slot.epoch:
            return _announce_loss(self._book.reset_broken_slot(report.ref, f"the slot's own init died: {detail}", report.evidence))
        if report.state == "ready":
            self._book.mark_clean(report.ref, report.epoch)
        return []

    def quarantine_stuck_slots(self, now: float) -> list[Effect]:
        """Quarantine every slot whose reset takes longer than `RESET_LIMIT_S`.

        Args:
            now: the monotonic time.
        """
        if not self._book.table.counts[SlotState.RESETTING]:
            return []
        problem = f"its reset did not end within {RESET_LIMIT_S:g} s"
        stuck = [slot for slot in self._book.table if slot.state is SlotState.RESETTING and slot.since <= now - RESET_LIMIT_S]
        return [effect for slot in stuck for effect in self.apply(observations.ResetFailed(ref=slot.ref, epoch=slot.epoch, problem=problem))]

    def _quarantine_slot(self, failed: observations.ResetFailed) -> list[Effect]:
        slot = self._book.table.get(failed.ref)
        if slot is None or slot.epoch != failed.epoch or slot.state is SlotState.QUARANTINED:
            return []
        where = {**self.pool_id.fields, "sandbox_id": failed.ref.sandbox_id, "slot_id": failed.ref.name}
        log.warning("slot in quarantine: %s", failed.problem, extra=where)
        return [
            CountMetric(name="sandbox_slot_dirty_total", labels=self.pool_id.labels),
            PublishEvent(kind="slot.quarantined", data={"detail": failed.problem, **where}),
            *_announce_loss(self._book.quarantine_slot(failed.ref, failed.problem)),
        ]

    def _finish_cache_drop(self, sandbox: Sandbox, observed: observations.CacheDropEnded) -> list[Effect]:
        cache = observed.cache
        cache.dropping = False
        # A lease may have asked for the cache again meanwhile; then it is another one.
        if observed.is_gone and sandbox.caches.get(cache.record.key) is cache:
            del sandbox.caches[cache.record.key]
            return [self._record(sandbox)]
        return []

    def _confirm_adopted_lease(self, sandbox: Sandbox, observed: observations.AdoptedCallsEnded) -> list[Effect]:
        unconfirmed = self._unconfirmed_leases.get(sandbox.sandbox_id)
        if unconfirmed is not None and observed.lease_id in unconfirmed:
            unconfirmed.discard(observed.lease_id)
            self._book.lease_index.confirm_calls_ended(observed.lease_id, self._clock.monotonic() if observed.calls_ran else None)
        return []

    def _end_leases(self, sandbox: Sandbox, reason: str) -> list[Effect]:
        self.adopting.discard(sandbox.sandbox_id)
        self._unconfirmed_leases.pop(sandbox.sandbox_id, None)
        lost: list[Lease] = []
        if sandbox.sandbox_id in self._book.table.slots_by_sandbox:
            lost = self._book.remove_sandbox(sandbox.sandbox_id, reason)
        sandbox.notify_waiters()
        return [AnnounceLeaseEnd(lease) for lease in lost]

    def _record(self, sandbox: Sandbox) -> RecordSandbox:
        return RecordSandbox(sandbox.record(self._clock))


def _announce_loss(lease: Lease | None) -> list[Effect]:
    return [AnnounceLeaseEnd(lease)] if lease is not None and lease.state is LeaseState.SANDBOX_LOST else []


def _event(name: str, sandbox: Sandbox, **data: Any) -> PublishEvent:
    return PublishEvent(kind=f"sandbox.{name}", data={**sandbox.fields, **data})


def _count_create(sandbox: Sandbox, outcome: str) -> CountMetric:
    return CountMetric(name="sandbox_backend_calls_total", labels={"backend": sandbox.spec.backend, "op": "create", "outcome": outcome})
