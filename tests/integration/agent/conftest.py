"""Agents in every isolation mode that this machine supports, as root if the tests run as root, and as an ordinary user."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

from tests.integration.agent.agent_harness import AgentHarness, AgentProcess, agent_process, connected
from tests.support.users import ME, Runner, ordinary_user

ROOT = [("bwrap", "root"), ("uid", "root")]
USER = [("bwrap", "user"), ("none", "user")]
MODES = [*ROOT, *USER] if os.geteuid() == 0 else USER
BEST_USER = "root" if os.geteuid() == 0 else "user"

Maker = Callable[..., Awaitable[AgentHarness]]


def runner_of(user: str) -> Runner:
    """The user of an agent: `root` or `user`."""
    return ME if (user == "root") == (os.geteuid() == 0) else ordinary_user()


@pytest.fixture
async def make_harness() -> AsyncIterator[Maker]:
    """A function that starts an agent and connects to it. Keyword arguments are fields of the agent's configuration. The agents end with the test."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(mode: str = "bwrap", user: str = BEST_USER, **settings: Any) -> AgentHarness:
            agent = stack.enter_context(agent_process(runner_of(user), mode, **settings))
            return await stack.enter_async_context(connected(agent))

        yield make


class SharedAgents:
    """The agents that the tests of this folder share: one per mode and user, started when a test first needs it. It ends with the last test.

    Args:
        stack: ends the agents.
    """

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._agents: dict[tuple[str, str], AgentProcess] = {}

    def get_agent(self, mode: str, user: str) -> AgentProcess:
        """Return the agent of a mode and user; a new one if a test has left the last one in another state than it found it."""
        agent = self._agents.get((mode, user))
        if agent is None or agent.is_spoiled:
            self._agents[mode, user] = self._stack.enter_context(agent_process(runner_of(user), mode))
        return self._agents[mode, user]


@pytest.fixture(scope="package")
def shared_agents() -> Iterator[SharedAgents]:
    """One agent per mode and user, for all tests that leave it unchanged."""
    with contextlib.ExitStack() as stack:
        yield SharedAgents(stack)


@contextlib.asynccontextmanager
async def clean_harness(agent: AgentProcess) -> AsyncIterator[AgentHarness]:
    """A link to an agent that several tests use. The slots that the test has used are reset at the end."""
    async with connected(agent) as harness:
        yield harness
        answers = await asyncio.gather(*(harness.reset(slot) for slot in sorted(harness.used)))
        agent.is_spoiled = any(answer["state"] != "ready" for answer in answers)
        assert not agent.is_spoiled, f"{answers}\n{harness.log}"


@pytest.fixture(params=MODES, ids="-".join)
async def harness(request: pytest.FixtureRequest, shared_agents: SharedAgents) -> AsyncIterator[AgentHarness]:
    """A link to the shared agent of each mode."""
    async with clean_harness(shared_agents.get_agent(*request.param)) as harness:
        yield harness


@pytest.fixture
async def harnesses(shared_agents: SharedAgents) -> AsyncIterator[list[AgentHarness]]:
    """Links to the shared agents of all modes. A test that mostly waits tries all modes at the same time."""
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(clean_harness(shared_agents.get_agent(mode, user))) for mode, user in MODES]


@pytest.fixture
async def bwrap(shared_agents: SharedAgents) -> AsyncIterator[AgentHarness]:
    """A link to the shared agent in the best mode, as the user that runs the tests."""
    async with clean_harness(shared_agents.get_agent("bwrap", BEST_USER)) as harness:
        yield harness


@pytest.fixture
async def bwrap_user(shared_agents: SharedAgents) -> AsyncIterator[AgentHarness]:
    """A link to the shared agent of an ordinary user in the mode bwrap."""
    async with clean_harness(shared_agents.get_agent("bwrap", "user")) as harness:
        yield harness


@pytest.fixture(params=MODES, ids="-".join)
async def own_harness(request: pytest.FixtureRequest, make_harness: Maker) -> AgentHarness:
    """In each mode, an agent that only this test uses."""
    mode, user = request.param
    return await make_harness(mode, user, slots=1)


@pytest.fixture
async def make_breakable(shared_agents: SharedAgents, make_harness: Maker) -> AsyncIterator[Maker]:
    """A function that returns a link to an agent, whose slot the test breaks.

    A reset repairs the slot except in the mode `none`, in which the agent is therefore the test's own.
    """
    async with contextlib.AsyncExitStack() as stack:

        async def make(mode: str, user: str) -> AgentHarness:
            if mode == "none":
                return await make_harness(mode, user, slots=1)
            return await stack.enter_async_context(clean_harness(shared_agents.get_agent(mode, user)))

        yield make


@pytest.fixture(params=MODES, ids="-".join)
async def breakable(request: pytest.FixtureRequest, make_breakable: Maker) -> AgentHarness:
    """In each mode, a link to an agent whose slot the test breaks."""
    return await make_breakable(*request.param)


@pytest.fixture
async def all_breakable(make_breakable: Maker) -> list[AgentHarness]:
    """Links to an agent of each mode, whose slots the test breaks."""
    return [await make_breakable(mode, user) for mode, user in MODES]
