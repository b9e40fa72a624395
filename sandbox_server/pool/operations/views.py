"""Views of pools and sandboxes for clients. Changes nothing."""

from __future__ import annotations

from typing import Any

from sandbox_server.core.clock import wall_at
from sandbox_server.core.types import PoolState, PoolView, SandboxState, SandboxView, SlotState
from sandbox_server.pool.fleet.orphans import OrphanProblem
from sandbox_server.pool.fleet.sandbox import Sandbox
from sandbox_server.pool.fleet.snapshot import claimant_view
from sandbox_server.pool.granting.overdue import explain_blocked_creation
from sandbox_server.pool.pool import Pool


def pool_view(pool: Pool, origin: str) -> PoolView:
    """The view of a pool.

    Args:
        pool: the pool.
        origin: where its spec came from.
    """
    # Only slots that can be leased count as ready: not those of a sandbox that drains or cannot be reached now.
    counts = {**pool.book.table.counts, SlotState.READY: pool.book.table.free_count}
    report = pool.fleet.last_report
    states = [sandbox.state for sandbox in pool.fleet.sandboxes.values()]
    return PoolView(
        name=pool.name,
        tenant=pool.pool_id.tenant,
        shared=pool.shared,
        state=PoolState.DRAINING if pool.closing else PoolState.READY,
        spec=pool.spec,
        origin=origin,
        isolation=report.isolation if report is not None else None,
        capabilities=report.capabilities if report is not None else {},
        effective=report.effective if report is not None else {},
        slots={state.value: counts.get(state, 0) for state in SlotState},
        sandboxes={state.value: states.count(state) for state in SandboxState if state is not SandboxState.GONE},
        queue=len(pool.book.queue),
        claimant=claimant_view(pool.book, pool.now()),
        last_error=_closing_detail(pool) if pool.closing else pool.fleet.last_error or explain_blocked_creation(pool.spec, pool.book, pool.fleet),
    )


def _closing_detail(pool: Pool) -> str:
    """Why a pool drains, and when it will be gone."""
    held = pool.book.held.values()
    if not held:
        return f"{pool.closing_reason}: it is gone as soon as its sandboxes are"
    count, they = ("its lease has", "it is") if len(held) == 1 else (f"its {len(held)} leases have", "they are")
    ends_at = max(held_lease.ends_at for held_lease in held)
    within = "" if ends_at == float("inf") else f", in {max(0.0, ends_at - pool.now()):.0f} s unless {they} renewed or used"
    return f"{pool.closing_reason}: it is gone when {count} ended{within}"


def sandbox_view(pool: Pool, sandbox: Sandbox) -> SandboxView:
    """The view of a sandbox. Its `ends_at` is when the sandbox ends whatever runs in it."""
    sandbox_slots = pool.book.table.slots_by_sandbox.get(sandbox.sandbox_id)
    spec, ready = sandbox.spec, sandbox.ready_wall(pool.clock)
    ends = [] if ready is None else [ready + spec.max_lifetime_s + spec.max_lease_s]
    if sandbox.ends_at is not None:
        ends.append(wall_at(pool.clock, sandbox.ends_at))
    return SandboxView(
        sandbox_id=sandbox.sandbox_id,
        pool=pool.name,
        pool_tenant=pool.pool_id.tenant,
        backend=spec.backend,
        state=sandbox.state,
        isolation=sandbox.isolation or None,
        slots={state.value: sandbox_slots.counts[state] if sandbox_slots is not None else 0 for state in SlotState},
        created_at=sandbox.created_wall,
        ends_at=min(ends, default=None),
        last_error=sandbox.reason or None,
    )


def readiness(pool: Pool, orphans: OrphanProblem | None) -> dict[str, Any]:
    """Whether a pool has its minimum of sandboxes, or a permanent error instead.

    Args:
        pool: the pool.
        orphans: why its backend may still have sandboxes without a record; None if it has none.
    """
    ready = sum(1 for sandbox in pool.fleet.sandboxes.values() if sandbox.state is SandboxState.READY and sandbox.reachable)
    is_ready = not pool.fleet.adopting and (ready >= pool.spec.min_sandboxes or pool.fleet.permanent_error is not None or pool.closing)
    is_adopted = orphans is None or not orphans.is_unreachable
    last_error = pool.fleet.last_error or (orphans.detail if orphans is not None else None)
    return {"ready": is_ready and is_adopted, "sandboxes": ready, "min_sandboxes": pool.spec.min_sandboxes, "last_error": last_error}
