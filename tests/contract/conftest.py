"""The contract's tests talk HTTP to the whole service; behind it are scripted agents."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.house import House, house_on_a_port, open_house


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    """A running service with one pool of four slots and two tenants."""
    async with open_house(tmp_path / "state") as running:
        yield running


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[House]:
    """The same behind a real port."""
    async with house_on_a_port(tmp_path / "state") as running:
        yield running
