"""Takes rights away from a held lease: its network, its cache, or the right to change entries of its workspace."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from sandbox_server.core.errors import BackendUnavailable, InvalidRequest, LeaseLost, NotImplementedHere
from sandbox_server.core.types import Lease
from sandbox_server.link import AgentRefused, AgentSilent, LinkLost
from sandbox_server.link.errors import FileOperationFailed, NotSupportedByAgent, PathNotFound, ReadOnlyNotSupported, RequestInvalid
from sandbox_server.pool.granting.slot_rights import narrow_slot_of
from sandbox_server.pool.leasing import rights
from sandbox_server.pool.leasing.ended_leases import end_error
from sandbox_server.pool.operations.slot_location import agent_of, wait_for_reconnect_or_loss
from sandbox_server.pool.pool import Pool

NARROW_WITHIN_S = 30.0


async def narrow(pool: Pool, lease: Lease, allow_network: bool | None, cache: str | None, read_only: Sequence[str] = ()) -> Lease:
    """Have the agent take rights away from the slot of a lease, then record the lease with the rights that are left.

    Args:
        pool: the lease's pool.
        lease: the lease as it is held now.
        allow_network: False takes the network away; None leaves it as it is.
        cache: `none` takes the cache away; None leaves it as it is.
        read_only: the entries at the top of the workspace that become read-only, in addition to those that are so already.

    The record is written after the agent has done it, so that a lease never claims less rights than its slot has. If the service ends in between, a repeated
    request finds the slot narrowed already, and only writes the record.

    Raises:
        InvalidRequest: the lease would get a right that it does not have, or an entry does not exist or cannot be made read-only.
        LeaseLost, SandboxLost: the lease has ended meanwhile.
        NotImplementedHere: the slot's isolation mode cannot take this right away.
        BackendUnavailable: the agent cannot be reached, or has failed.
    """
    rights.check_narrows(lease, allow_network, cache)
    has_network = lease.allow_network if allow_network is None else allow_network
    entries = rights.add_read_only(lease, read_only)
    narrowed = replace(lease, allow_network=has_network, cache=lease.cache if cache is None else cache, read_only=entries)
    if narrowed == lease:
        return lease
    try:
        async with asyncio.timeout(NARROW_WITHIN_S):
            await _narrow_slot(pool, narrowed)
    except TimeoutError:
        raise BackendUnavailable(f"the agent did not narrow the slot within {NARROW_WITHIN_S:g} s", lease_id=lease.lease_id) from None
    except AgentSilent as silent:
        raise BackendUnavailable(f"the agent cannot be reached: {silent}", lease_id=lease.lease_id) from None
    except (PathNotFound, FileOperationFailed) as refused:
        _check_still_held(pool, lease.lease_id)
        raise InvalidRequest(refused.detail, field="read_only") from None
    except ReadOnlyNotSupported as refused:
        _check_still_held(pool, lease.lease_id)
        raise NotImplementedHere(f"a slot of pool {lease.pool!r} cannot be narrowed like this: {refused.detail}", field="read_only") from None
    except (NotSupportedByAgent, RequestInvalid) as refused:
        _check_still_held(pool, lease.lease_id)
        raise rights.rights_not_supported(lease, refused.detail) from None
    except AgentRefused as refused:
        _check_still_held(pool, lease.lease_id)
        raise BackendUnavailable(f"the agent could not narrow the slot: {refused.detail}", lease_id=lease.lease_id) from None
    _check_still_held(pool, lease.lease_id)
    lease = pool.book.narrow_lease(lease.lease_id, allow_network=narrowed.allow_network, cache=narrowed.cache, read_only=entries)
    await pool.flush()
    shown_entries = {"read_only": list(lease.read_only)} if lease.read_only else {}
    pool.events.publish_lease_event("lease.narrowed", lease, allow_network=lease.allow_network, cache=lease.cache, **shown_entries)
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
