"""The slots of one pool: which there are, where each is in its life, which is handed out next. Plain data, no clock, no I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from sandbox_server.core.lifecycle import SlotEvent, next_slot_state
from sandbox_server.core.types import PoolId, SlotRef, SlotState
from sandbox_server.store.base import SlotRecord

Holder = tuple[str, str | None]
"""A tenant and its run."""


@dataclass(slots=True, kw_only=True, eq=False)
class Slot:
    """One slot as the pool knows it. `state` is moved by `SlotTable.move` alone.

    `keep` is the tenant and run its files stay for, from the release that keeps them to the next lease or reclaim.
    """

    ref: SlotRef
    epoch: int
    workspace: str
    isolation: str
    state: SlotState = SlotState.RESETTING
    lease_id: str | None = None
    keep: Holder | None = None
    since: float = 0.0
    detail: str = ""
    fresh: bool = True

    def record(self, pool: PoolId) -> SlotRecord:
        """What must be known of it after a crash."""
        return SlotRecord(
            ref=self.ref,
            pool=pool.name,
            pool_tenant=pool.tenant,
            state=self.state,
            epoch=self.epoch,
            workspace=self.workspace,
            isolation=self.isolation,
            keep=self.keep,
        )


@dataclass(slots=True, eq=False)
class SandboxSlots:
    """The slots of one sandbox. A closed shelf hands nothing out (its sandbox drains, or cannot be reached now).

    `coming` counts those that are being reset and will be anyone's.
    """

    slots: dict[str, Slot] = field(default_factory=dict)
    ready: dict[str, Slot] = field(default_factory=dict)
    counts: Counter[SlotState] = field(default_factory=Counter)
    coming: int = 0
    open: bool = True
    #: when the backend ends the sandbox by itself, monotonic
    ends_at: float = float("inf")


class SlotTable:
    """Every slot of a pool, indexed by what is asked of it.

    Args:
        on_change: told of each slot that changed, after the change.
    """

    def __init__(self, on_change: Callable[[Slot], None]) -> None:
        self.slots_by_sandbox: dict[str, SandboxSlots] = {}
        self.counts: Counter[SlotState] = Counter()
        #: slots of open shelves that can be handed out, and those that are being reset and then can be
        self.free = 0
        self.coming = 0
        self._stocked: dict[str, SandboxSlots] = {}
        self._kept: dict[Holder, dict[SlotRef, Slot]] = {}
        self._kept_in_order: dict[SlotRef, Slot] = {}
        self._to_be_kept: dict[Holder, dict[SlotRef, Slot]] = {}
        self._on_change = on_change

    def add_shelf(self, sandbox_id: str) -> None:
        """A sandbox is there; its slots follow."""
        self.slots_by_sandbox[sandbox_id] = SandboxSlots()

    def remove_shelf(self, sandbox_id: str) -> list[Slot]:
        """A sandbox is not there any more. Returns the slots that went with it."""
        self.close(sandbox_id)
        sandbox_slots = self.slots_by_sandbox.pop(sandbox_id)
        for slot in sandbox_slots.slots.values():
            self.counts[slot.state] -= 1
            self._unkeep(slot, self._kept if slot.state is SlotState.KEPT else self._to_be_kept)
        return list(sandbox_slots.slots.values())

    def open(self, sandbox_id: str) -> None:
        """Hand out this sandbox's slots (again)."""
        sandbox_slots = self.slots_by_sandbox[sandbox_id]
        if not sandbox_slots.open:
            sandbox_slots.open = True
            self.free += len(sandbox_slots.ready)
            self.coming += sandbox_slots.coming
            if sandbox_slots.ready:
                self._stocked[sandbox_id] = sandbox_slots

    def close(self, sandbox_id: str) -> None:
        """Hand out none of this sandbox's slots until it is opened."""
        sandbox_slots = self.slots_by_sandbox[sandbox_id]
        if sandbox_slots.open:
            sandbox_slots.open = False
            self.free -= len(sandbox_slots.ready)
            self.coming -= sandbox_slots.coming
            self._stocked.pop(sandbox_id, None)

    def add(self, slot: Slot) -> None:
        """A slot that was not known."""
        sandbox_slots = self.slots_by_sandbox[slot.ref.sandbox_id]
        sandbox_slots.slots[slot.ref.slot_id] = slot
        self._enter(slot, sandbox_slots)
        self._on_change(slot)

    def get(self, ref: SlotRef) -> Slot | None:
        """The slot, if its sandbox is there."""
        sandbox_slots = self.slots_by_sandbox.get(ref.sandbox_id)
        return None if sandbox_slots is None else sandbox_slots.slots.get(ref.slot_id)

    def move(self, slot: Slot, event: SlotEvent, keep: Holder | None = None) -> None:
        """Let something happen to a slot. `keep`: whose its files are, where it is being reset but for them.

        Raises:
            UnlistedMove: it cannot happen in the slot's state; nothing has changed.
        """
        state = next_slot_state(slot.state, event)
        sandbox_slots = self.slots_by_sandbox[slot.ref.sandbox_id]
        self._leave(slot, sandbox_slots)
        slot.state = state
        if state is SlotState.READY:
            slot.fresh = False
        if state is not SlotState.KEPT:
            slot.keep = keep
        self._enter(slot, sandbox_slots)
        self._on_change(slot)

    def _leave(self, slot: Slot, sandbox_slots: SandboxSlots) -> None:
        self.counts[slot.state] -= 1
        sandbox_slots.counts[slot.state] -= 1
        if slot.state is SlotState.READY:
            del sandbox_slots.ready[slot.ref.slot_id]
            if sandbox_slots.open:
                self.free -= 1
                if not sandbox_slots.ready:
                    self._stocked.pop(slot.ref.sandbox_id, None)
        elif slot.state is SlotState.KEPT:
            self._unkeep(slot, self._kept)
        elif slot.state is SlotState.RESETTING and slot.keep is not None:
            self._unkeep(slot, self._to_be_kept)
        elif slot.state is SlotState.RESETTING:
            self._count_coming(sandbox_slots, -1)

    def _count_coming(self, sandbox_slots: SandboxSlots, more: int) -> None:
        sandbox_slots.coming += more
        if sandbox_slots.open:
            self.coming += more

    def _enter(self, slot: Slot, sandbox_slots: SandboxSlots) -> None:
        self.counts[slot.state] += 1
        sandbox_slots.counts[slot.state] += 1
        if slot.state is SlotState.READY:
            sandbox_slots.ready[slot.ref.slot_id] = slot
            if sandbox_slots.open:
                self.free += 1
                self._stocked.setdefault(slot.ref.sandbox_id, sandbox_slots)
        elif slot.state is SlotState.KEPT and slot.keep is not None:
            self._kept.setdefault(slot.keep, {})[slot.ref] = slot
            self._kept_in_order[slot.ref] = slot
        elif slot.state is SlotState.RESETTING and slot.keep is not None:
            self._to_be_kept.setdefault(slot.keep, {})[slot.ref] = slot
        elif slot.state is SlotState.RESETTING:
            self._count_coming(sandbox_slots, 1)

    def _unkeep(self, slot: Slot, index: dict[Holder, dict[SlotRef, Slot]]) -> None:
        self._kept_in_order.pop(slot.ref, None)
        if slot.keep is None or slot.keep not in index:
            return
        of_run = index[slot.keep]
        of_run.pop(slot.ref, None)
        if not of_run:
            del index[slot.keep]

    def next_free(self) -> Slot:
        """The slot to hand out next: of the sandbox that has handed out longest, so that the others can go idle."""
        sandbox_slots = next(iter(self._stocked.values()))
        return next(iter(sandbox_slots.ready.values()))

    def kept_for(self, holder: Holder) -> list[Slot]:
        """Slots whose files stay for this tenant and run, longest kept first, of sandboxes that hand out."""
        of_run = self._kept.get(holder)
        if of_run is None:
            return []
        return [slot for slot in of_run.values() if self.slots_by_sandbox[slot.ref.sandbox_id].open]

    def unkeep(self, slot: Slot) -> None:
        """A slot that is being reset is not to be kept after all."""
        if slot.keep is not None:
            self._unkeep(slot, self._to_be_kept)
            slot.keep = None
            self._count_coming(self.slots_by_sandbox[slot.ref.sandbox_id], 1)
        self._on_change(slot)

    def to_be_kept_for(self, holder: Holder) -> Iterable[Slot]:
        """Slots that will be kept for this tenant and run as soon as their processes are gone, of sandboxes that hand out."""
        return (slot for slot in self._to_be_kept.get(holder, {}).values() if self.slots_by_sandbox[slot.ref.sandbox_id].open)

    def kept(self) -> Iterable[Slot]:
        """All kept slots, longest kept first."""
        return self._kept_in_order.values()

    def usable(self) -> int:
        """How many slots there are that were, are or will be handed out."""
        return self.counts[SlotState.READY] + self.counts[SlotState.LEASED] + self.counts[SlotState.RESETTING] + self.counts[SlotState.KEPT]

    def __iter__(self) -> Iterator[Slot]:
        for sandbox_slots in self.slots_by_sandbox.values():
            yield from sandbox_slots.slots.values()
