"""What a pool's plan must know of it. Reads, changes nothing."""

from __future__ import annotations

from collections.abc import Iterable

from sandbox_server.core.types import PoolSpec, SlotState
from sandbox_server.pool.leases import LeaseBook
from sandbox_server.pool.plan import SandboxSeen, Snapshot, is_outdated
from sandbox_server.pool.sandbox import Sandbox


def snapshot(spec: PoolSpec, sandboxes: Iterable[Sandbox], book: LeaseBook, retry_at: float, *, closing: bool) -> Snapshot:
    """What the plan must know of a pool."""
    seen = [_seen(sandbox, book, spec) for sandbox in sandboxes]
    return Snapshot(spec=spec, sandboxes=seen, slots_wanted=book.line.slots_wanted, retry_at=retry_at, closing=closing)


def _seen(sandbox: Sandbox, book: LeaseBook, spec: PoolSpec) -> SandboxSeen:
    shelf = book.table.shelves.get(sandbox.sandbox_id)
    outdated = is_outdated(sandbox.spec, spec)
    if shelf is None:
        return SandboxSeen(sandbox_id=sandbox.sandbox_id, state=sandbox.state, destroying=sandbox.destroying, outdated=outdated)
    counts = shelf.counts
    not_shown = max(0, sandbox.spec.slots_per_sandbox - len(shelf.slots))
    is_idle = not counts[SlotState.LEASED] and not counts[SlotState.KEPT]
    return SandboxSeen(
        sandbox_id=sandbox.sandbox_id,
        state=sandbox.state,
        ready=counts[SlotState.READY],
        leased=counts[SlotState.LEASED],
        coming=counts[SlotState.RESETTING] + not_shown,
        kept=counts[SlotState.KEPT],
        quarantined=counts[SlotState.QUARANTINED],
        ready_at=sandbox.ready_at,
        idle_since=sandbox.idle_since if is_idle else None,
        destroying=sandbox.destroying,
        outdated=outdated,
        max_lifetime_s=sandbox.spec.max_lifetime_s,
        max_lease_s=sandbox.spec.max_lease_s,
    )
