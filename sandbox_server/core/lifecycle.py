"""The lifecycle of a sandbox and of a slot: their states, the events, and one transition table for each.

Every transition that a sandbox or a slot can make is listed in this file. A pair of state and event that is not listed is an error in the service:
`next_sandbox_state` and `next_slot_state` raise an exception that names both.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from sandbox_server.core.types import SandboxState, SlotState


class SandboxEvent(enum.StrEnum):
    """The events that change the state of a sandbox."""

    #: its agent has answered for the first time
    CONNECT = "connect"
    #: it gets no new leases, and is destroyed when its last lease ends
    DRAIN = "drain"
    #: it could not be created, died, disappeared or cannot be reached; its leases have ended
    FAIL = "fail"
    #: the backend has confirmed that nothing of it is left
    DESTROY = "destroy"


class SlotEvent(enum.StrEnum):
    """The events that change the state of a slot."""

    #: it is granted to a lease
    GRANT = "grant"
    #: its lease has ended, for any reason
    RELEASE = "release"
    #: it was kept for a run or free, and is reset so that any run can use it
    RECLAIM = "reclaim"
    #: its reset has ended and was proven clean
    CLEAN = "clean"
    #: its processes have ended, and its files are kept for their run
    KEEP = "keep"
    #: its reset could not be proven clean; it is never leased again
    DIRTY = "dirty"


class IllegalTransition(AssertionError):
    """An event occurred in a state in which it cannot occur.

    Args:
        state: the state of the sandbox or slot.
        event: the event.
    """

    def __init__(self, state: SandboxState | SlotState, event: SandboxEvent | SlotEvent) -> None:
        self.state = state
        self.event = event
        super().__init__(f"{type(event).__name__} {event.value!r} cannot happen in {type(state).__name__} {state.value!r}")


# A new sandbox is STARTING. A FAILED sandbox counts as a sandbox of its pool until the backend has destroyed what is left of it.
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

# A new slot is RESETTING until its agent reports that it is clean. A slot in any state disappears together with its sandbox.
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
    """Return the state that follows.

    Raises:
        IllegalTransition: the event cannot occur in this state.
    """
    try:
        return SANDBOX_TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransition(state, event) from None


def next_slot_state(state: SlotState, event: SlotEvent) -> SlotState:
    """Return the state that follows.

    Raises:
        IllegalTransition: the event cannot occur in this state.
    """
    try:
        return SLOT_TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransition(state, event) from None
