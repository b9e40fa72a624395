"""Taking rights away from a held lease."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from sandbox_server.core.errors import BackendUnavailable, LeaseLost
from sandbox_server.core.types import Lease
from sandbox_server.link import AgentRefused, AgentSilent, LinkLost
from sandbox_server.link.errors import NotSupportedByAgent, RequestInvalid
from sandbox_server.pool.leasing import rights
from sandbox_server.pool.leasing.ended_leases import end_error
from sandbox_server.pool.pool import Pool
from sandbox_server.pool.slot_rights import narrow_slot_of

WITHIN_S = 30.0


async def narrow(pool: Pool, lease: Lease, allow_network: bool | None, cache: str | None) -> Lease:
    """Have the agent take rights away, then say so on record.

    Args:
        pool: the lease's pool.
        lease: as it is held now.
        allow_network: False takes the network away.
        cache: `none` takes the cache away.

    Raises:
        InvalidRequest: it would widen them.
        LeaseLost, SandboxLost: it ended meanwhile.
        NotImplementedHere: the slot's isolation mode cannot.
        BackendUnavailable: the agent cannot be reached, or could not do it.
    """
    rights.check_narrows(lease, allow_network, cache)
    has_network = lease.allow_network if allow_network is None else allow_network
    narrowed = replace(lease, allow_network=has_network, cache=lease.cache if cache is None else cache)
    if narrowed == lease:
        return lease
    try:
        async with asyncio.timeout(WITHIN_S):
            await _ask(pool, narrowed)
    except TimeoutError:
        raise BackendUnavailable(f"the agent did not narrow the slot within {WITHIN_S:g} s", lease_id=lease.lease_id) from None
    except AgentSilent as silent:
        raise BackendUnavailable(f"the agent cannot be reached: {silent}", lease_id=lease.lease_id) from None
    except (NotSupportedByAgent, RequestInvalid) as refused:
        _check_held(pool, lease.lease_id)
        raise rights.rights_not_supported(lease, refused.detail) from None
    except AgentRefused as refused:
        _check_held(pool, lease.lease_id)
        raise BackendUnavailable(f"the agent could not narrow the slot: {refused.detail}", lease_id=lease.lease_id) from None
    _check_held(pool, lease.lease_id)
    lease = pool.book.narrow_lease(lease.lease_id, allow_network=narrowed.allow_network, cache=narrowed.cache)
    await pool.flush()
    pool.lease_event("lease.narrowed", lease, allow_network=lease.allow_network, cache=lease.cache)
    return lease


async def _ask(pool: Pool, narrowed: Lease) -> None:
    """Ask until it is answered: asking twice is asking once."""
    while True:
        try:
            await narrow_slot_of(pool.agent_of(narrowed), narrowed, expects_prompt_response=True)
            return
        except (LinkLost, BackendUnavailable):
            lost = await pool.wait_for_reconnect_or_loss(narrowed.lease_id)
            if lost is not None:
                raise lost from None
            _check_held(pool, narrowed.lease_id)


def _check_held(pool: Pool, lease_id: str) -> None:
    """Raise how the lease ended, if it has.

    Raises:
        LeaseLost, SandboxLost: it has ended.
    """
    if lease_id not in pool.book.held:
        ended = pool.book.ended_leases.get(lease_id)
        raise end_error(ended) if ended is not None else LeaseLost(f"lease {lease_id} has ended", lease_id=lease_id)
