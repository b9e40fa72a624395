"""Creates the lease for a slot that an acquire is granted."""

from __future__ import annotations

import math

from sandbox_server.core.types import AcquireRequest, Lease, LeaseState, PoolId, PoolSpec, SlotState
from sandbox_server.pool.leasing.slot_table import PoolSlot


def new_lease(
    lease_id: str, pool: PoolId, spec: PoolSpec, slot: PoolSlot, request: AcquireRequest, index: int, wall_s: float, sandbox_life_s: float = math.inf
) -> Lease:
    """Return the lease of a slot for an acquire.

    Args:
        lease_id: the id of the lease.
        pool: the pool.
        spec: the pool's spec.
        slot: the slot, as it is before the lease.
        request: the acquire.
        index: the position of the lease among the leases of the acquire, from 0.
        wall_s: the wall-clock time, in Unix seconds.
        sandbox_life_s: how long the sandbox still lives, in seconds, if its backend ends it by itself. The lease does not outlive it.
    """
    return Lease(
        lease_id=lease_id,
        epoch=slot.epoch,
        pool=pool.name,
        pool_tenant=pool.tenant,
        sandbox_id=slot.ref.sandbox_id,
        slot_id=slot.ref.slot_id,
        tenant=request.tenant,
        trajectory_id=request.trajectory_ids[index] if index < len(request.trajectory_ids) else None,
        run_id=request.run_id,
        state=LeaseState.HELD,
        ttl_s=request.ttl_s,
        acquired_at=wall_s,
        expires_at=wall_s + min(request.ttl_s, sandbox_life_s),
        workspace=slot.workspace,
        isolation=slot.isolation,
        allow_network=spec.slots_have_network and request.allow_network is not False,
        allow_hosts=request.allow_hosts,
        cache=request.cache,
        workspace_kept=slot.state is SlotState.KEPT,
        sandbox_ends_at=None if sandbox_life_s == math.inf else wall_s + sandbox_life_s,
        labels=request.labels,
    )
