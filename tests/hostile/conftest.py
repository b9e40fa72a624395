"""The services that are attacked: in every isolation mode of this machine, as root where the tests run as root, and as an ordinary user."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hostile.hostile_harness import HARNESSES, HostileHarness, open_hostile_harness
from tests.hostile.matrix import Matrix

MATRIX_FOLDER = Path(__file__).resolve().parent.parent.parent / "build"


@pytest.fixture(scope="session")
def matrix() -> Iterator[Matrix]:
    """The table that the attacks fill in; written to the build folder at the end of the run."""
    table = Matrix()
    yield table
    if table.rows:
        table.save(MATRIX_FOLDER)


@pytest.fixture(scope="package", params=HARNESSES, ids="-".join)
def running_harness(request: pytest.FixtureRequest) -> Iterator[HostileHarness]:
    """One service for each mode and user, shared by the whole suite."""
    mode, user = request.param
    with open_hostile_harness(mode, user) as harness:
        yield harness


@pytest.fixture
def harness(running_harness: HostileHarness) -> Iterator[HostileHarness]:
    """The running service, with all of its slots free before and after the test."""
    running_harness.settled()
    yield running_harness
    running_harness.release_all()
    running_harness.settled()
