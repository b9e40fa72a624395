"""What the dispatch asks of the pool."""

from __future__ import annotations

from typing import Any, Protocol

from sandbox_server.core.errors import SandboxLost
from sandbox_server.core.types import Lease, PoolSpec
from sandbox_server.link.agent_client import AgentClient
from sandbox_server.link.slot_client import SlotClient


class SlotLocation(Protocol):
    """The way from a lease to its slot, as it is now."""

    @property
    def lease(self) -> Lease: ...

    @property
    def spec(self) -> PoolSpec: ...

    @property
    def agent(self) -> AgentClient: ...

    @property
    def slot(self) -> SlotClient:
        """The client for the calls and files of the slot."""
        ...

    @property
    def slot_id(self) -> str:
        """The slot's name at its agent."""
        ...

    @property
    def epoch(self) -> int: ...


class SlotLocator(Protocol):
    """Finds the way, and hears what uses it. `pool.Pools` is it."""

    def route(self, tenant: str, lease_id: str) -> SlotLocation:
        """The way to the slot of a lease that holds.

        Raises:
            LeaseNotFound, LeaseLost, SandboxLost, BackendUnavailable: there is none.
        """
        ...

    def call_started(self, lease_id: str) -> None:
        """A call runs under this lease: it does not expire meanwhile."""
        ...

    def call_ended(self, lease_id: str) -> None:
        """The other end of `call_started`."""
        ...

    async def wait_for_reconnect_or_loss(self, lease_id: str, wait_s: float) -> SandboxLost | None:
        """Wait, after a link was lost, until the pool knows: the error if the sandbox is gone, None if it can be reached again or time is up."""
        ...


def slot_meta(route: SlotLocation, op: str, **more: Any) -> dict[str, Any]:
    """The OPEN of a stream about the slot of this route."""
    return {"op": op, "slot": route.slot_id, "epoch": route.epoch, **more}
