"""Services and pools for these tests: a service whose slots have every limit, shared; more pools of it, and services with settings of a test's own."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from tests.integration.attribution.station import Station
from tests.support.service import Service, running_service
from tests.support.users import ME, Runner

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


@contextmanager
def new_pool(service: Service, pool: dict[str, Any], runner: Runner = ME) -> Iterator[Station]:
    """Another pool of a running service, and calls to it. It takes half of the time that another service takes."""
    station = Station(service, runner, f"pool-{uuid.uuid4().hex[:8]}")
    made = station.ask("PUT", f"/v1/pools/{station.pool}", json={**POOL, **pool})
    assert made.get("name") == station.pool, made
    try:
        station.until(lambda: station.view()["sandboxes"]["ready"] >= 1)
        yield station
    finally:
        with service.http() as http:
            assert http.delete(f"/v1/pools/{station.pool}", params={"force": "1"}).status_code == 202
        station.until(lambda: "slots" not in station.view())  # its sandboxes are gone, too
        station.close()


Open = Callable[..., Station]


@pytest.fixture
def open_one() -> Iterator[Open]:
    """Opens services of the test's own: `open_one(options, **of_the_pool)`."""
    with ExitStack() as stack:
        yield lambda options=None, **pool: stack.enter_context(open_station(pool, options or {}))


@pytest.fixture
def open_pool(shared_station: Station) -> Iterator[Open]:
    """Opens pools of the test's own in the shared service: `open_pool(**of_the_pool)`."""
    with ExitStack() as stack:
        yield lambda **pool: stack.enter_context(new_pool(shared_station.service, pool))


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
