"""The life of a sandbox and of a slot: states, events, one table each.

Rule 1: every move that a sandbox or a slot can make stands in this file. A pair that is not listed is a mistake in the service,
so `next_sandbox_state` and `next_slot_state` raise and name both halves.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from sandbox_server.core.types import SandboxState, SlotState


class SandboxEvent(enum.StrEnum):
    """What can happen to a sandbox."""

    #: its agent answered and may be used
    CONNECT = "connect"
    #: no new leases; gone when the last one ends
    DRAIN = "drain"
    #: it could not be made, died, vanished or cannot be reached; its leases are over
    FAIL = "fail"
    #: the backend says that nothing of it is left
    DESTROY = "destroy"


class SlotEvent(enum.StrEnum):
    """What can happen to a slot."""

    #: a lease takes it
    GRANT = "grant"
    #: its lease ended, however that came
    RELEASE = "release"
    #: it was kept for a run, or free with a dead init, and is made clean for anyone
    RECLAIM = "reclaim"
    #: its reset is proven
    CLEAN = "clean"
    #: its processes are gone, its files stay for the run that left them
    KEEP = "keep"
    #: its reset cannot be proven; never leased again
    DIRTY = "dirty"


class IllegalTransition(AssertionError):
    """Something happened to a sandbox or slot that cannot happen in its state.

    Args:
        state: where it was.
        event: what happened.
    """

    def __init__(self, state: SandboxState | SlotState, event: SandboxEvent | SlotEvent) -> None:
        self.state = state
        self.event = event
        super().__init__(f"{type(event).__name__} {event.value!r} cannot happen in {type(state).__name__} {state.value!r}")


# A new sandbox is STARTING. FAILED still counts as one of the pool's until the backend has taken away what is left of it.
SANDBOX_TRANSITIONS: Mapping[tuple[SandboxState, SandboxEvent], SandboxState] = {
    (SandboxState.STARTING, SandboxEvent.CONNECT): SandboxState.READY,
    (SandboxState.STARTING, SandboxEvent.DRAIN): SandboxState.DRAINING,
    (SandboxState.STARTING, SandboxEvent.FAIL): SandboxState.FAILED,
    (SandboxState.READY, SandboxEvent.DRAIN): SandboxState.DRAINING,
    (SandboxState.READY, SandboxEvent.FAIL): SandboxState.FAILED,
    (SandboxState.DRAINING, SandboxEvent.FAIL): SandboxState.FAILED,
    (SandboxState.DRAINING, SandboxEvent.DESTROY): SandboxState.GONE,
    (SandboxState.FAILED, SandboxEvent.DESTROY): SandboxState.GONE,
}

# A new slot is RESETTING until its agent says that it is clean. A slot goes with its sandbox, whatever its state.
SLOT_TRANSITIONS: Mapping[tuple[SlotState, SlotEvent], SlotState] = {
    (SlotState.READY, SlotEvent.GRANT): SlotState.LEASED,
    (SlotState.READY, SlotEvent.RECLAIM): SlotState.RESETTING,
    (SlotState.READY, SlotEvent.DIRTY): SlotState.QUARANTINED,
    (SlotState.LEASED, SlotEvent.RELEASE): SlotState.RESETTING,
    (SlotState.RESETTING, SlotEvent.CLEAN): SlotState.READY,
    (SlotState.RESETTING, SlotEvent.KEEP): SlotState.KEPT,
    (SlotState.RESETTING, SlotEvent.DIRTY): SlotState.QUARANTINED,
    (SlotState.KEPT, SlotEvent.GRANT): SlotState.LEASED,
    (SlotState.KEPT, SlotEvent.RECLAIM): SlotState.RESETTING,
    (SlotState.KEPT, SlotEvent.DIRTY): SlotState.QUARANTINED,
}


def next_sandbox_state(state: SandboxState, event: SandboxEvent) -> SandboxState:
    """Where the event leads.

    Raises:
        IllegalTransition: it cannot happen there.
    """
    try:
        return SANDBOX_TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransition(state, event) from None


def next_slot_state(state: SlotState, event: SlotEvent) -> SlotState:
    """Where the event leads.

    Raises:
        IllegalTransition: it cannot happen there.
    """
    try:
        return SLOT_TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransition(state, event) from None
