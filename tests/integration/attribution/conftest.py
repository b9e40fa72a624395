"""Services for these tests: one whose slots have every limit, shared; others with settings of a test's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from tests.integration.attribution.station import Station
from tests.support.service import running_service
from tests.support.users import ME

POOL = {
    "backend": "local",
    "slots_per_sandbox": 4,
    "min_sandboxes": 1,
    "max_sandboxes": 2,
    "slot_memory_mb": 200,
    "slot_processes": 60,
    "max_file_mb": 8,
    "on_shutdown": "destroy",
}


@contextmanager
def open_station(pool: dict[str, Any], options: dict[str, Any]) -> Iterator[Station]:
    """A service with this pool, and calls to it."""
    with running_service({"pools": {"default": {**POOL, **pool}}}, **options) as service:
        station = Station(service, options.get("runner", ME))
        yield station
        station.close()


Open = Callable[..., Station]


@pytest.fixture
def open_one() -> Iterator[Open]:
    """Opens services of the test's own: `open_one(options, **of_the_pool)`."""
    with ExitStack() as stack:
        yield lambda options=None, **pool: stack.enter_context(open_station(pool, options or {}))


@pytest.fixture(scope="package")
def shared_station() -> Iterator[Station]:
    """The service that all tests share which leave it whole."""
    with open_station({}, {}) as station:
        yield station


@pytest.fixture
def station(shared_station: Station) -> Iterator[Station]:
    """The shared service, all of its slots free before and after."""
    yield shared_station
    shared_station.release_all()
