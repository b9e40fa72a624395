"""The contract's tests talk HTTP to the whole service; behind it are scripted agents."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.harness import Harness, harness_on_a_port, open_harness


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[Harness]:
    """A running service with one pool of four slots and two tenants."""
    async with open_harness(tmp_path / "state") as running:
        yield running


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[Harness]:
    """The same behind a real port."""
    async with harness_on_a_port(tmp_path / "state") as running:
        yield running
