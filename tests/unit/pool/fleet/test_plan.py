"""The plan, case by case: one snapshot in, actions out."""

from __future__ import annotations

import pytest

from sandbox_server.core.types import PoolSpec, SandboxState
from sandbox_server.pool.fleet.plan import BACKOFF_FIRST_S, BACKOFF_MAX_S, Create, Drain, Retire, SandboxSnapshot, Snapshot, backoff_s, plan

SPEC = PoolSpec(slots_per_sandbox=4, min_sandboxes=1, max_sandboxes=3, idle_timeout_s=10, max_lifetime_s=100, max_lease_s=50)


def ready(name="s-1", **fields):
    return SandboxSnapshot(**{"sandbox_id": name, "state": SandboxState.READY, "ready": 4, "ready_at": 0.0} | fields)


def starting(name="s-2"):
    return SandboxSnapshot(sandbox_id=name, state=SandboxState.STARTING)


def decide(*sandboxes, now=5.0, spec=SPEC, **fields):
    return plan(Snapshot(spec=spec, sandboxes=sandboxes, **fields), now)


def test_nothing_to_do():
    assert decide(ready()) == []


def test_fill_to_the_minimum():
    assert decide() == [Create()]


def test_creations_under_way_count_for_the_minimum_and_for_demand():
    assert decide(starting()) == []
    assert decide(starting(), slots_wanted=4) == []
    assert decide(starting(), slots_wanted=5) == [Create()]


def test_slots_that_are_being_reset_or_kept_are_coming():
    assert decide(ready(ready=0, leased=1, coming=3), slots_wanted=3) == []
    assert decide(ready(ready=0, leased=1, kept=3), slots_wanted=3) == []
    assert decide(ready(ready=0, leased=1, coming=3), slots_wanted=4) == [Create()]


def test_never_past_the_maximum_whatever_is_wanted():
    assert decide(ready(ready=0, leased=4), slots_wanted=100) == [Create(), Create()]
    failed = SandboxSnapshot(sandbox_id="s-3", state=SandboxState.FAILED, destroying=True)
    assert decide(ready(ready=0, leased=4), failed, slots_wanted=100) == [Create()]


def test_no_creation_before_its_time():
    assert decide(retry_at=6.0) == []
    assert decide(retry_at=6.0, now=6.0) == [Create()]


def test_warm_slots_are_beyond_the_leased_ones():
    warm = PoolSpec(slots_per_sandbox=4, min_sandboxes=0, max_sandboxes=3, warm_slots=2)
    assert decide(spec=warm) == [Create()]
    assert decide(ready(ready=2, leased=2), spec=warm) == []
    assert decide(ready(ready=1, leased=3), spec=warm) == [Create()]


def test_idle_above_the_minimum_goes_longest_idle_first():
    young, old = ready("young", idle_since=2.0), ready("old", idle_since=1.0)
    assert decide(young, old, now=11.0) == [Drain("old", "idle for idle_timeout_s of 10 s")]
    assert decide(young, old, now=50.0) == [Drain("old", "idle for idle_timeout_s of 10 s")]
    assert decide(young, old, now=10.5) == []
    assert decide(young, old, now=50.0, slots_wanted=1) == []


def test_a_lifetime_ends_in_two_steps():
    assert decide(ready(leased=1), now=100.0) == [Drain("s-1", "max_lifetime_s is over"), Create()]
    draining = ready(state=SandboxState.DRAINING, leased=1)
    assert decide(draining, ready("s-2", ready_at=100.0), now=140.0) == []
    (action,) = decide(draining, ready("s-2", ready_at=100.0), now=150.0)
    assert isinstance(action, Retire)
    assert action.ends_leases


def test_a_drained_sandbox_is_retired_once():
    drained = ready(state=SandboxState.DRAINING)
    assert decide(drained, ready("s-2")) == [Retire("s-1", "drained")]
    assert decide(ready(state=SandboxState.DRAINING, destroying=True), ready("s-2")) == []


def test_a_quarter_in_quarantine_is_too_many():
    assert decide(ready(ready=3, quarantined=1)) == [Drain("s-1", "1 of its slots are in quarantine"), Create()]
    ten = PoolSpec(slots_per_sandbox=10)
    assert decide(ready(ready=8, quarantined=2), spec=ten) == []
    assert decide(ready(ready=7, quarantined=3), spec=ten) == [Drain("s-1", "3 of its slots are in quarantine"), Create()]


def test_a_pool_that_goes_away_drains_all_and_makes_none():
    assert decide(ready(), starting(), closing=True, slots_wanted=9) == [
        Drain("s-1", "the pool is going away"),
        Drain("s-2", "the pool is going away"),
    ]


@pytest.mark.parametrize("jitter", [0.0, 0.5, 1.0])
def test_backing_off_doubles_is_bounded_and_spread(jitter):
    waits = [backoff_s(failures, lambda: jitter) for failures in range(1, 30)]

    assert waits == sorted(waits)
    assert waits[0] == pytest.approx(BACKOFF_FIRST_S * (0.75 + 0.5 * jitter))
    assert waits[-1] == pytest.approx(BACKOFF_MAX_S * (0.75 + 0.5 * jitter))
