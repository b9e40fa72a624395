"""A benchmark's figures survive a noisy stretch: what is compared is measured in the same round, and the figure is a median."""

from __future__ import annotations

from dataclasses import replace

from tests.bench.churn_laps import ChurnRound
from tests.bench.report import render_table
from tests.bench.rounds import ROUNDS, ColdStart, Measurements, Round
from tests.bench.run_batch_laps import RunBatchRound

QUIET = Round(
    floor_call_s=0.001, service_call_s=0.002, client_call_s=0.0025, peer_call_s=0.003, floor_rate=1000.0, service_rate=900.0, peer_rate=400.0,
    acquire_s=0.001, release_to_acquire_s=0.005,
)  # fmt: skip
# The machine is five times slower, and the service, which is several processes, suffers more than the floor.
NOISY = Round(
    floor_call_s=0.005, service_call_s=0.050, client_call_s=0.060, peer_call_s=0.015, floor_rate=200.0, service_rate=60.0, peer_rate=80.0,
    acquire_s=0.010, release_to_acquire_s=0.2,
)  # fmt: skip
CHURN = ChurnRound(
    floor_call_s=0.0012, floor_rate=1000.0, neighbour_call_s=0.010, crowd_call_s=0.1, cycle_rate=200.0, cycle_cpu_s=0.006, python_fresh_rate=90.0,
    python_held_rate=100.0,
)  # fmt: skip
COLD = ColdStart(floor_call_s=0.001, took_s=1.2, slot_bytes=1.4e6, agent_bytes=15e6)
PROGRAMS = RunBatchRound(bare_rate=100.0, command_rate=80.0, file_rate=50.0)


def measured(rounds: list[Round]) -> Measurements:
    return Measurements(rounds=rounds, cold_starts=[COLD, ColdStart(floor_call_s=0.001, took_s=20.0, slot_bytes=None, agent_bytes=None), COLD])


def test_a_noisy_stretch_moves_no_figure() -> None:
    noisy_count = ROUNDS // 2 - 1
    disturbed = measured([QUIET] * (ROUNDS - noisy_count) + [NOISY] * noisy_count)

    assert render_table(disturbed) == render_table(measured([QUIET] * ROUNDS))
    assert render_table(disturbed)[1]


def test_a_service_that_is_slower_in_most_rounds_does_not_meet_the_bar() -> None:
    table, met = render_table(measured([NOISY] * ROUNDS))

    assert not met
    assert "| 10.00 × | ≤ 2.2 × | **no** |" in table


def test_a_ratio_is_taken_within_a_round() -> None:
    """On a machine that changes all the time, the two medians come from different rounds. Their ratio is not the figure."""
    rounds = [replace(QUIET, floor_call_s=floor_s, service_call_s=service_s) for floor_s, service_s in ((0.001, 0.002), (0.005, 0.010), (0.003, 0.030))]

    assert measured(rounds).median(lambda it: it.service_call_s / it.floor_call_s) == 2.0


def test_without_a_peer_its_lines_are_left_out() -> None:
    alone = replace(QUIET, peer_call_s=None, peer_rate=None)

    table, met = render_table(measured([alone]))

    assert met
    assert "SWE-ReX" not in table


def test_each_line_about_run_batches_has_its_own_bar() -> None:
    table, met = render_table(Measurements(run_batch_rounds=[PROGRAMS] * 3))

    assert not met
    assert "| 80/s | `subprocess`, 4 at a time: 100/s | 0.80 × | ≥ 0.6 × | yes |" in table
    assert "| 50/s | `subprocess`, 4 at a time: 100/s | 0.50 × | ≥ 0.6 × | **no** |" in table


def test_the_lines_about_fresh_slots_can_be_measured_alone() -> None:
    table, met = render_table(Measurements(churn_rounds=[CHURN] * 3))

    assert met
    assert "| 10.0 ms | bare: 1.2 ms | 8.3 × | ≤ 12.0 ms or 10.0 × | yes |" in table
    assert "one call at a time" not in table


def test_a_bar_that_is_a_time_holds_as_a_multiple_of_the_floor_too() -> None:
    slow = replace(CHURN, floor_call_s=0.0024, neighbour_call_s=0.020, crowd_call_s=0.2, cycle_cpu_s=0.012)
    slower = replace(slow, neighbour_call_s=0.025)

    assert render_table(replace(measured([QUIET]), churn_rounds=[slow]))[1]
    assert not render_table(replace(measured([QUIET]), churn_rounds=[slower]))[1]
