"""Random sequences of operations on the lease book. `BOOK_STEPS=10000` runs at least that many steps; the default is smaller."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.properties.book_machine import BookMachine

STEPS = int(os.environ.get("BOOK_STEPS", "3000"))
STEPS_A_LIFE = 50


@pytest.mark.timeout(600)
def test_the_lease_book_keeps_its_promises():
    run_state_machine_as_test(
        BookMachine,
        settings=settings(
            max_examples=max(1, STEPS // STEPS_A_LIFE),
            stateful_step_count=STEPS_A_LIFE,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
