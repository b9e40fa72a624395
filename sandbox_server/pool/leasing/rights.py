"""The rights of a lease: network access, a shared cache, and to change its workspace.

The first two are set up before a lease is granted. `narrow` can only take rights away.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from sandbox_server.agent.allowed_hosts import permits_entry
from sandbox_server.core.errors import InvalidRequest, NotImplementedHere
from sandbox_server.core.types import AcquireRequest, Lease, PoolSpec
from sandbox_server.store.base import CacheRecord

NO_CACHE = "none"
MAX_READ_ONLY = 64


def check_possible(request: AcquireRequest, spec: PoolSpec, capabilities: Mapping[str, Any]) -> None:
    """Check that a slot of the pool can have the rights that an acquire asks for.

    Args:
        request: the acquire.
        spec: the pool's spec.
        capabilities: the capabilities that an agent of the pool reported; empty before the first agent has connected.

    Raises:
        InvalidRequest: the acquire asks for more rights than the pool grants.
        NotImplementedHere: the isolation mode of the pool cannot enforce them.
    """
    if request.allow_network and not spec.slots_have_network:
        raise InvalidRequest(f"allow_network may only narrow, and the slots of pool {request.pool!r} have no network", field="allow_network")
    _check_hosts(request, spec)
    networks = capabilities.get("network")
    if _takes_network(request, spec) and isinstance(networks, list) and "none" not in networks:
        raise NotImplementedHere(f"the isolation mode of pool {request.pool!r} cannot take the network away from a slot", field="allow_network")
    if request.cache != NO_CACHE and capabilities and capabilities.get("cache") is not True:
        raise NotImplementedHere(f"the isolation mode of pool {request.pool!r} cannot give a slot a cache", field="cache")


def _check_hosts(request: AcquireRequest, spec: PoolSpec) -> None:
    if request.allow_hosts is None:
        return
    if spec.network != "internet" or not spec.slots_have_network:
        raise InvalidRequest(f"allow_hosts: needs network: internet, which pool {request.pool!r} does not set", field="allow_hosts")
    for entry in request.allow_hosts:
        if spec.allow_hosts is not None and not permits_entry(spec.allow_hosts, entry):
            raise InvalidRequest(f"allow_hosts may only narrow, and allow_hosts of pool {request.pool!r} does not permit {entry!r}", field="allow_hosts")


def _takes_network(request: AcquireRequest, spec: PoolSpec) -> bool:
    return request.allow_network is False and spec.slots_have_network


def needs_preparing(request: AcquireRequest, spec: PoolSpec) -> bool:
    """Return whether the agent must change a slot before it is granted for the acquire."""
    return request.cache != NO_CACHE or _takes_network(request, spec) or request.allow_hosts is not None


def cache_of(lease: Lease) -> CacheRecord:
    """Return the cache of a lease that has one. The leases of a run share a cache in each sandbox; a lease without a run has its own."""
    own = lease.lease_id if lease.run_id is None else None
    name = f"{lease.tenant}\0{lease.lease_id if own else lease.run_id}"
    key = ("l" if own else "r") + "-" + hashlib.sha256(name.encode()).hexdigest()[:40]
    return CacheRecord(key=key, tenant=lease.tenant, run_id=lease.run_id, lease_id=own)


def check_narrows(lease: Lease, allow_network: bool | None, cache: str | None) -> None:
    """Check that a request to narrow a held lease gives it no right that it does not have.

    Args:
        lease: the lease.
        allow_network: the requested network access; None: unchanged.
        cache: the requested cache; None: unchanged.

    Raises:
        InvalidRequest: it does. The error names the field.
    """
    if allow_network and not lease.allow_network:
        raise InvalidRequest("allow_network: narrow only takes rights away, and this lease has no network", field="allow_network")
    if cache is not None and cache != NO_CACHE and lease.cache == NO_CACHE:
        raise InvalidRequest("cache: narrow only takes rights away, and this lease has no cache", field="cache")


def add_read_only(lease: Lease, names: Sequence[str]) -> tuple[str, ...]:
    """Return the read-only entries of a lease with further ones added. The order is that in which they were named first.

    Raises:
        InvalidRequest: they would be more than `MAX_READ_ONLY`.
    """
    entries = tuple(dict.fromkeys((*lease.read_only, *names)))
    if len(entries) > MAX_READ_ONLY:
        raise InvalidRequest(f"read_only: a workspace can have at most {MAX_READ_ONLY} read-only entries, and these would be {len(entries)}", field="read_only")
    return entries


def rights_not_supported(lease: Lease, reason: str) -> NotImplementedHere:
    """Return the error for a lease whose slot the agent cannot give exactly the rights of the lease."""
    field = "cache" if lease.cache != NO_CACHE else "allow_network" if lease.allow_hosts is None else "allow_hosts"
    return NotImplementedHere(f"a slot of pool {lease.pool!r} cannot be given these rights: {reason}", field=field)
