"""Every attack in every isolation mode of this machine: it must be held off, or be one that the README calls weak in that mode."""

from __future__ import annotations

import pytest

from tests.hostile.attacks import ATTACKS, Attack
from tests.hostile.attempt import attempt
from tests.hostile.hostile_harness import HostileHarness
from tests.hostile.matrix import Matrix


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.key)
def test_an_attack_is_held_off(harness: HostileHarness, matrix: Matrix, attack: Attack) -> None:
    outcome = attempt(harness, attack)

    matrix.record(attack.key, attack.title, harness, outcome)


def test_no_two_slots_share_a_uid_and_none_is_root(harness: HostileHarness) -> None:
    leases = [harness.acquire() for _ in range(3)]

    uids = [harness.host_uid_of(lease) for lease in leases]

    assert 0 not in uids
    if harness.as_root:
        assert len(set(uids)) == 3
