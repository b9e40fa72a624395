"""The tables are whole: what is listed leads on, what is not raises and names both halves."""

from __future__ import annotations

import itertools

import pytest

from sandbox_server.core.lifecycle import SANDBOX_TRANSITIONS, SLOT_TRANSITIONS, IllegalTransition, SandboxEvent, SlotEvent, next_sandbox_state, next_slot_state
from sandbox_server.core.types import SandboxState, SlotState


@pytest.mark.parametrize(
    ("states", "events", "moves", "step"),
    [(SandboxState, SandboxEvent, SANDBOX_TRANSITIONS, next_sandbox_state), (SlotState, SlotEvent, SLOT_TRANSITIONS, next_slot_state)],
)
def test_every_pair_is_listed_or_raises_naming_both(states, events, moves, step):
    for state, event in itertools.product(states, events):
        if (state, event) in moves:
            assert step(state, event) is moves[state, event]
        else:
            with pytest.raises(IllegalTransition, match=rf"{event.value}.*{state.value}"):
                step(state, event)


def test_every_state_can_be_reached():
    assert {SandboxState.STARTING, *SANDBOX_TRANSITIONS.values()} == set(SandboxState)
    assert {SlotState.RESETTING, *SLOT_TRANSITIONS.values()} == set(SlotState)


def test_nothing_leaves_quarantine_or_comes_back_from_gone():
    assert not [state for state, _ in SLOT_TRANSITIONS if state is SlotState.QUARANTINED]
    assert not [state for state, _ in SANDBOX_TRANSITIONS if state is SandboxState.GONE]


def test_a_slot_is_leased_only_from_ready_or_kept():
    assert {state for (state, _), to in SLOT_TRANSITIONS.items() if to is SlotState.LEASED} == {SlotState.READY, SlotState.KEPT}
