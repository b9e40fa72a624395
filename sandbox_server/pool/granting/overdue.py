"""Finds the acquires that have waited as long as they may, and explains why they were not served."""

from __future__ import annotations

from sandbox_server.core.errors import NoCapacity
from sandbox_server.core.types import PoolSpec, SandboxState, SlotState
from sandbox_server.pool.fleet.fleet import Fleet
from sandbox_server.pool.leasing.lease_book import LeaseBook
from sandbox_server.pool.leasing.no_capacity import describe_draining_sandboxes, describe_held_slots, describe_no_capacity
from sandbox_server.pool.leasing.wait_queue import Waiter


def explain_overdue(pool_name: str, spec: PoolSpec, book: LeaseBook, fleet: Fleet, now: float) -> list[tuple[Waiter, NoCapacity]]:
    """Find the waiters that have waited as long as they may. They stay in the queue.

    Args:
        pool_name: the name of the pool.
        spec: its spec.
        book: its slots and waiters.
        fleet: its sandboxes.
        now: the monotonic time.

    Returns:
        Each of them, with the error that says why it was not served.
    """
    claimant = book.claims.claimant
    overdue = [(waiter, book.queue.position(waiter, claimant)) for waiter in book.overdue_waiters()]
    if not overdue:
        return []
    creating_count = sum(sandbox.state is SandboxState.STARTING for sandbox in fleet.sandboxes.values())
    draining_sandboxes = explain_blocked_creation(spec, book, fleet)
    explained = []
    for waiter, position in overdue:
        waited_s = now - waiter.arrived
        held_slots = None
        if claimant is not None and waiter is not claimant and book.table.free_count >= waiter.request.count:
            held_slots = describe_held_slots(book.table.free_count, claimant.request.count, now - claimant.arrived)
        detail = describe_no_capacity(
            pool_name,
            waiter.request.count,
            waited_s,
            creating_count=creating_count,
            held_slots=held_slots,
            draining_sandboxes=draining_sandboxes,
            last_error=fleet.last_error,
        )
        explained.append((waiter, NoCapacity(detail, queue_position=position, waited_s=round(waited_s, 3))))
    return explained


def explain_blocked_creation(spec: PoolSpec, book: LeaseBook, fleet: Fleet) -> str | None:
    """Why no sandbox can be created for the waiters, if leases in draining sandboxes are the reason; None otherwise.

    Args:
        spec: the pool's spec.
        book: the pool's slots and waiters.
        fleet: the pool's sandboxes.
    """
    slots_by_sandbox = book.table.slots_by_sandbox
    draining = [sandbox.sandbox_id for sandbox in fleet.sandboxes.values() if sandbox.state is SandboxState.DRAINING]
    leases = [count for count in (slots_by_sandbox[name].counts[SlotState.LEASED] for name in draining if name in slots_by_sandbox) if count]
    is_empty = len(draining) == len(fleet.sandboxes)
    if not leases or len(fleet.sandboxes) < spec.max_sandboxes or not (is_empty or len(book.queue)):
        return None
    return describe_draining_sandboxes(spec.max_sandboxes, len(leases), sum(leases))
