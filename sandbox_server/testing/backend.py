"""A backend whose sandboxes are fake agents in this process. A test makes a fault with a subclass that overrides one method."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence

from sandbox_server.backends.base import BackendTraits, CreateContext, CreateFailed, Observation, ObservedState
from sandbox_server.core.types import Handle, PoolSpec
from sandbox_server.link import AgentEndpoint, AgentLink, LinkLost
from sandbox_server.testing.agent import FakeAgent, FakeLink

GONE = Observation(state=ObservedState.GONE, detail="the fake sandbox was killed or destroyed")


class FakeBackend:
    """Keeps its sandboxes in memory.

    Args:
        owner: the owner of its sandboxes.

    Attributes:
        agents: the agents that run, by sandbox id.
        handles: the last checkpoint of each sandbox that was not destroyed, by sandbox id.
        ends_at: when the backend ends a sandbox by itself, in Unix seconds, by sandbox id. Tests fill it; `traits.ends_sandboxes` must be set, too.
        unreachable: while it is set, the control plane cannot be asked: `destroy`, `observe` and `list_owned` raise this error, `create` CreateFailed.
        created: the ids of the sandboxes whose creation began, in order.
        destroyed: the ids of the sandboxes that were destroyed, in order.
        observed: the sandbox ids of each call of `observe`, in order, whether or not it could be answered.
        most_at_once: the largest number of sandboxes that there were at one time.
    """

    def __init__(self, owner: str = "local") -> None:
        self.name = "local"
        self.traits = BackendTraits()
        self.owner = owner
        self.agents: dict[str, FakeAgent] = {}
        self.handles: dict[str, Handle] = {}
        self.ends_at: dict[str, float] = {}
        self.unreachable: Exception | None = None
        self.created: list[str] = []
        self.destroyed: list[str] = []
        self.observed: list[list[str]] = []
        self.most_at_once = 0

    def make_agent(self, pool: str, spec: PoolSpec, sandbox_id: str) -> FakeAgent:
        """Make the agent of a new sandbox.

        Args:
            pool: the key of the pool's id.
            spec: the pool's spec.
            sandbox_id: the id of the new sandbox.
        """
        return FakeAgent(sandbox_id, slots=spec.slots_per_sandbox)

    async def before_agent(self, sandbox_id: str) -> None:
        """Run between the first checkpoint and the last. A test overrides it to wait or to raise."""

    async def create(self, context: CreateContext) -> AsyncGenerator[Handle, None]:
        """Create a sandbox, with one checkpoint before its agent runs and one after."""
        sandbox_id = context.sandbox_id
        self.created.append(sandbox_id)
        self._check_can_create()
        handle = Handle(backend=self.name, pool=context.pool_id.key, owner=self.owner, sandbox_id=sandbox_id)
        self.handles[sandbox_id] = handle
        self.most_at_once = max(self.most_at_once, len(self.handles))
        yield handle
        await self.before_agent(sandbox_id)
        self._check_can_create()
        agent = self.agents[sandbox_id] = self.make_agent(handle.pool, context.spec, sandbox_id)
        handle = Handle(backend=self.name, pool=handle.pool, owner=self.owner, sandbox_id=sandbox_id, address=f"fake:{sandbox_id}", token=agent.token)
        self.handles[sandbox_id] = handle
        yield handle

    async def destroy(self, handle: Handle) -> None:
        """Destroy a sandbox."""
        self._check_reachable()
        self.kill(handle.sandbox_id)
        if self.handles.pop(handle.sandbox_id, None) is not None:
            self.destroyed.append(handle.sandbox_id)

    async def observe(self, handles: Sequence[Handle]) -> Mapping[str, Observation]:
        """Report which sandboxes have a running agent."""
        self.observed.append([handle.sandbox_id for handle in handles])
        self._check_reachable()
        return {handle.sandbox_id: self._observe_one(handle.sandbox_id) for handle in handles}

    def _observe_one(self, sandbox_id: str) -> Observation:
        handle = self.handles.get(sandbox_id)
        if handle is not None and handle.address is None:
            return Observation(state=ObservedState.STARTING)
        return Observation(state=ObservedState.RUNNING, ends_at=self.ends_at.get(sandbox_id)) if sandbox_id in self.agents else GONE

    async def list_owned(self, owner: str) -> Sequence[Handle]:
        """List every sandbox that was not destroyed."""
        self._check_reachable()
        return [handle for handle in self.handles.values() if handle.owner == owner]

    async def close(self) -> None:
        """Do nothing: there are no connections."""

    def kill(self, sandbox_id: str) -> None:
        """End a sandbox from outside, without the service's doing."""
        agent = self.agents.pop(sandbox_id, None)
        if agent is not None:
            agent.hang_up()

    def _check_can_create(self) -> None:
        if self.unreachable is not None:
            raise CreateFailed(f"the fake backend cannot be asked: {self.unreachable}")

    def _check_reachable(self) -> None:
        if self.unreachable is not None:
            raise self.unreachable

    async def connect(self, endpoint: AgentEndpoint, timeout_s: float = 10.0) -> AgentLink:
        """Connect to an agent of this backend, as `link.connect` does.

        Args:
            endpoint: the address and the token of the agent.
            timeout_s: how long to wait, in seconds. Fake agents answer at once.

        Raises:
            LinkLost: no agent has that address, or the agent closed the connection.
        """
        agent = self.agents.get(endpoint.address.partition(":")[2])
        if agent is None:
            raise LinkLost(f"no agent answers at {endpoint.address}")
        return await FakeLink.to(agent, endpoint.token)
