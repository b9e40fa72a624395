"""The schedule of faults comes from the seed alone."""

from __future__ import annotations

from itertools import islice

from tests.faults.schedule import WEIGHTS, schedule


def test_the_same_seed_gives_the_same_faults() -> None:
    assert list(islice(schedule(7), 100)) == list(islice(schedule(7), 100))
    assert list(islice(schedule(7), 100)) != list(islice(schedule(8), 100))


def test_what_is_not_possible_is_left_out_and_the_rest_stays() -> None:
    some = [fault for fault in islice(schedule(7), 200) if fault.what in ("cut", "service.kill")]

    assert list(islice(schedule(7, {"cut", "service.kill"}), len(some))) == some


def test_every_kind_of_fault_comes_and_kills_most_of_all() -> None:
    kinds = [fault.what for fault in islice(schedule(7), 300)]

    assert set(kinds) == set(WEIGHTS)
    assert max(WEIGHTS, key=kinds.count) == "service.kill"
