"""The lease book of one pool: its slots, its leases, the acquires that wait, and the rules by which slots are granted.

Every method is synchronous, makes one complete step and does no I/O. Resets that a step makes necessary are added to `resets`, for the caller to
carry out. Every change that must survive a crash is passed to `record`. Which acquire is served next is decided by `ServingOrder`, and for which
acquire slots are held by `Claims`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from sandbox_server.core.clock import Clock, wall_at
from sandbox_server.core.lifecycle import SlotEvent
from sandbox_server.core.types import AcquireRequest, Lease, LeaseState, PoolId, PoolSpec, SlotRef, SlotState
from sandbox_server.pool.leasing.claims import Claims
from sandbox_server.pool.leasing.ended_leases import EndedLeases
from sandbox_server.pool.leasing.held_lease import HeldLease, LeaseIndex, ResetOrder
from sandbox_server.pool.leasing.new_lease import new_lease
from sandbox_server.pool.leasing.restore import lease_without_slot, restored_lease, slot_from_record
from sandbox_server.pool.leasing.serving_order import ServingOrder
from sandbox_server.pool.leasing.serving_rules import CLAIM_AFTER_S, ServingRules
from sandbox_server.pool.leasing.slot_table import PoolSlot, RunKey, SlotTable
from sandbox_server.pool.leasing.wait_queue import Waiter, WaitQueue
from sandbox_server.store.base import Record, SlotRecord

#: How long the files of a released slot are kept for its run, in seconds.
KEPT_SLOT_LIMIT_S = 60.0
#: A run that differs from the run of every acquire. It is used where the run that last used a slot is not known.
UNKNOWN_RUN: RunKey = ("", None)
NO_EVIDENCE: Mapping[str, Any] = MappingProxyType({})


class LeaseBook:
    """Records which lease holds which slot of one pool, and which acquires wait.

    Args:
        pool: the id of the pool.
        spec: the pool's spec; may be replaced later.
        clock: its monotonic time is used for deadlines, its wall-clock time for the times that clients read.
        record: is called with every record that must survive a crash.
        weight: returns the weight of a tenant, more than 0.
        new_lease_id: returns a new id that cannot be guessed.
        ended: the ended leases, if they are remembered for longer than the pool exists.
        claim_after_s: how long an acquire is the first of its tenant before slots may be held for it, in seconds.
        admits: returns whether the limits of its tenant allow an acquire to be served now. If not, it waits, and nothing is held for it.
        capacity: returns how many slots the pool could grant at once at most. Nothing is held for an acquire of more.
    """

    def __init__(
        self,
        pool: PoolId,
        spec: PoolSpec,
        clock: Clock,
        record: Callable[[Record], None],
        weight: Callable[[str], float],
        new_lease_id: Callable[[], str],
        ended: EndedLeases | None = None,
        *,
        claim_after_s: float = CLAIM_AFTER_S,
        admits: Callable[[AcquireRequest], bool] = lambda request: True,
        capacity: Callable[[], float] = lambda: float("inf"),
    ) -> None:
        self.spec = spec
        self.table = SlotTable(lambda slot: record(slot.record(pool)))
        self.queue = WaitQueue()
        self.lease_index = LeaseIndex()
        self.held = self.lease_index.by_id
        self.lease_count_by_tenant = self.lease_index.count_by_tenant
        rules = ServingRules(clock=clock, weight=weight, admits=admits, capacity=capacity, claim_after_s=claim_after_s)
        self.claims = Claims(self.queue, rules, self.lease_count_by_tenant)
        self.order = ServingOrder(self.table, self.queue, self.claims, self.lease_count_by_tenant, rules)
        self.ended_leases = EndedLeases(record) if ended is None else ended
        #: the resets that are to be carried out; the caller empties the list
        self.resets: list[ResetOrder] = []
        self._pool = pool
        self._clock = clock
        self._record = record
        self._weight = weight
        self._new_lease_id = new_lease_id
        self._seq = itertools.count()

    # Sandboxes and slots, as their agents report them.

    def add_sandbox(self, sandbox_id: str) -> None:
        """Add a sandbox, whose slots are reported later."""
        self.table.add_sandbox(sandbox_id)

    def set_sandbox_end(self, sandbox_id: str, ends_at: float) -> None:
        """Let no lease that begins or is renewed from now on outlive its sandbox, which its backend ends at `ends_at`, monotonic."""
        self.table.slots_by_sandbox[sandbox_id].ends_at = ends_at

    def remove_sandbox(self, sandbox_id: str, detail: str) -> list[Lease]:
        """Remove a sandbox that was lost or destroyed, and end its leases. Returns the ended leases."""
        lost = [slot.lease_id for slot in self.table.remove_sandbox(sandbox_id) if slot.lease_id is not None]
        return [self._end_lease(self.held[lease_id], LeaseState.SANDBOX_LOST, detail) for lease_id in lost]

    def observe_slot(self, ref: SlotRef, epoch: int, workspace: str, isolation: str) -> PoolSlot:
        """Add a slot that an agent reports, or update a known one. A new slot is granted only after `mark_clean`."""
        slot = self.table.get(ref)
        if slot is None:
            slot = PoolSlot(ref=ref, epoch=epoch, workspace=workspace, isolation=isolation, since=self._clock.monotonic())
            self.table.add_slot(slot)
        elif slot.state in (SlotState.RESETTING, SlotState.READY) and isolation:
            slot.workspace, slot.isolation = workspace, isolation
        return slot

    def mark_clean(self, ref: SlotRef, epoch: int) -> bool:
        """Note that the reset of a slot has ended and was proven clean.

        Args:
            ref: the slot.
            epoch: the epoch that it was reset to.

        Returns:
            Whether this changed the slot: not if the report is repeated or belongs to an older epoch.
        """
        slot = self.table.get(ref)
        if slot is None or slot.state is not SlotState.RESETTING or slot.epoch != epoch:
            return False
        slot.since = self._clock.monotonic()
        self.table.apply_event(slot, SlotEvent.KEEP if slot.keep is not None else SlotEvent.CLEAN)
        return True

    def quarantine_slot(self, ref: SlotRef, detail: str) -> Lease | None:
        """Never grant a slot again, because it could not be proven clean or its agent refuses it. Returns the lease that this ended, if any."""
        slot = self.table.get(ref)
        if slot is None or slot.state is SlotState.QUARANTINED:
            return None
        lease = self._end_lease_of_slot(slot, detail)
        slot.detail = detail
        if lease is not None:
            self.table.apply_event(slot, SlotEvent.RELEASE)
        self.table.apply_event(slot, SlotEvent.DIRTY)
        return lease

    def reset_broken_slot(self, ref: SlotRef, detail: str, evidence: Mapping[str, Any]) -> Lease | None:
        """Reset a slot whose init process has died.

        Args:
            ref: the slot.
            detail: what happened.
            evidence: what is known about the cause.

        Returns:
            The lease that this ended, if any.
        """
        slot = self.table.get(ref)
        if slot is None or slot.state in (SlotState.QUARANTINED, SlotState.RESETTING):
            return None
        lease = self._end_lease_of_slot(slot, detail, evidence)
        self._order_reset(slot, SlotEvent.RECLAIM if lease is None else SlotEvent.RELEASE, keep=None)
        return lease

    def accept_newer_epoch(self, ref: SlotRef, epoch: int) -> Lease | None:
        """Reset a slot whose agent reports a newer epoch than the recorded one: the slot belongs to another lease by now, so the recorded lease has lost it.

        Returns:
            The lease that this ended, if any.
        """
        slot = self.table.get(ref)
        if slot is None or slot.state is SlotState.QUARANTINED or epoch <= slot.epoch:
            return None
        lease = self._end_lease_of_slot(slot, "its slot is in a newer epoch than the lease")
        slot.epoch, slot.fresh = epoch, False
        if slot.state is SlotState.RESETTING:
            slot.epoch += 1
            self.table.stop_keeping(slot)
            self.resets.append(ResetOrder(ref=ref, epoch=slot.epoch, keep=False))
        else:
            self._order_reset(slot, SlotEvent.RECLAIM if lease is None else SlotEvent.RELEASE, keep=None)
        return lease

    def reclaim_free_slots(self) -> list[ResetOrder]:
        """Start a reset of every free slot, so that none of them can be granted meanwhile. Does nothing while slots are held for a claimant.

        Returns:
            The resets, which the caller carries out itself: they are not added to `resets`.
        """
        if self.claims.claimant is not None:
            return []
        free = [slot for sandbox_slots in self.table.slots_by_sandbox.values() if not sandbox_slots.is_cordoned for slot in sandbox_slots.ready.values()]
        return [self._start_reset(slot, SlotEvent.RECLAIM, keep=None) for slot in free]

    def _end_lease_of_slot(self, slot: PoolSlot, detail: str, evidence: Mapping[str, Any] = NO_EVIDENCE) -> Lease | None:
        if slot.lease_id is None:
            return None
        lease = self._end_lease(self.held[slot.lease_id], LeaseState.SANDBOX_LOST, detail, evidence)
        slot.lease_id = None
        return lease

    # Waiting acquires.

    def enqueue(self, request: AcquireRequest, wait_s: float, arrived: float | None = None) -> Waiter:
        """Put an acquire into the queue until `wait_s` seconds after it has `arrived`, monotonic; default now. `assign_slots` may serve it at once."""
        now = self._clock.monotonic()
        arrived = now if arrived is None else arrived
        waiter = Waiter(request=request, seq=next(self._seq), arrived=arrived, deadline=arrived + wait_s, weight=self._weight(request.tenant))
        self.queue.add_waiter(waiter, now)
        return waiter

    def requeue_waiter(self, waiter: Waiter) -> None:
        """Put a waiter back, at its old position and with its old deadline, because its slots could not be prepared."""
        waiter.leases = ()
        self.queue.add_waiter(waiter, self._clock.monotonic())

    def remove_waiter(self, waiter: Waiter) -> None:
        """Take a waiter out of the queue, if it is in it."""
        if waiter.waiting:
            self.queue.remove_waiter(waiter, self._clock.monotonic())

    def overdue_waiters(self) -> list[Waiter]:
        """Return the waiters whose deadline has passed since the last call. They stay in the queue."""
        return self.queue.take_overdue(self._clock.monotonic())

    def assign_slots(self) -> list[Waiter]:
        """Choose the claimant, and grant slots to every waiter that can be served now. Returns the served waiters, with their leases."""
        served: list[Waiter] = []
        blocked: dict[str, Waiter] = {}
        self.claims.update_claimant()
        while self.table.free_count or self.table.counts[SlotState.KEPT]:
            waiter = self.order.next_waiter(blocked)
            if waiter is None:
                break
            if self.order.can_be_served(waiter, others_wait=bool(blocked)):
                self._grant(waiter)
                served.append(waiter)
                self.claims.update_claimant()
                continue
            blocked[waiter.request.tenant] = waiter
            if waiter is self.claims.claimant:
                self._reclaim_kept_slots_for([waiter])
            if self.order.exclusive:
                break
        if blocked:
            self._reclaim_kept_slots_for(blocked.values())
        return served

    def held_slot_count(self) -> int:
        """Return how many slots are held for the claimant."""
        claimant = self.claims.claimant
        return 0 if claimant is None else self.table.free_count + len(self.order.kept_for(claimant.request))

    def _reclaim_kept_slots_for(self, blocked: Collection[Waiter]) -> None:
        for slot in self.order.to_reclaim(blocked):
            self._order_reset(slot, SlotEvent.RECLAIM, keep=None)

    def _grant(self, waiter: Waiter) -> None:
        request = waiter.request
        self.queue.remove_waiter(waiter, self._clock.monotonic())
        self.order.last_served = (request.tenant, request.run_id)
        kept = self.order.kept_for(request)
        now, wall_s = self._clock.monotonic(), self._clock.wall()
        waiter.leases = tuple(
            self._lease_slot(kept[index] if index < len(kept) else self.table.next_free(), request, index, now, wall_s) for index in range(request.count)
        )

    def _lease_slot(self, slot: PoolSlot, request: AcquireRequest, index: int, now: float, wall_s: float) -> Lease:
        sandbox_ends_at = self.table.slots_by_sandbox[slot.ref.sandbox_id].ends_at
        lease = new_lease(self._new_lease_id(), self._pool, self.spec, slot, request, index, wall_s, sandbox_life_s=sandbox_ends_at - now)
        slot.lease_id = lease.lease_id
        self.table.apply_event(slot, SlotEvent.GRANT)
        self.lease_index.add_lease(HeldLease(lease, deadline=min(now + request.ttl_s, sandbox_ends_at)))
        self._record(lease)
        return lease

    # The end of leases.

    def release_lease(self, lease_id: str, *, keep: bool = False, state: LeaseState = LeaseState.RELEASED, detail: str = "released") -> Lease:
        """End a held lease, and order the reset of its slot.

        Args:
            lease_id: the lease.
            keep: whether the files stay for the run of the lease; has no effect on a lease without a run.
            state: the state in which the lease ends.
            detail: why it ended.

        Returns:
            The ended lease.
        """
        held_lease = self.held[lease_id]
        slot = self.table.get(held_lease.lease.slot)
        assert slot is not None, "a held lease has a slot"
        lease = self._end_lease(held_lease, state, detail)
        slot.lease_id = None
        self._order_reset(slot, SlotEvent.RELEASE, keep=(lease.tenant, lease.run_id) if keep and lease.run_id is not None else None)
        return lease

    def reclaim_kept_slots(self, tenant: str, run_id: str) -> None:
        """Order the reset of every slot that is kept for a run that has ended."""
        for slot in self.table.kept_for((tenant, run_id)):
            self._order_reset(slot, SlotEvent.RECLAIM, keep=None)

    def expire_leases(self) -> list[Lease]:
        """End the leases that have expired, reclaim the slots that were kept long enough, and forget old ended leases. Returns the expired leases."""
        now = self._clock.monotonic()
        expired = [
            self.release_lease(due.lease.lease_id, state=LeaseState.EXPIRED, detail=f"expired: not renewed for its ttl_s of {due.lease.ttl_s:g} s")
            for due in self.lease_index.take_expired(now)
        ]
        for slot in list(itertools.takewhile(lambda slot: slot.since + KEPT_SLOT_LIMIT_S <= now, self.table.kept())):
            self._order_reset(slot, SlotEvent.RECLAIM, keep=None)
        self.ended_leases.purge(now)
        return expired

    def next_due(self) -> float:
        """Return when `expire_leases`, `overdue_waiters` or `assign_slots` must be called again even if nothing happens, monotonic."""
        due = [self.lease_index.next_expiry(), self.queue.next_deadline(), self.claims.next_claim_at()]
        due.extend(slot.since + KEPT_SLOT_LIMIT_S for slot in itertools.islice(self.table.kept(), 1))
        return min(due)

    def _end_lease(self, held_lease: HeldLease, state: LeaseState, detail: str, evidence: Mapping[str, Any] = NO_EVIDENCE) -> Lease:
        lease = replace(held_lease.lease, state=state, ended_at=self._clock.wall(), end_detail=detail, end_evidence=dict(evidence))
        self.lease_index.remove_lease(lease)
        self.ended_leases.add_lease(lease, self._clock.monotonic())
        return lease

    def _order_reset(self, slot: PoolSlot, event: SlotEvent, keep: RunKey | None) -> None:
        self.resets.append(self._start_reset(slot, event, keep))

    def _start_reset(self, slot: PoolSlot, event: SlotEvent, keep: RunKey | None) -> ResetOrder:
        # The next holder's epoch begins here: from now on the agent refuses requests that the last holder sent.
        slot.epoch += 1
        slot.since = self._clock.monotonic()
        self.table.apply_event(slot, event, keep)
        return ResetOrder(ref=slot.ref, epoch=slot.epoch, keep=keep is not None)

    # Held leases.

    def renew_lease(self, lease_id: str, ttl_s: float) -> Lease:
        """Extend a held lease to at least `ttl_s` seconds from now. A renewal never shortens it. Returns the lease."""
        held_lease = self.held[lease_id]
        sandbox_ends_at = self.table.slots_by_sandbox[held_lease.lease.sandbox_id].ends_at
        held_lease.deadline = max(held_lease.deadline, min(self._clock.monotonic() + ttl_s, sandbox_ends_at))
        ttl_s = max(ttl_s, held_lease.deadline - self._clock.monotonic())
        held_lease.lease = replace(held_lease.lease, ttl_s=ttl_s, expires_at=wall_at(self._clock, held_lease.deadline))
        self._record(held_lease.lease)
        return held_lease.lease

    def narrow_lease(self, lease_id: str, *, allow_network: bool, cache: str, read_only: tuple[str, ...]) -> Lease:
        """Set the rights of a held lease after its agent has narrowed its slot. Returns the lease."""
        held_lease = self.held[lease_id]
        expires_at = wall_at(self._clock, held_lease.deadline)
        held_lease.lease = replace(held_lease.lease, allow_network=allow_network, cache=cache, read_only=read_only, expires_at=expires_at)
        self._record(held_lease.lease)
        return held_lease.lease

    def record_call_start(self, lease_id: str) -> None:
        """Note that a call runs in a lease, which then does not expire. Does nothing if the lease has ended."""
        self.lease_index.record_call_start(lease_id)

    def record_call_end(self, lease_id: str) -> None:
        """Note that a call has ended for which `record_call_start` was called."""
        self.lease_index.record_call_end(lease_id, self._clock.monotonic())

    # After a restart.

    def restore_leases(self, slots: Sequence[SlotRecord], leases: Sequence[Lease]) -> None:
        """Fill an empty book from the records. Its sandboxes must have been added.

        A held lease is held for a while longer, so that its client can renew it. A reset that was under way is ordered again.
        """
        now, wall_s = self._clock.monotonic(), self._clock.wall()
        held = {lease.slot: lease for lease in leases if lease.state is LeaseState.HELD}
        for record in slots:
            slot = slot_from_record(record, now)
            lease = held.get(record.ref)
            if lease is not None and lease.epoch == record.epoch and slot.state is SlotState.LEASED:
                del held[record.ref]
                slot.lease_id = lease.lease_id
                held_lease = restored_lease(lease, now, wall_s)
                self.lease_index.add_lease(held_lease)
                self._record(held_lease.lease)
                self.order.last_served = (lease.tenant, lease.run_id)
            elif slot.state is not SlotState.READY and self.order.last_served is None:
                # The run that used the slot is not known. Where only one run is served at a time, none is served before the slot is clean.
                self.order.last_served = slot.keep or UNKNOWN_RUN
            self.table.add_slot(slot)
            self._order_missing_reset(slot)
        for lease in held.values():
            self.ended_leases.add_lease(lease_without_slot(lease, wall_s), now)

    def _order_missing_reset(self, slot: PoolSlot) -> None:
        if slot.state is SlotState.LEASED and slot.lease_id is None:
            self._order_reset(slot, SlotEvent.RELEASE, keep=None)
        elif slot.state is SlotState.RESETTING and not slot.fresh:
            self.resets.append(ResetOrder(ref=slot.ref, epoch=slot.epoch, keep=slot.keep is not None))
