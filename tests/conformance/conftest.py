"""The backends that the suite runs on. README.md says how to add one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tests.conformance.under_test import BackendUnderTest, FakeUnderTest, LocalUnderTest
from tests.support.service import short_folder

UNDER_TEST: dict[str, Callable[[Path], BackendUnderTest]] = {
    "fake": lambda folder: FakeUnderTest(),
    "local-unix": lambda folder: LocalUnderTest(folder, "unix"),
    "local-tls": lambda folder: LocalUnderTest(folder, "tls"),
    "local-stdio": lambda folder: LocalUnderTest(folder, "stdio"),
}


@pytest.fixture(params=UNDER_TEST)
async def under_test(request: pytest.FixtureRequest) -> AsyncIterator[BackendUnderTest]:
    """A backend without sandboxes. Every test has to leave it without sandboxes, too."""
    with short_folder() as folder:
        it = UNDER_TEST[request.param](folder)
        yield it
        leftovers = await it.leftovers()
        # Nothing of a failed test keeps running, or harms the next.
        for owner in ("first", "second"):
            backend = it.make_backend(owner)
            for handle in await backend.list_owned(owner):
                await backend.destroy(handle)
        assert leftovers == []
