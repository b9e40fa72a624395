"""What a run could not do is named."""

from __future__ import annotations

import pytest

from tests.faults.__main__ import in_words
from tests.faults.crash_harness import Report, left_out
from tests.faults.history import Event, History
from tests.faults.requirements import clock_problem, faketime_library
from tests.support.service import clean_environ


def test_a_library_that_is_not_there_is_named_with_what_installs_it(tmp_path):
    assert faketime_library(tmp_path) is None
    assert "apt-get install faketime" in str(clock_problem(None, tmp_path, clean_environ({})))


def test_a_library_that_sets_no_clock_is_found_out(tmp_path):
    broken = tmp_path / "some-arch" / "faketime" / "libfaketime.so.1"
    broken.parent.mkdir(parents=True)
    broken.write_bytes(b"of another machine")

    assert faketime_library(tmp_path) == broken
    assert "does not set the clock" in str(clock_problem(broken, tmp_path, clean_environ({})))


@pytest.mark.skipif(faketime_library() is None, reason="libfaketime is not installed")
def test_a_library_that_sets_the_clock_will_do(tmp_path):
    assert clock_problem(faketime_library(), tmp_path, clean_environ({})) is None


def granted(isolation: str) -> Event:
    return Event(1.0, "granted", {"leases": [{"lease_id": "l-1", "isolation": isolation}]})


def test_what_was_left_out_is_in_the_report_by_name():
    said = left_out([granted("uid")], {"clock.jump": "libfaketime is not installed"})
    report = Report(seed=1, seconds=60.0, history=History(), violations=[], figures={"clock jumps": 0}, left_out=said)

    assert "clock.jump was not injected: libfaketime is not installed" in in_words(report, 1)
    assert "isolation mode uid" in in_words(report, 1)
    assert left_out([granted("bwrap")], {}) == []
