"""Agents in every isolation mode that this machine supports, as root if the tests run as root, and as an ordinary user."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

from tests.integration.agent.harness import Agent, Harness, agent_process, connected
from tests.support.users import ME, Runner, ordinary_user

ROOT = [("bwrap", "root"), ("uid", "root")]
USER = [("bwrap", "user"), ("none", "user")]
MODES = [*ROOT, *USER] if os.geteuid() == 0 else USER
BEST_USER = "root" if os.geteuid() == 0 else "user"

Maker = Callable[..., Awaitable[Harness]]


def _runner(user: str) -> Runner:
    return ME if (user == "root") == (os.geteuid() == 0) else ordinary_user()


@pytest.fixture
async def make_harness() -> AsyncIterator[Maker]:
    """A function that starts an agent and connects to it. Keyword arguments are fields of the agent's configuration. The agents end with the test."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(mode: str = "bwrap", user: str = BEST_USER, **settings: Any) -> Harness:
            agent = stack.enter_context(agent_process(_runner(user), mode, **settings))
            return await stack.enter_async_context(connected(agent))

        yield make


@pytest.fixture(scope="package", params=MODES, ids="-".join)
def shared_agent(request: pytest.FixtureRequest) -> Iterator[Agent]:
    """One agent per mode, for all tests that leave it unchanged."""
    mode, user = request.param
    with agent_process(_runner(user), mode) as agent:
        yield agent


@pytest.fixture(scope="package")
def best_agent() -> Iterator[Agent]:
    """One agent in the best mode, as the user that runs the tests."""
    with agent_process(_runner(BEST_USER), "bwrap") as agent:
        yield agent


@contextlib.asynccontextmanager
async def _clean_harness(agent: Agent) -> AsyncIterator[Harness]:
    async with connected(agent) as harness:
        yield harness
        for slot in harness.epochs:
            assert (await harness.reset(slot))["state"] == "ready"


@pytest.fixture
async def harness(shared_agent: Agent) -> AsyncIterator[Harness]:
    """A link to the agent of each mode, whose slots are reset after each test."""
    async with _clean_harness(shared_agent) as harness:
        yield harness


@pytest.fixture
async def bwrap(best_agent: Agent) -> AsyncIterator[Harness]:
    """A link to the agent in the best mode, whose slots are reset after each test."""
    async with _clean_harness(best_agent) as harness:
        yield harness


@pytest.fixture(params=MODES, ids="-".join)
async def own_harness(request: pytest.FixtureRequest, make_harness: Maker) -> Harness:
    """In each mode, an agent that only this test uses."""
    mode, user = request.param
    return await make_harness(mode, user)
