"""Whether a call got the processor time that its slot was promised. Pure: what was measured goes in, what it proves comes out.

A slot is promised an equal part of the processors, or what its `cpu` says if that is less. In each stretch of time a call is owed what it asked for (the
time it ran and the time it was ready and waited), at most its slot's part of the stretch. What all processes of the slot used together counts as given: so
whatever a slot does to its own calls, others have not done it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

_LEAST_OWED_S = 0.05  # below it, the ticks of the scheduler decide
_ENOUGH = 0.8  # of what was owed: shares are kept on average, and the agent and the service need some
_MATTERS = 0.25  # of the time of the call: what slept most of it was not late for the little that it missed


class ProcessorTimes(NamedTuple):
    """What had been used at one moment, in seconds.

    `at_s` is a monotonic time. `call_waited_s`: how long some process of the call was ready to run and waited. `lowered`: something of the call runs with
    less than an ordinary claim to the processor, as it asked for (nice, an idle class, fewer processors).
    """

    at_s: float
    call_ran_s: float
    call_waited_s: float
    slot_ran_s: float
    lowered: bool


def promised_share(processors: int, slots: int, cpu: float | None) -> float:
    """How many processors a slot is promised.

    Args:
        processors: how many all slots have.
        slots: how many slots there are.
        cpu: the limit of one slot, None for none.
    """
    share = processors / slots
    return share if cpu is None else min(share, cpu)


class ProcessorAccount:
    """Adds up what a call was owed and what its slot was given.

    Args:
        share: how many processors the slot is promised.
        first: what had been used when the looking began.
    """

    def __init__(self, share: float, first: ProcessorTimes) -> None:
        self._share = share
        self._first_at_s = first.at_s
        self._last = first
        self._owed_s = 0.0
        self._given_s = 0.0
        self._waited_s = 0.0
        self._lowered = first.lowered

    def add(self, now: ProcessorTimes) -> None:
        """Take in what has been used by now."""
        last, self._last = self._last, now
        waited_s = max(0.0, now.call_waited_s - last.call_waited_s)
        wanted_s = max(0.0, now.call_ran_s - last.call_ran_s) + waited_s
        self._waited_s += waited_s
        self._owed_s += min(wanted_s, self._share * max(0.0, now.at_s - last.at_s))
        self._given_s += max(0.0, now.slot_ran_s - last.slot_ran_s)
        self._lowered = self._lowered or now.lowered

    def starved(self) -> dict[str, Any] | None:
        """The proof that others kept the call from its slot's share; None where there is none."""
        if self._lowered or self._owed_s < _LEAST_OWED_S or self._given_s >= _ENOUGH * self._owed_s:
            return None
        lost_s = min(self._waited_s, (self._owed_s - self._given_s) / self._share)
        if lost_s < _MATTERS * (self._last.at_s - self._first_at_s):
            return None
        return {"share_processors": round(self._share, 3), "owed_s": round(self._owed_s, 3), "given_s": round(self._given_s, 3), "lost_s": round(lost_s, 3)}
