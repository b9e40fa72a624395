"""What a pool looks like to callers. Reads, changes nothing."""

from __future__ import annotations

from typing import Any

from sandbox_server.core.types import PoolState, PoolView, SandboxState, SandboxView, SlotState
from sandbox_server.pool.fleet.orphans import Trouble
from sandbox_server.pool.fleet.sandbox import Sandbox
from sandbox_server.pool.fleet.snapshot import claimant_view
from sandbox_server.pool.pool import Pool


def pool_view(pool: Pool, origin: str) -> PoolView:
    """What a caller may see of a pool. `origin`: where its spec came from."""
    # Ready is what can be had: not what lies in a sandbox that drains, or cannot be reached now.
    counts = {**pool.book.table.counts, SlotState.READY: pool.book.table.free_count}
    states = [sandbox.state for sandbox in pool.fleet.sandboxes.values()]
    return PoolView(
        name=pool.name,
        tenant=pool.pool_id.tenant,
        shared=pool.shared,
        state=PoolState.DRAINING if pool.closing else PoolState.READY,
        spec=pool.spec,
        origin=origin,
        isolation=pool.fleet.shown.isolation if pool.fleet.shown is not None else None,
        capabilities=pool.fleet.shown.capabilities if pool.fleet.shown is not None else {},
        effective=pool.fleet.shown.effective if pool.fleet.shown is not None else {},
        slots={state.value: counts.get(state, 0) for state in SlotState},
        sandboxes={state.value: states.count(state) for state in SandboxState if state is not SandboxState.GONE},
        queue=len(pool.book.queue),
        claimant=claimant_view(pool.book, pool.now()),
        last_error=_going(pool) if pool.closing else pool.fleet.last_error or pool.crowded_out(),
    )


def _going(pool: Pool) -> str:
    """Why a pool drains, and when it is gone."""
    held = pool.book.held.values()
    if not held:
        return f"{pool.why_closing}: it is gone as soon as its sandboxes are"
    count, they = ("its lease has", "it is") if len(held) == 1 else (f"its {len(held)} leases have", "they are")
    ends_at = max(held_lease.ends_at for held_lease in held)
    within = "" if ends_at == float("inf") else f", in {max(0.0, ends_at - pool.now()):.0f} s unless {they} renewed or used"
    return f"{pool.why_closing}: it is gone when {count} ended{within}"


def sandbox_view(pool: Pool, sandbox: Sandbox) -> SandboxView:
    """What a caller may see of a sandbox. `ends_at`: when it goes whatever runs in it."""
    sandbox_slots = pool.book.table.slots_by_sandbox.get(sandbox.sandbox_id)
    spec, ready = sandbox.spec, sandbox.ready_wall(pool.clock)
    return SandboxView(
        sandbox_id=sandbox.sandbox_id,
        pool=pool.name,
        pool_tenant=pool.pool_id.tenant,
        backend=spec.backend,
        state=sandbox.state,
        isolation=sandbox.isolation or None,
        slots={state.value: sandbox_slots.counts[state] if sandbox_slots is not None else 0 for state in SlotState},
        created_at=sandbox.created_wall,
        ends_at=None if ready is None else ready + spec.max_lifetime_s + spec.max_lease_s,
        last_error=sandbox.why or None,
    )


def readiness(pool: Pool, orphans: Trouble | None) -> dict[str, Any]:
    """Whether a pool has its minimum, or a permanent error to show. `orphans`: why its backend may have sandboxes that nobody knows of."""
    ready = sum(1 for sandbox in pool.fleet.sandboxes.values() if sandbox.state is SandboxState.READY and sandbox.reachable)
    is_ready = not pool.fleet.adopting and (ready >= pool.spec.min_sandboxes or pool.fleet.permanent_error is not None or pool.closing)
    is_adopted = orphans is None or not orphans.is_blind
    last_error = pool.fleet.last_error or (orphans.detail if orphans is not None else None)
    return {"ready": is_ready and is_adopted, "sandboxes": ready, "min_sandboxes": pool.spec.min_sandboxes, "last_error": last_error}
