"""Reads the state of a pool for its plan and for the view of its claimant. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterable

from sandbox_server.core.types import ClaimantView, PoolSpec, SandboxState, SlotState
from sandbox_server.pool.fleet.plan import SandboxSnapshot, Snapshot, is_outdated
from sandbox_server.pool.fleet.sandbox import Sandbox
from sandbox_server.pool.leasing.lease_book import LeaseBook


def take_snapshot(spec: PoolSpec, sandboxes: Iterable[Sandbox], book: LeaseBook, retry_at: float, *, closing: bool) -> Snapshot:
    """Take the snapshot that the plan decides from.

    Args:
        spec: the pool's spec.
        sandboxes: the pool's sandboxes.
        book: the pool's slots and waiters.
        retry_at: the earliest monotonic time of the next creation.
        closing: whether the pool is to have no sandboxes any more.
    """
    seen = [_snapshot_of(sandbox, book, spec) for sandbox in sandboxes]
    return Snapshot(spec=spec, sandboxes=seen, slots_wanted=book.queue.slots_wanted, retry_at=retry_at, closing=closing)


def capacity(spec: PoolSpec, sandboxes: Iterable[Sandbox], book: LeaseBook, *, can_grow: bool) -> int:
    """How many slots a pool could lease at once if every lease had ended.

    Args:
        spec: the pool's spec.
        sandboxes: the pool's sandboxes.
        book: the pool's slots.
        can_grow: whether new sandboxes can be created, up to `max_sandboxes`, in place of those that are destroyed.
    """
    ready = [sandbox for sandbox in sandboxes if sandbox.state is SandboxState.READY]
    quarantined = sum(book.table.slots_by_sandbox[s.sandbox_id].counts[SlotState.QUARANTINED] for s in ready if s.sandbox_id in book.table.slots_by_sandbox)
    count = spec.max_sandboxes if can_grow else min(len(ready), spec.max_sandboxes)
    return count * spec.slots_per_sandbox - quarantined


def claimant_view(book: LeaseBook, now: float) -> ClaimantView | None:
    """The view of the acquire that a pool holds free slots for; None if there is none.

    Args:
        book: the pool's slots and waiters.
        now: the monotonic time.
    """
    claimant = book.claims.claimant
    if claimant is None:
        return None
    request = claimant.request
    return ClaimantView(
        tenant=request.tenant, run_id=request.run_id, count=request.count, held_slots=book.held_slot_count(), waited_s=round(now - claimant.arrived, 3)
    )


def _snapshot_of(sandbox: Sandbox, book: LeaseBook, spec: PoolSpec) -> SandboxSnapshot:
    sandbox_slots = book.table.slots_by_sandbox.get(sandbox.sandbox_id)
    outdated = is_outdated(sandbox.spec, spec)
    if sandbox_slots is None:
        return SandboxSnapshot(sandbox_id=sandbox.sandbox_id, state=sandbox.state, destroying=sandbox.destroying, outdated=outdated)
    counts = sandbox_slots.counts
    not_shown = max(0, sandbox.spec.slots_per_sandbox - len(sandbox_slots.slots))
    is_idle = not counts[SlotState.LEASED] and not counts[SlotState.KEPT]
    return SandboxSnapshot(
        sandbox_id=sandbox.sandbox_id,
        state=sandbox.state,
        ready=counts[SlotState.READY],
        leased=counts[SlotState.LEASED],
        coming=counts[SlotState.RESETTING] + not_shown,
        kept=counts[SlotState.KEPT],
        quarantined=counts[SlotState.QUARANTINED],
        ready_at=sandbox.ready_at,
        idle_since=sandbox.idle_since if is_idle else None,
        ends_at=sandbox.ends_at,
        destroying=sandbox.destroying,
        outdated=outdated,
        max_lifetime_s=sandbox.spec.max_lifetime_s,
        max_lease_s=sandbox.spec.max_lease_s,
    )
