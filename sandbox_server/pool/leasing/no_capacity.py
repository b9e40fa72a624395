"""The sentences that explain why an acquire could not be served in time."""

from __future__ import annotations


def crowded_out(max_sandboxes: int, draining: int, leases: int) -> str:
    """Explain that a pool cannot create sandboxes because draining ones count towards its maximum.

    Args:
        max_sandboxes: the `max_sandboxes` of the pool.
        draining: how many of its sandboxes drain and still have leases.
        leases: how many leases they have.
    """
    old = "1 draining sandbox counts" if draining == 1 else f"{draining} draining sandboxes count"
    held = "its last lease" if leases == draining == 1 else f"the last of {leases} leases there"
    return f"{old} towards its max_sandboxes of {max_sandboxes} until {held} has ended"


def held_back(free: int, count: int, waited_s: float) -> str:
    """Explain that the free slots of a pool are held for its claimant.

    Args:
        free: how many slots are held.
        count: how many slots the claimant asks for.
        waited_s: how long the claimant has waited, in seconds.
    """
    held = "its 1 free slot is held" if free == 1 else f"its {free} free slots are held"
    return f"{held} for an acquire of {count} that has waited for {waited_s:.0f} s"


def none_free(pool: str, count: int, waited_s: float, *, making: int, held: str | None = None, crowded: str | None = None, last_error: str | None) -> str:
    """Return the error sentence for an acquire that was not served in time: what was missing, why, and what to do.

    Args:
        pool: the name of the pool.
        count: how many slots it asked for.
        waited_s: how long it waited, in seconds.
        making: how many sandboxes are being created.
        held: the text of `held_back`, if free slots are held for the claimant.
        crowded: the text of `crowded_out`, if draining sandboxes are in the way.
        last_error: why no sandbox could be created, if that is so.
    """
    slots = "slot free" if count == 1 else f"{count} slots free at once"
    tried = f"had no {slots} within {round(waited_s, 1):g} s" if round(waited_s, 1) else f"has no {slots}"
    if held:
        return f"pool {pool!r} {tried}: {held}: release leases, wait for longer, or ask again"
    if making:
        todo = "a sandbox is being made" if making == 1 else f"{making} sandboxes are being made"
        return f"pool {pool!r} {tried}: {todo}, ask again in a moment"
    if crowded:
        return f"pool {pool!r} {tried}: {crowded}: release leases there, raise its max_sandboxes, or ask again"
    why = f" (its last error: {last_error})" if last_error else ""
    return f"pool {pool!r} {tried}{why}: release leases, raise its max_sandboxes, or ask again"
