"""Converts the records of slots and leases back into the state of a lease book, after a restart of the service."""

from __future__ import annotations

from dataclasses import replace

from sandbox_server.core.types import Lease, LeaseState, SlotState
from sandbox_server.pool.leasing.held_lease import HeldLease
from sandbox_server.pool.leasing.slot_table import PoolSlot
from sandbox_server.store.base import SlotRecord

#: A restored lease is held for at least this many seconds, so that its client has time to renew it.
ADOPTED_LEASE_GRACE_S = 60.0
FIRST_EPOCH = 1


def slot_from_record(record: SlotRecord, now: float) -> PoolSlot:
    """Return a slot in its recorded state. `now`: monotonic."""
    return PoolSlot(
        ref=record.ref,
        epoch=record.epoch,
        workspace=record.workspace,
        isolation=record.isolation,
        state=record.state,
        keep=record.keep,
        since=now,
        # A slot that has never been clean has nothing to reset: its agent reports when its first runtime is there.
        fresh=record.state is SlotState.RESETTING and record.epoch <= FIRST_EPOCH,
    )


def restored_lease(lease: Lease, now: float, wall_s: float) -> HeldLease:
    """Return a recorded lease as it is held after the restart: at least `ADOPTED_LEASE_GRACE_S` longer, and at most for its `ttl_s`.

    The upper limit matters if the wall clock was set back meanwhile, because the lease would otherwise be held too long.

    Args:
        lease: the recorded lease.
        now: the monotonic time.
        wall_s: the wall-clock time, in Unix seconds.
    """
    left_s = min(max(lease.expires_at - wall_s, min(lease.ttl_s, ADOPTED_LEASE_GRACE_S)), lease.ttl_s)
    return HeldLease(replace(lease, expires_at=wall_s + left_s), deadline=now + left_s)


def lease_without_slot(lease: Lease, wall_s: float) -> Lease:
    """Return a recorded lease as ended, because the record of its slot is missing or says that the slot belongs to another lease."""
    return replace(lease, state=LeaseState.SANDBOX_LOST, ended_at=wall_s, end_detail="its slot was not on record when the service restarted")
