"""Where the calls and files of a held lease go."""

from __future__ import annotations

from dataclasses import dataclass

from sandbox_server.core.types import Lease, PoolSpec
from sandbox_server.link import AgentClient
from sandbox_server.link.slot_client import SlotClient


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotLocation:
    """The slot of a held lease, and the client of the agent that has it."""

    lease: Lease
    spec: PoolSpec
    agent: AgentClient
    slot_id: str
    epoch: int

    @property
    def slot(self) -> SlotClient:
        """The client for the calls and files of the slot."""
        return self.agent.slot(self.slot_id, self.epoch)
