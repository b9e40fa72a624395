"""The requests to an agent that give a slot exactly the rights of its lease: network, cache and read-only entries."""

from __future__ import annotations

from sandbox_server.core.types import Lease
from sandbox_server.link import AgentClient
from sandbox_server.pool.leasing import rights


async def prepare_slot_of(agent: AgentClient, lease: Lease) -> None:
    """Give the slot of a new lease its cache and network, before the acquire is granted.

    Args:
        agent: the agent of the slot.
        lease: the lease.

    Raises:
        LinkLost: the connection ended before the response.
        AgentRefused: the agent refused the request.
    """
    if lease.cache == rights.NO_CACHE:
        await narrow_slot_of(agent, lease)
    else:
        await agent.equip_slot(lease.slot_id, lease.epoch, has_network=lease.allow_network, cache_key=rights.cache_of(lease).key, allow_hosts=_hosts_of(lease))


async def narrow_slot_of(agent: AgentClient, lease: Lease, *, expects_prompt_response: bool = False) -> None:
    """Take away from the slot of a lease the rights that the lease does not have. Repeating the request changes nothing.

    Args:
        agent: the agent of the slot.
        lease: the lease, with the rights that it keeps.
        expects_prompt_response: see `AgentClient.narrow_slot`.

    Raises:
        LinkLost: the connection ended before the response.
        AgentSilent: see `expects_prompt_response`.
        AgentRefused: the agent refused the request.
    """
    cache_key = None if lease.cache == rights.NO_CACHE else rights.cache_of(lease).key
    has_network = lease.allow_network
    await agent.narrow_slot(
        lease.slot_id,
        lease.epoch,
        has_network=has_network,
        cache_key=cache_key,
        read_only=lease.read_only,
        allow_hosts=_hosts_of(lease),
        expects_prompt_response=expects_prompt_response,
    )


def _hosts_of(lease: Lease) -> tuple[str, ...] | None:
    return lease.allow_hosts if lease.allow_network else None
