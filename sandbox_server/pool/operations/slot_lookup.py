"""Finds the slot and the agent of a held lease, and waits until it is known whether an unreachable sandbox is lost."""

from __future__ import annotations

from dataclasses import dataclass

from sandbox_server.core.errors import BackendUnavailable, SandboxLost
from sandbox_server.core.types import Lease, PoolSpec
from sandbox_server.link import AgentClient
from sandbox_server.link.slot_client import SlotClient
from sandbox_server.pool.leasing.ended_leases import end_error
from sandbox_server.pool.pool import Pool


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolSlotLocation:
    """The slot of a held lease, and the client of its agent. It is a `SlotLocation` of the dispatch."""

    lease: Lease
    spec: PoolSpec
    agent: AgentClient
    slot_id: str
    epoch: int

    @property
    def slot(self) -> SlotClient:
        """The client for the calls and files of the slot."""
        return self.agent.slot(self.slot_id, self.epoch)


def agent_of(pool: Pool, lease: Lease) -> AgentClient:
    """The client of the agent of a held lease.

    Args:
        pool: the lease's pool.
        lease: the lease.

    Raises:
        BackendUnavailable: the agent cannot be reached now; whether its sandbox is lost is not known yet.
    """
    sandbox = pool.fleet.sandboxes[lease.sandbox_id]
    if sandbox.agent is None or not sandbox.reachable:
        raise BackendUnavailable(f"the agent of sandbox {lease.sandbox_id} cannot be reached at the moment", lease_id=lease.lease_id)
    return sandbox.agent


def locate_slot(pool: Pool, lease: Lease) -> PoolSlotLocation:
    """Find the slot of a held lease, to which its calls and file transfers are sent.

    Args:
        pool: the lease's pool.
        lease: the lease.

    Raises:
        BackendUnavailable: the agent cannot be reached now.
    """
    return PoolSlotLocation(lease=lease, spec=pool.spec, agent=agent_of(pool, lease), slot_id=lease.slot_id, epoch=lease.epoch)


async def wait_for_reconnect_or_loss(pool: Pool, lease_id: str) -> SandboxLost | None:
    """Wait until it is known whether the sandbox of a lease is gone.

    Args:
        pool: the lease's pool.
        lease_id: the lease.

    Returns:
        How the sandbox was lost; None if its agent can be reached again, or the lease has ended in another way.
    """
    while True:
        held_lease = pool.book.held.get(lease_id)
        if held_lease is None:
            ended = pool.book.ended_leases.get(lease_id)
            error = end_error(ended) if ended is not None else None
            return error if isinstance(error, SandboxLost) else None
        sandbox = pool.fleet.sandboxes[held_lease.lease.sandbox_id]
        if sandbox.reachable:
            return None
        await sandbox.changed.wait()
