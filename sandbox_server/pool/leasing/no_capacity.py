"""The sentences that explain why an acquire could not be served in time."""

from __future__ import annotations


def describe_draining_sandboxes(max_sandboxes: int, draining: int, leases: int) -> str:
    """Explain that a pool cannot create sandboxes because draining ones count towards its maximum.

    Args:
        max_sandboxes: the `max_sandboxes` of the pool.
        draining: how many of its sandboxes drain and still have leases.
        leases: how many leases they have.
    """
    old = "1 draining sandbox counts" if draining == 1 else f"{draining} draining sandboxes count"
    held = "its last lease" if leases == draining == 1 else f"the last of {leases} leases there"
    return f"{old} towards its max_sandboxes of {max_sandboxes} until {held} has ended"


def describe_held_slots(free: int, count: int, waited_s: float) -> str:
    """Explain that the free slots of a pool are held for its claimant.

    Args:
        free: how many slots are held.
        count: how many slots the claimant asks for.
        waited_s: how long the claimant has waited, in seconds.
    """
    held = "its 1 free slot is held" if free == 1 else f"its {free} free slots are held"
    return f"{held} for an acquire of {count} that has waited for {waited_s:.0f} s"


def describe_no_capacity(
    pool: str, count: int, waited_s: float, *, creating_count: int, held_slots: str | None = None, draining_sandboxes: str | None = None, last_error: str | None
) -> str:
    """Return the error sentence for an acquire that was not served in time: what was missing, why, and what to do.

    Args:
        pool: the name of the pool.
        count: how many slots it asked for.
        waited_s: how long it waited, in seconds.
        creating_count: how many sandboxes are being created.
        held_slots: the text of `describe_held_slots`, if free slots are held for the claimant.
        draining_sandboxes: the text of `describe_draining_sandboxes`, if draining sandboxes are in the way.
        last_error: why no sandbox could be created, if that is so.
    """
    slots = "slot free" if count == 1 else f"{count} slots free at once"
    tried = f"had no {slots} within {round(waited_s, 1):g} s" if round(waited_s, 1) else f"has no {slots}"
    if held_slots:
        return f"pool {pool!r} {tried}: {held_slots}: release leases, wait for longer, or ask again"
    if creating_count:
        todo = "a sandbox is being made" if creating_count == 1 else f"{creating_count} sandboxes are being made"
        return f"pool {pool!r} {tried}: {todo}, ask again in a moment"
    if draining_sandboxes:
        return f"pool {pool!r} {tried}: {draining_sandboxes}: release leases there, raise its max_sandboxes, or ask again"
    why = f" (its last error: {last_error})" if last_error else ""
    return f"pool {pool!r} {tried}{why}: release leases, raise its max_sandboxes, or ask again"
