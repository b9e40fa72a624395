"""One service for the tests of run-batches: eight slots, and four in a pool of its own."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.support.service import SMALL_POOL, Service, running_service

POOLS = {
    "default": {**SMALL_POOL, "max_sandboxes": 1, "acquire_timeout_s": 10},
    "narrow": {**SMALL_POOL, "slots_per_sandbox": 2, "max_sandboxes": 1, "max_timeout_s": 60},
}
LIMITS = {"run_batch_kept_bytes": 200_000, "run_batch_items": 300, "run_batch_item_artifact_bytes": 200_000, "run_batch_artifact_bytes": 500_000}


@pytest.fixture(scope="package")
def service() -> Iterator[Service]:
    with running_service({"pools": POOLS, "limits": LIMITS}) as running:
        yield running


@pytest.fixture
def http(service: Service) -> Iterator[httpx.Client]:
    with service.http() as client:
        yield client
