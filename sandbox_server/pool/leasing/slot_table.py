"""The slots of one pool: which slots there are, the state of each, and which one is granted next. A plain data structure without clock or I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from sandbox_server.core.lifecycle import SlotEvent, next_slot_state
from sandbox_server.core.types import PoolId, SlotRef, SlotState
from sandbox_server.store.base import SlotRecord

RunKey = tuple[str, str | None]
"""Identifies a run: its tenant and its run id. With the run id None, it stands for the leases that the tenant holds without a run."""


@dataclass(slots=True, kw_only=True, eq=False)
class PoolSlot:
    """One slot. Only `SlotTable.apply_event` changes its state.

    Attributes:
        ref: the slot.
        epoch: its epoch.
        workspace: the path of the workspace, as commands in the slot see it.
        isolation: the isolation mode.
        state: its state.
        lease_id: the lease that holds it; None if no lease does.
        keep: the run that its files are kept for, from the release that keeps them until the next lease or reclaim; None: for no run.
        since: when its last reset began or ended, monotonic.
        detail: why it is in quarantine; empty otherwise.
        fresh: it has never been clean yet, so there is nothing to reset.
    """

    ref: SlotRef
    epoch: int
    workspace: str
    isolation: str
    state: SlotState = SlotState.RESETTING
    lease_id: str | None = None
    keep: RunKey | None = None
    since: float = 0.0
    detail: str = ""
    fresh: bool = True

    def record(self, pool: PoolId) -> SlotRecord:
        """Return the record from which the slot is restored after a crash."""
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
    """The slots of one sandbox.

    Attributes:
        slots: the slots by slot id.
        ready: those in the state READY, by slot id.
        counts: how many slots are in each state.
        becoming_free_count: how many are being reset and will be READY after that.
        is_cordoned: no slot of the sandbox is granted, because it drains or its agent cannot be reached now.
    """

    slots: dict[str, PoolSlot] = field(default_factory=dict)
    ready: dict[str, PoolSlot] = field(default_factory=dict)
    counts: Counter[SlotState] = field(default_factory=Counter)
    becoming_free_count: int = 0
    is_cordoned: bool = False
    #: when the backend ends the sandbox by itself, monotonic
    ends_at: float = float("inf")


class SlotTable:
    """Every slot of a pool, with the indexes that granting needs.

    Args:
        on_change: is called with each slot after it has changed.
    """

    def __init__(self, on_change: Callable[[PoolSlot], None]) -> None:
        self.slots_by_sandbox: dict[str, SandboxSlots] = {}
        self.counts: Counter[SlotState] = Counter()
        #: how many slots of sandboxes that are not cordoned can be granted, and how many can be once their reset has ended
        self.free_count = 0
        self.becoming_free_count = 0
        self._sandboxes_with_free_slots: dict[str, SandboxSlots] = {}
        self._kept_by_run: dict[RunKey, dict[SlotRef, PoolSlot]] = {}
        self._kept_in_order: dict[SlotRef, PoolSlot] = {}
        self._about_to_be_kept_by_run: dict[RunKey, dict[SlotRef, PoolSlot]] = {}
        self._on_change = on_change

    def add_sandbox(self, sandbox_id: str) -> None:
        """Add a sandbox, whose slots are added one by one."""
        self.slots_by_sandbox[sandbox_id] = SandboxSlots()

    def remove_sandbox(self, sandbox_id: str) -> list[PoolSlot]:
        """Remove a sandbox and its slots. Returns the slots."""
        self.cordon_sandbox(sandbox_id)
        sandbox_slots = self.slots_by_sandbox.pop(sandbox_id)
        for slot in sandbox_slots.slots.values():
            self.counts[slot.state] -= 1
            self._remove_from_run_index(slot, self._kept_by_run if slot.state is SlotState.KEPT else self._about_to_be_kept_by_run)
        return list(sandbox_slots.slots.values())

    def cordon_sandbox(self, sandbox_id: str) -> None:
        """Grant no slot of a sandbox until `uncordon_sandbox` is called. Its leases continue."""
        sandbox_slots = self.slots_by_sandbox[sandbox_id]
        if not sandbox_slots.is_cordoned:
            sandbox_slots.is_cordoned = True
            self.free_count -= len(sandbox_slots.ready)
            self.becoming_free_count -= sandbox_slots.becoming_free_count
            self._sandboxes_with_free_slots.pop(sandbox_id, None)

    def uncordon_sandbox(self, sandbox_id: str) -> None:
        """Grant the slots of a sandbox again."""
        sandbox_slots = self.slots_by_sandbox[sandbox_id]
        if sandbox_slots.is_cordoned:
            sandbox_slots.is_cordoned = False
            self.free_count += len(sandbox_slots.ready)
            self.becoming_free_count += sandbox_slots.becoming_free_count
            if sandbox_slots.ready:
                self._sandboxes_with_free_slots[sandbox_id] = sandbox_slots

    def add_slot(self, slot: PoolSlot) -> None:
        """Add a slot to its sandbox, which must be in the table."""
        sandbox_slots = self.slots_by_sandbox[slot.ref.sandbox_id]
        sandbox_slots.slots[slot.ref.slot_id] = slot
        self._add_to_indexes(slot, sandbox_slots)
        self._on_change(slot)

    def get(self, ref: SlotRef) -> PoolSlot | None:
        """Return a slot; None if it is not in the table."""
        sandbox_slots = self.slots_by_sandbox.get(ref.sandbox_id)
        return None if sandbox_slots is None else sandbox_slots.slots.get(ref.slot_id)

    def apply_event(self, slot: PoolSlot, event: SlotEvent, keep: RunKey | None = None) -> None:
        """Change the state of a slot as the transition table says.

        Args:
            slot: the slot.
            event: what happened to it.
            keep: where the event starts a reset that keeps the files: the run that they are kept for.

        Raises:
            IllegalTransition: the event cannot happen in the slot's state. Nothing has changed.
        """
        state = next_slot_state(slot.state, event)
        sandbox_slots = self.slots_by_sandbox[slot.ref.sandbox_id]
        self._remove_from_indexes(slot, sandbox_slots)
        slot.state = state
        if state is SlotState.READY:
            slot.fresh = False
        if state is not SlotState.KEPT:
            slot.keep = keep
        self._add_to_indexes(slot, sandbox_slots)
        self._on_change(slot)

    def stop_keeping(self, slot: PoolSlot) -> None:
        """Note that the files of a slot that is being reset are not kept after all."""
        if slot.keep is not None:
            self._remove_from_run_index(slot, self._about_to_be_kept_by_run)
            slot.keep = None
            self._change_becoming_free_count(self.slots_by_sandbox[slot.ref.sandbox_id], 1)
        self._on_change(slot)

    def next_free(self) -> PoolSlot:
        """Return the slot to grant next. There must be a free one.

        It is a slot of the sandbox that has had free slots for the longest time, so that the other sandboxes can become idle.
        """
        sandbox_slots = next(iter(self._sandboxes_with_free_slots.values()))
        return next(iter(sandbox_slots.ready.values()))

    def kept_for(self, run: RunKey) -> list[PoolSlot]:
        """Return the slots of uncordoned sandboxes that are kept for a run, in the order in which they were kept."""
        return self._of_uncordoned_sandboxes(self._kept_by_run.get(run))

    def about_to_be_kept_for(self, run: RunKey) -> list[PoolSlot]:
        """Return the slots that will be kept for a run once their processes have ended, of sandboxes that are not cordoned."""
        return self._of_uncordoned_sandboxes(self._about_to_be_kept_by_run.get(run))

    def kept(self) -> Iterable[PoolSlot]:
        """Return every kept slot, in the order in which they were kept."""
        return self._kept_in_order.values()

    def usable(self) -> int:
        """Return how many slots are granted now or can be granted now or later."""
        return self.counts[SlotState.READY] + self.counts[SlotState.LEASED] + self.counts[SlotState.RESETTING] + self.counts[SlotState.KEPT]

    def __iter__(self) -> Iterator[PoolSlot]:
        for sandbox_slots in self.slots_by_sandbox.values():
            yield from sandbox_slots.slots.values()

    def _of_uncordoned_sandboxes(self, slots: dict[SlotRef, PoolSlot] | None) -> list[PoolSlot]:
        if slots is None:
            return []
        return [slot for slot in slots.values() if not self.slots_by_sandbox[slot.ref.sandbox_id].is_cordoned]

    def _add_to_indexes(self, slot: PoolSlot, sandbox_slots: SandboxSlots) -> None:
        self.counts[slot.state] += 1
        sandbox_slots.counts[slot.state] += 1
        if slot.state is SlotState.READY:
            sandbox_slots.ready[slot.ref.slot_id] = slot
            if not sandbox_slots.is_cordoned:
                self.free_count += 1
                self._sandboxes_with_free_slots.setdefault(slot.ref.sandbox_id, sandbox_slots)
        elif slot.state is SlotState.KEPT and slot.keep is not None:
            self._kept_by_run.setdefault(slot.keep, {})[slot.ref] = slot
            self._kept_in_order[slot.ref] = slot
        elif slot.state is SlotState.RESETTING and slot.keep is not None:
            self._about_to_be_kept_by_run.setdefault(slot.keep, {})[slot.ref] = slot
        elif slot.state is SlotState.RESETTING:
            self._change_becoming_free_count(sandbox_slots, 1)

    def _remove_from_indexes(self, slot: PoolSlot, sandbox_slots: SandboxSlots) -> None:
        self.counts[slot.state] -= 1
        sandbox_slots.counts[slot.state] -= 1
        if slot.state is SlotState.READY:
            del sandbox_slots.ready[slot.ref.slot_id]
            if not sandbox_slots.is_cordoned:
                self.free_count -= 1
                if not sandbox_slots.ready:
                    self._sandboxes_with_free_slots.pop(slot.ref.sandbox_id, None)
        elif slot.state is SlotState.KEPT:
            self._remove_from_run_index(slot, self._kept_by_run)
        elif slot.state is SlotState.RESETTING and slot.keep is not None:
            self._remove_from_run_index(slot, self._about_to_be_kept_by_run)
        elif slot.state is SlotState.RESETTING:
            self._change_becoming_free_count(sandbox_slots, -1)

    def _change_becoming_free_count(self, sandbox_slots: SandboxSlots, difference: int) -> None:
        sandbox_slots.becoming_free_count += difference
        if not sandbox_slots.is_cordoned:
            self.becoming_free_count += difference

    def _remove_from_run_index(self, slot: PoolSlot, index: dict[RunKey, dict[SlotRef, PoolSlot]]) -> None:
        self._kept_in_order.pop(slot.ref, None)
        if slot.keep is None or slot.keep not in index:
            return
        slots = index[slot.keep]
        slots.pop(slot.ref, None)
        if not slots:
            del index[slot.keep]
