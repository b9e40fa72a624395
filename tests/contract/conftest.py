"""The contract's tests talk HTTP to the whole service; behind it are scripted agents."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.service_harness import ServiceHarness, open_service_harness, open_service_harness_on_port


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[ServiceHarness]:
    """A running service with one pool of four slots and two tenants."""
    async with open_service_harness(tmp_path / "state") as running:
        yield running


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[ServiceHarness]:
    """The same behind a real port."""
    async with open_service_harness_on_port(tmp_path / "state") as running:
        yield running
