"""A backend whose sandboxes are fake agents in this process. A fault is a subclass that overrides one method."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence

from sandbox_server.backends.base import Health
from sandbox_server.core.types import Handle, PoolSpec
from sandbox_server.link import AgentLink, Endpoint, LinkLost
from sandbox_server.testing.agent import FakeAgent, FakeLink


class FakeBackend:
    """Sandboxes in memory.

    Args:
        owner: who its sandboxes belong to.
    """

    def __init__(self, owner: str = "local") -> None:
        self.name = "local"
        self.owner = owner
        self.agents: dict[str, FakeAgent] = {}
        self.handles: dict[str, Handle] = {}
        self.created: list[str] = []
        self.destroyed: list[str] = []
        self.most_at_once = 0

    def make_agent(self, pool: str, spec: PoolSpec, sandbox_id: str) -> FakeAgent:
        """The agent of a new sandbox."""
        return FakeAgent(sandbox_id, slots=spec.slots_per_sandbox)

    async def before_agent(self, sandbox_id: str) -> None:
        """Runs between the first checkpoint and the last: wait here, or raise."""

    async def create(self, pool: str, spec: PoolSpec, sandbox_id: str) -> AsyncGenerator[Handle, None]:
        """Make one: a checkpoint before its agent is there, and one after."""
        self.created.append(sandbox_id)
        handle = Handle(backend=self.name, pool=pool, owner=self.owner, sandbox_id=sandbox_id)
        self.handles[sandbox_id] = handle
        self.most_at_once = max(self.most_at_once, len(self.handles))
        yield handle
        await self.before_agent(sandbox_id)
        agent = self.agents[sandbox_id] = self.make_agent(pool, spec, sandbox_id)
        handle = Handle(backend=self.name, pool=pool, owner=self.owner, sandbox_id=sandbox_id, address=f"fake:{sandbox_id}", token=agent.token)
        self.handles[sandbox_id] = handle
        yield handle

    async def destroy(self, handle: Handle) -> None:
        """Take it away."""
        self.kill(handle.sandbox_id)
        if self.handles.pop(handle.sandbox_id, None) is not None:
            self.destroyed.append(handle.sandbox_id)

    async def check(self, handles: Sequence[Handle]) -> Mapping[str, Health]:
        """Whether their agents are there."""
        return {handle.sandbox_id: Health.RUNNING if handle.sandbox_id in self.agents else Health.GONE for handle in handles}

    async def list_owned(self, owner: str) -> Sequence[Handle]:
        """Every sandbox that is not destroyed."""
        return [handle for handle in self.handles.values() if handle.owner == owner]

    async def close(self) -> None:
        """There is nothing to let go of."""

    def kill(self, sandbox_id: str) -> None:
        """A sandbox dies by itself."""
        agent = self.agents.pop(sandbox_id, None)
        if agent is not None:
            agent.hang_up()

    async def connect(self, endpoint: Endpoint, timeout_s: float = 10.0) -> AgentLink:
        """As `link.connect`, to the agents of this backend.

        Raises:
            LinkLost: there is none at that address, or it hung up.
        """
        agent = self.agents.get(endpoint.address.partition(":")[2])
        if agent is None:
            raise LinkLost(f"nobody answers at {endpoint.address}")
        return await FakeLink.to(agent, endpoint.token)
