"""The backends that the suite runs on. README.md says how to add one."""

from __future__ import annotations

import contextlib
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


@contextlib.asynccontextmanager
async def without_leftovers(make: Callable[[Path], BackendUnderTest]) -> AsyncIterator[BackendUnderTest]:
    """A backend without sandboxes. Every test has to leave it without sandboxes, too."""
    with short_folder() as folder:
        it = make(folder)
        yield it
        leftovers = await it.leftovers()
        # Nothing of a failed test keeps running, or harms the next.
        for owner in ("first", "second"):
            backend = it.make_backend(owner)
            for handle in await backend.list_owned(owner):
                await backend.destroy(handle)
        assert leftovers == []


@pytest.fixture(params=UNDER_TEST)
async def under_test(request: pytest.FixtureRequest) -> AsyncIterator[BackendUnderTest]:
    """Each backend, for tests that are run once per backend."""
    async with without_leftovers(UNDER_TEST[request.param]) as it:
        yield it


@pytest.fixture
async def all_under_test() -> AsyncIterator[dict[str, BackendUnderTest]]:
    """All backends by name, for tests that mostly wait and therefore try all of them at the same time."""
    async with contextlib.AsyncExitStack() as stack:
        backends: dict[str, BackendUnderTest] = {}
        for name, make in UNDER_TEST.items():
            # A backend that asks to be skipped is left out. The tests run on the others.
            with contextlib.suppress(pytest.skip.Exception):
                backends[name] = await stack.enter_async_context(without_leftovers(make))
        yield backends
