"""Calculates which processors a slot may use, and from measurements whether a call got the processor time that its slot is promised. Reads no files.

A slot is promised an equal share of the processors, or its `cpu` limit if that is less. In each interval between two measurements a call is owed the time that
it wanted (the time that it ran plus the time that it was ready to run and waited), but at most the share of its slot. The processor time of all processes of
the slot counts as given. So other slots are never blamed for what a slot does to its own calls.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

_MIN_OWED_S = 0.05  # Below this, the time slices of the scheduler dominate.
_ENOUGH_FRACTION = 0.8  # Of the owed time. Shares hold on average only, and the agent and the service need some of the processor.
_RELEVANT_FRACTION = 0.25  # Of the duration of the call. A call that slept most of the time was not delayed much by what it missed.


class ProcessorTimes(NamedTuple):
    """One measurement of the processor time of a call and its slot.

    Args:
        at_s: when it was taken, on the monotonic clock, in seconds.
        call_ran_s: how long the processes of the call have run, in seconds.
        call_waited_s: how long at least one process of the call was ready to run and waited, in seconds.
        slot_ran_s: how long all processes of the slot have run, in seconds.
        lowered: whether a thread of the call runs with less than normal priority by its own request (nice, an idle scheduling class, fewer processors).
    """

    at_s: float
    call_ran_s: float
    call_waited_s: float
    slot_ran_s: float
    lowered: bool


@dataclasses.dataclass(frozen=True)
class Processors:
    """The processors that the slots of one agent share.

    Args:
        allowed: the numbers of the processors that the agent may run on.
        quota: how many processors the agent's container may keep busy at a time; None if only `allowed` limits it.
        first: the index in `allowed` of the first processor to pin slots to, so that sandboxes of one machine are pinned to different ones.
    """

    allowed: tuple[int, ...]
    quota: float | None = None
    first: int = 0

    @property
    def usable(self) -> float:
        """How many processors all slots together can keep busy at a time."""
        return len(self.allowed) if self.quota is None else min(len(self.allowed), self.quota)

    def count_of_slot(self, cpu: float | None) -> int:
        """Return how many threads of one slot can run at a time, at most.

        Args:
            cpu: the limit of one slot in processors; None if there is no limit.
        """
        return math.ceil(self.usable if cpu is None else min(cpu, self.usable))

    def limit_of_slot(self, cpu: float | None) -> int | None:
        """Return how many processors one slot may keep busy at a time; None if it is limited as all slots together are."""
        return None if cpu is None or math.ceil(cpu) >= self.usable else math.ceil(cpu)

    def pinned_to(self, cpu: float | None, slot_number: int) -> list[int]:
        """Return the processors that a slot is pinned to; none if it may run on all.

        A quota alone pins nothing. The kernel moves threads away from processors on which other containers are busy, and would have to leave pinned ones there.

        Args:
            cpu: the limit of one slot in processors; None if there is no limit.
            slot_number: the number of the slot in its sandbox. Successive slots get successive processors, so that all are used evenly.
        """
        if cpu is None or math.ceil(cpu) >= len(self.allowed):
            return []
        count = math.ceil(cpu)
        first = self.first + slot_number * count
        return [self.allowed[(first + number) % len(self.allowed)] for number in range(count)]


def promised_share(processors: float, slots: int, cpu: float | None) -> float:
    """Return how many processors a slot is promised.

    Args:
        processors: how many processors all slots together can keep busy at a time.
        slots: the number of slots.
        cpu: the limit of one slot in processors; None if there is no limit.
    """
    share = processors / slots
    return share if cpu is None else min(share, cpu)


class ProcessorAccount:
    """Adds up the processor time that a call was owed and that its slot was given.

    Args:
        share: how many processors the slot is promised.
        first: the first measurement.
    """

    def __init__(self, share: float, first: ProcessorTimes) -> None:
        self._share = share
        self._first_at_s = first.at_s
        self._last = first
        self._owed_s = 0.0
        self._given_s = 0.0
        self._waited_s = 0.0
        self._lowered = first.lowered

    def add_measurement(self, now: ProcessorTimes) -> None:
        """Add the next measurement."""
        last, self._last = self._last, now
        waited_s = max(0.0, now.call_waited_s - last.call_waited_s)
        wanted_s = max(0.0, now.call_ran_s - last.call_ran_s) + waited_s
        self._waited_s += waited_s
        self._owed_s += min(wanted_s, self._share * max(0.0, now.at_s - last.at_s))
        self._given_s += max(0.0, now.slot_ran_s - last.slot_ran_s)
        self._lowered = self._lowered or now.lowered

    def starvation_evidence(self) -> dict[str, Any] | None:
        """Return the evidence that other slots or processes kept the call from the share of its slot; None if there is no such evidence."""
        if self._lowered or self._owed_s < _MIN_OWED_S or self._given_s >= _ENOUGH_FRACTION * self._owed_s:
            return None
        lost_s = min(self._waited_s, (self._owed_s - self._given_s) / self._share)
        if lost_s < _RELEVANT_FRACTION * (self._last.at_s - self._first_at_s):
            return None
        return {"share_processors": round(self._share, 3), "owed_s": round(self._owed_s, 3), "given_s": round(self._given_s, 3), "lost_s": round(lost_s, 3)}
