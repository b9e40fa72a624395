"""The lease book of one pool: slots, leases, who waits, and the rule by which they meet. Synchronous; every method is one step, no I/O.

A method that decides something leaves the work it causes in `resets` (slots that an agent must reset) and records what changed.
Who is served next is `ServingOrder`'s to say, and for whom slots are held `Claims`'.
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
from sandbox_server.pool.leasing.claims import CLAIM_AFTER_S, Claims
from sandbox_server.pool.leasing.ended_leases import EndedLeases
from sandbox_server.pool.leasing.held_lease import HeldLease, LeaseIndex, ResetOrder
from sandbox_server.pool.leasing.serving_order import ServingOrder
from sandbox_server.pool.leasing.slot_table import Holder, Slot, SlotTable
from sandbox_server.pool.leasing.wait_queue import Waiter, WaitQueue
from sandbox_server.store.base import Record, SlotRecord

KEPT_S = 60.0
GRACE_S = 60.0
FIRST_EPOCH = 1
NOBODY: Holder = ("", None)
NO_EVIDENCE: Mapping[str, Any] = MappingProxyType({})


class LeaseBook:
    """Who has which slot of one pool, and who waits.

    Args:
        pool: which pool it is.
        spec: the pool's spec; may be replaced.
        clock: monotonic time rules deadlines, wall time is for what a client reads.
        record: takes every change that must outlive a crash.
        weight: a tenant's weight, more than 0.
        new_lease_id: makes ids that nobody can guess.
        ended: where ended leases are remembered, if that outlives the pool.
        claim_after_s: how long a tenant's first waits before slots may be held for it, in seconds.
        admits: whether its tenant's own limits let an acquire be served now; who is not admitted waits, and nothing is held for it.
        capacity: how many slots the pool could give at once at best; nothing is held for an acquire of more.
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
        self.table = SlotTable(self._slot_changed)
        self.line = WaitQueue()
        self.lease_index = LeaseIndex()
        self.held = self.lease_index.by_id
        self.leased_by = self.lease_index.by_tenant
        self.claims = Claims(self.line, clock, claim_after_s, admits, capacity, self.leased_by)
        self.order = ServingOrder(self.table, self.line, self.claims, self.leased_by, clock, weight, admits)
        self.ended = EndedLeases(record) if ended is None else ended
        self.resets: list[ResetOrder] = []
        self._pool = pool
        self._clock = clock
        self._record = record
        self._weight = weight
        self._new_lease_id = new_lease_id
        self._seq = itertools.count()

    # Sandboxes and slots, as their agents show them.

    def add_sandbox(self, sandbox_id: str) -> None:
        """A sandbox whose slots will be shown one by one."""
        self.table.add_shelf(sandbox_id)

    def set_sandbox_end(self, sandbox_id: str, ends_at: float) -> None:
        """Let no lease that begins or is renewed from now on outlive its sandbox, which its backend ends at `ends_at`, monotonic."""
        self.table.slots_by_sandbox[sandbox_id].ends_at = ends_at

    def remove_sandbox(self, sandbox_id: str, detail: str) -> list[Lease]:
        """A sandbox is over, and so are its leases. Returns them as they ended."""
        lost = [slot.lease_id for slot in self.table.remove_shelf(sandbox_id) if slot.lease_id is not None]
        return [self._end(self.held[lease_id], LeaseState.SANDBOX_LOST, detail) for lease_id in lost]

    def slot_seen(self, ref: SlotRef, epoch: int, workspace: str, isolation: str) -> Slot:
        """An agent shows a slot. A new one is not handed out before it is `cleaned`."""
        slot = self.table.get(ref)
        if slot is None:
            slot = Slot(ref=ref, epoch=epoch, workspace=workspace, isolation=isolation, since=self._clock.monotonic())
            self.table.add(slot)
        elif slot.state in (SlotState.RESETTING, SlotState.READY) and isolation:
            slot.workspace, slot.isolation = workspace, isolation
        return slot

    def cleaned(self, ref: SlotRef, epoch: int) -> bool:
        """An agent says that the slot's reset to this epoch is proven. Returns whether that was news."""
        slot = self.table.get(ref)
        if slot is None or slot.state is not SlotState.RESETTING or slot.epoch != epoch:
            return False
        slot.since = self._clock.monotonic()
        self.table.move(slot, SlotEvent.KEEP if slot.keep is not None else SlotEvent.CLEAN)
        return True

    def dirty(self, ref: SlotRef, detail: str) -> Lease | None:
        """The slot cannot be proven clean, or the agent will not have it used. Returns the lease that this ended."""
        slot = self.table.get(ref)
        if slot is None or slot.state is SlotState.QUARANTINED:
            return None
        lease = self._end_of_slot(slot, detail)
        slot.detail = detail
        if lease is not None:
            self.table.move(slot, SlotEvent.RELEASE)
        self.table.move(slot, SlotEvent.DIRTY)
        return lease

    def broken(self, ref: SlotRef, detail: str, evidence: Mapping[str, Any]) -> Lease | None:
        """The slot's init died, and `evidence` says what is known of why. It is reset, and its lease, returned here, has ended with it."""
        slot = self.table.get(ref)
        if slot is None or slot.state in (SlotState.QUARANTINED, SlotState.RESETTING):
            return None
        lease = self._end_of_slot(slot, detail, evidence)
        self._reset(slot, SlotEvent.RECLAIM if lease is None else SlotEvent.RELEASE, keep=None)
        return lease

    def overtaken(self, ref: SlotRef, epoch: int) -> Lease | None:
        """Its agent is in a later epoch than any that is on record: whatever holds it has lost it. It is reset; the lease that this ended is returned."""
        slot = self.table.get(ref)
        if slot is None or slot.state is SlotState.QUARANTINED or epoch <= slot.epoch:
            return None
        lease = self._end_of_slot(slot, "its slot has moved on")
        slot.epoch, slot.fresh = epoch, False
        if slot.state is SlotState.RESETTING:
            slot.epoch += 1
            self.table.unkeep(slot)
            self.resets.append(ResetOrder(ref=ref, epoch=slot.epoch, keep=False))
        else:
            self._reset(slot, SlotEvent.RECLAIM if lease is None else SlotEvent.RELEASE, keep=None)
        return lease

    def reclaim_free(self) -> list[ResetOrder]:
        """Take every free slot out of hand, for one reset to be asked of its agent by the caller; none while they are held for a claimant."""
        if self.claims.claimant is not None:
            return []
        free = [slot for sandbox_slots in self.table.slots_by_sandbox.values() if sandbox_slots.open for slot in sandbox_slots.ready.values()]
        return [self._begin_reset(slot, SlotEvent.RECLAIM, keep=None) for slot in free]

    def _end_of_slot(self, slot: Slot, detail: str, evidence: Mapping[str, Any] = NO_EVIDENCE) -> Lease | None:
        if slot.lease_id is None:
            return None
        lease = self._end(self.held[slot.lease_id], LeaseState.SANDBOX_LOST, detail, evidence)
        slot.lease_id = None
        return lease

    # Waiting and being served.

    def enqueue(self, request: AcquireRequest, wait_s: float) -> Waiter:
        """Queue a request. `assign` may serve it at once."""
        now = self._clock.monotonic()
        waiter = Waiter(request=request, seq=next(self._seq), arrived=now, deadline=now + wait_s, weight=self._weight(request.tenant))
        self.line.add(waiter, now)
        return waiter

    def requeue(self, waiter: Waiter) -> None:
        """What it was granted came to nothing before it was told: it waits again, at its old place and to its old deadline, which is still to come."""
        waiter.leases = ()
        self.line.add(waiter, self._clock.monotonic())

    def abandon(self, waiter: Waiter) -> None:
        """It does not want to wait any more."""
        if waiter.waiting:
            self.line.remove(waiter, self._clock.monotonic())

    def overdue(self) -> list[Waiter]:
        """Those who have waited as long as they would; they are still in the line."""
        return self.line.overdue(self._clock.monotonic())

    def assign(self) -> list[Waiter]:
        """Choose the claimant, and serve whoever can be served now, in order. Returns them with their leases filled in."""
        served: list[Waiter] = []
        blocked: dict[str, Waiter] = {}
        self.claims.update()
        while self.table.free or self.table.counts[SlotState.KEPT]:
            waiter = self.order.next(blocked)
            if waiter is None:
                break
            if self.order.may_have(waiter, others_wait=bool(blocked)):
                self._grant(waiter)
                served.append(waiter)
                self.claims.update()
                continue
            blocked[waiter.request.tenant] = waiter
            if waiter is self.claims.claimant:
                self._reclaim_for([waiter])
            if self.order.exclusive:
                break
        if blocked:
            self._reclaim_for(blocked.values())
        return served

    def held_slots(self) -> int:
        """How many slots are held for the claimant."""
        claimant = self.claims.claimant
        return 0 if claimant is None else self.table.free + len(self.order.kept_for(claimant.request))

    def _reclaim_for(self, blocked: Collection[Waiter]) -> None:
        for slot in self.order.to_reclaim(blocked):
            self._reset(slot, SlotEvent.RECLAIM, keep=None)

    def _grant(self, waiter: Waiter) -> None:
        request = waiter.request
        self.line.remove(waiter, self._clock.monotonic())
        self.order.holder = (request.tenant, request.run_id)
        kept = self.order.kept_for(request)
        mono, wall = self._clock.monotonic(), self._clock.wall()
        waiter.leases = tuple(
            self._lease_slot(kept[index] if index < len(kept) else self.table.next_free(), request, index, mono, wall) for index in range(request.count)
        )

    def _lease_slot(self, slot: Slot, request: AcquireRequest, index: int, mono: float, wall: float) -> Lease:
        was_kept = slot.state is SlotState.KEPT
        sandbox_ends_at = self.table.slots_by_sandbox[slot.ref.sandbox_id].ends_at
        deadline = min(mono + request.ttl_s, sandbox_ends_at)
        lease = Lease(
            lease_id=self._new_lease_id(),
            epoch=slot.epoch,
            pool=self._pool.name,
            pool_tenant=self._pool.tenant,
            sandbox_id=slot.ref.sandbox_id,
            slot_id=slot.ref.slot_id,
            tenant=request.tenant,
            trajectory_id=request.trajectory_ids[index] if index < len(request.trajectory_ids) else None,
            run_id=request.run_id,
            state=LeaseState.HELD,
            ttl_s=request.ttl_s,
            acquired_at=wall,
            expires_at=min(wall + request.ttl_s, wall + sandbox_ends_at - mono),
            workspace=slot.workspace,
            isolation=slot.isolation,
            allow_network=self.spec.slots_have_network and request.allow_network is not False,
            cache=request.cache,
            workspace_kept=was_kept,
            sandbox_ends_at=None if sandbox_ends_at == float("inf") else wall + sandbox_ends_at - mono,
            labels=request.labels,
        )
        slot.lease_id = lease.lease_id
        self.table.move(slot, SlotEvent.GRANT)
        self.lease_index.add(HeldLease(lease, deadline=deadline))
        self._record(lease)
        return lease

    # Ending.

    def release(self, lease_id: str, *, keep: bool = False, state: LeaseState = LeaseState.RELEASED, detail: str = "released") -> Lease:
        """End a held lease and have its slot reset. `keep`: for its run, if it has one, the files stay."""
        held_lease = self.held[lease_id]
        slot = self.table.get(held_lease.lease.slot)
        assert slot is not None, "a held lease has a slot"
        lease = self._end(held_lease, state, detail)
        slot.lease_id = None
        self._reset(slot, SlotEvent.RELEASE, keep=(lease.tenant, lease.run_id) if keep and lease.run_id is not None else None)
        return lease

    def reclaim_run(self, tenant: str, run_id: str) -> None:
        """The run is over: nothing is kept for it any more."""
        for slot in self.table.kept_for((tenant, run_id)):
            self._reset(slot, SlotEvent.RECLAIM, keep=None)

    def expire(self) -> list[Lease]:
        """End what is past its time: leases, kept slots, the memory of ended leases. Returns the leases."""
        now = self._clock.monotonic()
        expired = [
            self.release(due.lease.lease_id, state=LeaseState.EXPIRED, detail=f"expired: not renewed for its ttl_s of {due.lease.ttl_s:g} s")
            for due in self.lease_index.take_due(now)
        ]
        for slot in list(itertools.takewhile(lambda slot: slot.since + KEPT_S <= now, self.table.kept())):
            self._reset(slot, SlotEvent.RECLAIM, keep=None)
        self.ended.purge(now)
        return expired

    def next_due(self) -> float:
        """When `expire`, `overdue` or `assign` may have something to do although nothing happens, monotonic."""
        due = [self.lease_index.next_due(), self.line.next_overdue(), self.claims.next_due()]
        due.extend(slot.since + KEPT_S for slot in itertools.islice(self.table.kept(), 1))
        return min(due)

    def _end(self, held_lease: HeldLease, state: LeaseState, detail: str, evidence: Mapping[str, Any] = NO_EVIDENCE) -> Lease:
        lease = replace(held_lease.lease, state=state, ended_at=self._clock.wall(), end_detail=detail, end_evidence=dict(evidence))
        self.lease_index.remove(lease)
        self.ended.add(lease, self._clock.monotonic())
        return lease

    def _reset(self, slot: Slot, event: SlotEvent, keep: Holder | None) -> None:
        self.resets.append(self._begin_reset(slot, event, keep))

    def _begin_reset(self, slot: Slot, event: SlotEvent, keep: Holder | None) -> ResetOrder:
        # The next holder's epoch starts here: from now on the agent refuses whatever still comes from the last one.
        slot.epoch += 1
        slot.since = self._clock.monotonic()
        self.table.move(slot, event, keep)
        return ResetOrder(ref=slot.ref, epoch=slot.epoch, keep=keep is not None)

    # Holding.

    def renew(self, lease_id: str, ttl_s: float) -> Lease:
        """Let a held lease last at least `ttl_s` from now; never shortens."""
        held_lease = self.held[lease_id]
        sandbox_ends_at = self.table.slots_by_sandbox[held_lease.lease.sandbox_id].ends_at
        held_lease.deadline = max(held_lease.deadline, min(self._clock.monotonic() + ttl_s, sandbox_ends_at))
        ttl_s = max(ttl_s, held_lease.deadline - self._clock.monotonic())
        held_lease.lease = replace(held_lease.lease, ttl_s=ttl_s, expires_at=wall_at(self._clock, held_lease.deadline))
        self._record(held_lease.lease)
        return held_lease.lease

    def narrowed(self, lease_id: str, *, allow_network: bool, cache: str) -> Lease:
        """A held lease has lost rights."""
        held_lease = self.held[lease_id]
        held_lease.lease = replace(held_lease.lease, allow_network=allow_network, cache=cache, expires_at=wall_at(self._clock, held_lease.deadline))
        self._record(held_lease.lease)
        return held_lease.lease

    def call_started(self, lease_id: str) -> None:
        """A call runs in this lease; it does not expire under it. Nothing happens if it has ended."""
        self.lease_index.call_started(lease_id)

    def call_ended(self, lease_id: str) -> None:
        """The other end of `call_started`."""
        self.lease_index.call_ended(lease_id, self._clock.monotonic())

    # After a crash.

    def restore(self, slots: Sequence[SlotRecord], leases: Sequence[Lease]) -> None:
        """Fill an empty book from what was recorded; its sandboxes must have been added. Leases that held get a grace; what was being reset is again."""
        now, wall = self._clock.monotonic(), self._clock.wall()
        held = {lease.slot: lease for lease in leases if lease.state is LeaseState.HELD}
        for record in slots:
            slot = Slot(ref=record.ref, epoch=record.epoch, workspace=record.workspace, isolation=record.isolation, since=now)
            slot.state, slot.keep = record.state, record.keep
            # A slot that was never clean yet has nothing to reset: its agent shows when its first body is there.
            slot.fresh = slot.state is SlotState.RESETTING and slot.epoch <= FIRST_EPOCH
            holder = held.get(record.ref)
            if holder is not None and holder.epoch == record.epoch and slot.state is SlotState.LEASED:
                del held[record.ref]
                slot.lease_id = holder.lease_id
                # No longer than it was given: a clock that was set back meanwhile makes no lease immortal.
                left_s = min(max(holder.expires_at - wall, min(holder.ttl_s, GRACE_S)), holder.ttl_s)
                holder = replace(holder, expires_at=wall + left_s)
                self.lease_index.add(HeldLease(holder, deadline=now + left_s))
                self._record(holder)
                self.order.holder = (holder.tenant, holder.run_id)
            elif slot.state is not SlotState.READY and self.order.holder is None:
                # Whose it was is not known: where one tenant and run is served at a time, nobody is before it is clean.
                self.order.holder = slot.keep or NOBODY
            self.table.add(slot)
            self._settle_restored(slot)
        for lease in held.values():
            self.ended.add(
                replace(lease, state=LeaseState.SANDBOX_LOST, ended_at=wall, end_detail="its slot was not on record when the service came back"), now
            )

    def _settle_restored(self, slot: Slot) -> None:
        if slot.state is SlotState.LEASED and slot.lease_id is None:
            self._reset(slot, SlotEvent.RELEASE, keep=None)
        elif slot.state is SlotState.RESETTING and not slot.fresh:
            self.resets.append(ResetOrder(ref=slot.ref, epoch=slot.epoch, keep=slot.keep is not None))

    def _slot_changed(self, slot: Slot) -> None:
        self._record(slot.record(self._pool))
