"""How memory is divided between slots. The functions here only calculate; they read no files.

The *share* of a slot is the memory that it can always use. Its *ceiling* is the most memory that it may use while other slots do not need it. All slots of
one machine together may use the memory of the machine, minus a reserve for everything else. A slot is ended because memory is short only when all slots
together use more than `full_threshold_bytes`, which lies a little below that limit, and only if the slot uses more than its share. All shares together are
at most `full_threshold_bytes`. So a slot that stays within its share is never ended.
"""

from __future__ import annotations

import dataclasses
from typing import Iterable, TypeVar

MIB = 1 << 20
_RESERVE_BYTES = 1 << 30
_RESERVE_FRACTION = 0.10
_MAX_RESERVE_FRACTION = 0.25  # A machine with less than 4 GiB of memory reserves less than 1 GiB.
_MARGIN_FRACTION = 0.05
_MAX_MARGIN_BYTES = 1 << 30
_CEILING_BYTES = 4096 * MIB
_MAX_OVERRUN_BYTES = 1 << 30  # What a slot may use beyond the limit of its sandbox for the time in which the agent ends it.
_IDLE_BYTES = 16 * MIB  # What an idle slot, or the remains of an ended slot, may use without counting as a cause.

Key = TypeVar("Key")


def machine_slots_limit_bytes(machine_bytes: int) -> int:
    """Return how many bytes of memory all slots of a machine may use together.

    Args:
        machine_bytes: the memory of the machine, in bytes.
    """
    reserve = min(max(_RESERVE_BYTES, _RESERVE_FRACTION * machine_bytes), _MAX_RESERVE_FRACTION * machine_bytes)
    return int(machine_bytes - reserve)


def full_threshold_bytes(limit_bytes: int) -> int:
    """Return the usage, in bytes, from which a group with this limit counts as full."""
    return int(limit_bytes - min(_MARGIN_FRACTION * limit_bytes, _MAX_MARGIN_BYTES))


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """How much memory the slots of one agent may use.

    Args:
        machine_bytes: the memory of the machine, or the limit of the closest control group around the agent, in bytes.
        slots: the number of slots of the agent, including the ones that are kept prepared.
        sandbox_bytes: the limit for all slots of this agent together, in bytes; None means that only the limit of the machine applies.
        slot_bytes: the limit for one slot that the pool's spec sets, in bytes; None means that the ceiling is calculated.
        has_neighbours: whether several slots of the agent can be held at the same time.
    """

    machine_bytes: int
    slots: int
    sandbox_bytes: int | None = None
    slot_bytes: int | None = None
    has_neighbours: bool = True

    @property
    def machine_limit_bytes(self) -> int:
        """How many bytes all slots of the machine may use together."""
        return machine_slots_limit_bytes(self.machine_bytes)

    @property
    def sandbox_limit_bytes(self) -> int:
        """How many bytes the slots of this agent may use together."""
        return min(self.machine_limit_bytes, self.sandbox_bytes) if self.sandbox_bytes is not None else self.machine_limit_bytes

    @property
    def sandbox_hard_limit_bytes(self) -> int:
        """At how many bytes the kernel refuses memory to the slots of this agent.

        A program can fill a small group faster than the agent can end its slot, and in between its system calls fail, on which it can end with an exit code
        that says nothing about memory. A slot that has its sandbox alone is at fault however much it uses, so there this limit lies above the one at which the
        agent ends it, if the machine has the memory. Other sandboxes have no such room: a slot that used it would seem to have filled the memory alone.
        """
        if self.has_neighbours:
            return self.sandbox_limit_bytes
        return min(self.machine_limit_bytes, self.sandbox_limit_bytes + _MAX_OVERRUN_BYTES)

    @property
    def ceiling_bytes(self) -> int:
        """How many bytes one slot may use. The value never changes while the agent runs.

        A calculated ceiling is never above the threshold of the sandbox: a slot that uses all the memory of its sandbox reaches its own limit first.
        """
        if self.slot_bytes is not None:
            return self.slot_bytes
        return min(full_threshold_bytes(self.sandbox_limit_bytes), max(_CEILING_BYTES, self.share_bytes(self.slots)))

    @property
    def slot_hard_limit_bytes(self) -> int:
        """At how many bytes the kernel kills processes of one slot.

        It is the ceiling, except where a slot that has its sandbox alone is ended by the agent before it can reach its ceiling: the kernel must not kill one
        of its processes while the agent does so.
        """
        if self.has_neighbours or self.ceiling_bytes <= full_threshold_bytes(self.sandbox_limit_bytes):
            return self.ceiling_bytes
        return max(self.ceiling_bytes, self.sandbox_hard_limit_bytes)

    def share_bytes(self, machine_slots: int) -> int:
        """Return how many bytes a slot can always use.

        Args:
            machine_slots: the number of slots on the machine, including those of this agent.
        """
        sandbox_share = full_threshold_bytes(self.sandbox_limit_bytes) // self.slots
        machine_share = full_threshold_bytes(self.machine_limit_bytes) // max(machine_slots, self.slots)
        share = min(sandbox_share, machine_share)
        return min(share, self.slot_bytes) if self.slot_bytes is not None else share


@dataclasses.dataclass(frozen=True)
class MemoryUsage:
    """The memory of one slot.

    Args:
        used_bytes: what the slot uses and the kernel cannot reclaim, in bytes.
        share_bytes: the slot's share, in bytes.
    """

    used_bytes: int
    share_bytes: int

    @property
    def above_share_bytes(self) -> int:
        """How many bytes the slot uses beyond its share; negative while the slot stays within its share."""
        return self.used_bytes - self.share_bytes


def find_furthest_above_share(usages: Iterable[tuple[Key, MemoryUsage]]) -> tuple[Key, MemoryUsage] | None:
    """Return the slot that exceeds its share by most; None if every slot stays within its share."""
    above = [(key, usage) for key, usage in usages if usage.above_share_bytes > 0]
    return max(above, key=lambda item: item[1].above_share_bytes, default=None)


def fills_group_alone(used_bytes: int, others: Iterable[int], limit_bytes: int) -> bool:
    """Return whether a slot would have filled its group even if all other slots had been idle.

    Args:
        used_bytes: what the slot uses, in bytes.
        others: what each other slot of the group uses and what ended slots have left, in bytes.
        limit_bytes: the limit of the group, in bytes.
    """
    return used_bytes + sum(min(other, _IDLE_BYTES) for other in others) >= full_threshold_bytes(limit_bytes)
