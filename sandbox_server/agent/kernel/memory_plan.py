"""How memory is divided between slots: plain arithmetic over bytes, no files.

*Share*: what a slot is always given. *Ceiling*: the most it may use while others leave it free. The slots of one machine are together limited to the
machine's memory less a reserve for everything else. A slot is ended for the others' sake when what the slots use together passes `full_at`, a little below
that limit, and only if it uses more than its share. All shares together are at most `full_at`, so that a slot within its share is never ended.
"""

from __future__ import annotations

import dataclasses
from typing import Iterable, TypeVar

MIB = 1 << 20
_RESERVE_BYTES = 1 << 30
_RESERVE_PART = 0.10
_MOST_RESERVE_PART = 0.25  # a machine of less than 4 GiB keeps less than 1 GiB for everything else
_MARGIN_PART = 0.05
_MOST_MARGIN_BYTES = 1 << 30
_CEILING_BYTES = 4096 * MIB
_IDLE_BYTES = 16 * MIB  # of another slot, or of what ended slots have left: what is there though nobody works

Key = TypeVar("Key")


def slots_limit(machine_bytes: int) -> int:
    """What all slots of a machine may use together, in bytes."""
    reserve = min(max(_RESERVE_BYTES, _RESERVE_PART * machine_bytes), _MOST_RESERVE_PART * machine_bytes)
    return int(machine_bytes - reserve)


def full_at(limit_bytes: int) -> int:
    """From how many bytes on a group with this limit counts as full."""
    return int(limit_bytes - min(_MARGIN_PART * limit_bytes, _MOST_MARGIN_BYTES))


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """What one agent's slots may use.

    Args:
        machine_bytes: the memory of the machine, or of the group around it that has a limit.
        slots: how many slots the agent has, those kept prepared among them.
        sandbox_bytes: the limit over all slots of this agent; None: only the machine's.
        slot_bytes: the limit of one slot that the pool's spec gives; None: the rule.
    """

    machine_bytes: int
    slots: int
    sandbox_bytes: int | None = None
    slot_bytes: int | None = None

    @property
    def machine_limit_bytes(self) -> int:
        """What all slots of the machine may use together."""
        return slots_limit(self.machine_bytes)

    @property
    def sandbox_limit_bytes(self) -> int:
        """What this agent's slots may use together."""
        return min(self.machine_limit_bytes, self.sandbox_bytes) if self.sandbox_bytes is not None else self.machine_limit_bytes

    @property
    def ceiling_bytes(self) -> int:
        """What one slot may use. It never changes while the agent lives. By the rule, who takes all of the sandbox's meets its own limit."""
        if self.slot_bytes is not None:
            return self.slot_bytes
        return min(full_at(self.sandbox_limit_bytes), max(_CEILING_BYTES, self.share_bytes(self.slots)))

    def share_bytes(self, machine_slots: int) -> int:
        """What a slot is always given, where the machine has so many slots, this agent's among them."""
        share = min(full_at(self.sandbox_limit_bytes) // self.slots, full_at(self.machine_limit_bytes) // max(machine_slots, self.slots))
        return min(share, self.slot_bytes) if self.slot_bytes is not None else share


@dataclasses.dataclass(frozen=True)
class Usage:
    """One slot's use of memory that the kernel cannot take back, and its share, in bytes."""

    used_bytes: int
    share_bytes: int

    @property
    def above_share_bytes(self) -> int:
        """How far it is above its share; below 0: within."""
        return self.used_bytes - self.share_bytes


def furthest_above_share(usages: Iterable[tuple[Key, Usage]]) -> tuple[Key, Usage] | None:
    """The slot that is furthest above its share; None where every slot keeps to its own."""
    above = [(key, usage) for key, usage in usages if usage.above_share_bytes > 0]
    return max(above, key=lambda item: item[1].above_share_bytes, default=None)


def fills_alone(used_bytes: int, others: Iterable[int], limit_bytes: int) -> bool:
    """Whether a slot would have filled a group though nobody else had worked.

    Args:
        used_bytes: what the slot uses.
        others: what each other slot of the group uses, and what ended ones have left, in bytes.
        limit_bytes: the limit of the group.
    """
    return used_bytes + sum(min(other, _IDLE_BYTES) for other in others) >= full_at(limit_bytes)
