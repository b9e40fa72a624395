"""Takes rights away from a held lease: its network or its cache."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from sandbox_server.core.errors import BackendUnavailable, LeaseLost
from sandbox_server.core.types import Lease
from sandbox_server.link import AgentRefused, AgentSilent, LinkLost
from sandbox_server.link.errors import NotSupportedByAgent, RequestInvalid
from sandbox_server.pool.granting.slot_rights import narrow_slot_of
from sandbox_server.pool.leasing import rights
from sandbox_server.pool.leasing.ended_leases import end_error
from sandbox_server.pool.operations.slot_lookup import agent_of, wait_for_reconnect_or_loss
from sandbox_server.pool.pool import Pool

NARROW_WITHIN_S = 30.0


async def narrow(pool: Pool, lease: Lease, allow_network: bool | None, cache: str | None) -> Lease:
    """Have the agent take rights away from the slot of a lease, then record the lease with the rights that are left.

    Args:
        pool: the lease's pool.
        lease: the lease as it is held now.
        allow_network: False takes the network away; None leaves it as it is.
        cache: `none` takes the cache away; None leaves it as it is.

    Raises:
        InvalidRequest: the lease would get a right that it does not have.
        LeaseLost, SandboxLost: the lease has ended meanwhile.
        NotImplementedHere: the slot's isolation mode cannot take this right away.
        BackendUnavailable: the agent cannot be reached, or has failed.
    """
    rights.check_narrows(lease, allow_network, cache)
    has_network = lease.allow_network if allow_network is None else allow_network
    narrowed = replace(lease, allow_network=has_network, cache=lease.cache if cache is None else cache)
    if narrowed == lease:
        return lease
    try:
        async with asyncio.timeout(NARROW_WITHIN_S):
            await _narrow_slot(pool, narrowed)
    except TimeoutError:
        raise BackendUnavailable(f"the agent did not narrow the slot within {NARROW_WITHIN_S:g} s", lease_id=lease.lease_id) from None
    except AgentSilent as silent:
        raise BackendUnavailable(f"the agent cannot be reached: {silent}", lease_id=lease.lease_id) from None
    except (NotSupportedByAgent, RequestInvalid) as refused:
        _check_still_held(pool, lease.lease_id)
        raise rights.rights_not_supported(lease, refused.detail) from None
    except AgentRefused as refused:
        _check_still_held(pool, lease.lease_id)
        raise BackendUnavailable(f"the agent could not narrow the slot: {refused.detail}", lease_id=lease.lease_id) from None
    _check_still_held(pool, lease.lease_id)
    lease = pool.book.narrow_lease(lease.lease_id, allow_network=narrowed.allow_network, cache=narrowed.cache)
    await pool.flush()
    pool.events.publish_lease_event("lease.narrowed", lease, allow_network=lease.allow_network, cache=lease.cache)
    return lease


async def _narrow_slot(pool: Pool, narrowed: Lease) -> None:
    """Send the request until it is answered. Repeating the request changes nothing."""
    while True:
        try:
            await narrow_slot_of(agent_of(pool, narrowed), narrowed, expects_prompt_response=True)
            return
        except (LinkLost, BackendUnavailable):
            lost = await wait_for_reconnect_or_loss(pool, narrowed.lease_id)
            if lost is not None:
                raise lost from None
            _check_still_held(pool, narrowed.lease_id)


def _check_still_held(pool: Pool, lease_id: str) -> None:
    """Check that a lease has not ended.

    Raises:
        LeaseLost, SandboxLost: it has ended; the error says how.
    """
    if lease_id not in pool.book.held:
        ended = pool.book.ended_leases.get(lease_id)
        raise end_error(ended) if ended is not None else LeaseLost(f"lease {lease_id} has ended", lease_id=lease_id)
