"""The moving side of a held lease, and the order to reset a slot once it has ended."""

from __future__ import annotations

from dataclasses import dataclass

from sandbox_server.core.types import Lease, SlotRef

#: How long a lease outlasts its last running call, in seconds.
STRETCH_S = 60.0


@dataclass(slots=True, eq=False)
class Holding:
    """The moving side of a held lease. `parked`: its expiry is not in the heap, because a call is running past it."""

    lease: Lease
    deadline: float
    running: int = 0
    quiet_since: float | None = None
    parked: bool = False

    @property
    def ends_at(self) -> float:
        """When it ends by itself, monotonic: the later of its deadline and the end of its last running call + 60 s."""
        if self.running:
            return float("inf")
        return self.deadline if self.quiet_since is None else max(self.deadline, self.quiet_since + STRETCH_S)


@dataclass(frozen=True, kw_only=True, slots=True)
class ResetOrder:
    """A slot that its agent must reset to this epoch before it is anyone's."""

    ref: SlotRef
    epoch: int
    keep: bool
