"""Services and pools for these tests: a service whose slots have every limit, shared; more pools of it, and services with settings of a test's own."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from tests.integration.attribution.pool_harness import PoolHarness
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
def open_pool_harness(pool: dict[str, Any], options: dict[str, Any]) -> Iterator[PoolHarness]:
    """A service with this pool, and calls to it."""
    with running_service({"pools": {"default": {**POOL, **pool}}}, **options) as service:
        harness = PoolHarness(service, options.get("runner", ME))
        yield harness
        harness.close()


@contextmanager
def new_pool(service: Service, pool: dict[str, Any], runner: Runner = ME) -> Iterator[PoolHarness]:
    """Another pool of a running service, and calls to it. It takes half of the time that another service takes."""
    harness = PoolHarness(service, runner, f"pool-{uuid.uuid4().hex[:8]}")
    made = harness.ask("PUT", f"/v1/pools/{harness.pool}", json={**POOL, **pool})
    assert made.get("name") == harness.pool, made
    try:
        harness.until(lambda: harness.view()["sandboxes"]["ready"] >= 1)
        yield harness
    finally:
        with service.http() as http:
            assert http.delete(f"/v1/pools/{harness.pool}", params={"force": "1"}).status_code == 202
        harness.until(lambda: "slots" not in harness.view())  # its sandboxes are gone, too
        harness.close()


Open = Callable[..., PoolHarness]


@pytest.fixture
def open_service() -> Iterator[Open]:
    """Opens services of the test's own: `open_service(options, **of_the_pool)`."""
    with ExitStack() as stack:
        yield lambda options=None, **pool: stack.enter_context(open_pool_harness(pool, options or {}))


@pytest.fixture
def open_pool(shared_harness: PoolHarness) -> Iterator[Open]:
    """Opens pools of the test's own in the shared service: `open_pool(**of_the_pool)`."""
    with ExitStack() as stack:
        yield lambda **pool: stack.enter_context(new_pool(shared_harness.service, pool))


@pytest.fixture(scope="package")
def shared_harness() -> Iterator[PoolHarness]:
    """The service that all tests share which leave it whole."""
    with open_pool_harness({}, {}) as harness:
        yield harness


@pytest.fixture
def harness(shared_harness: PoolHarness) -> Iterator[PoolHarness]:
    """The shared service, all of its slots free before and after."""
    yield shared_harness
    shared_harness.release_all()
