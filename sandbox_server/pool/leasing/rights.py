"""What a lease may do beyond running in its slot, network and cache: given before the grant counts, taken away for good by `narrow`. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from sandbox_server.core.errors import InvalidRequest, NotImplementedHere
from sandbox_server.core.types import AcquireRequest, Lease, PoolSpec
from sandbox_server.store.base import CacheRecord

NO_CACHE = "none"
OWN_CACHE = "rw"


def check_possible(request: AcquireRequest, spec: PoolSpec, capabilities: Mapping[str, Any]) -> None:
    """Refuse what no slot of the pool can be given.

    Args:
        request: what is asked.
        spec: the pool's.
        capabilities: what an agent of the pool said it can do; empty before the first has spoken.

    Raises:
        InvalidRequest: it would widen what the pool gives.
        NotImplementedHere: the pool's isolation mode cannot do it.
    """
    if request.allow_network and not spec.slots_have_network:
        raise InvalidRequest(f"allow_network may only narrow, and the slots of pool {request.pool!r} have no network", field="allow_network")
    networks = capabilities.get("network")
    if _takes_network(request, spec) and isinstance(networks, list) and "none" not in networks:
        raise NotImplementedHere(f"the isolation mode of pool {request.pool!r} cannot take the network away from a slot", field="allow_network")
    if request.cache != NO_CACHE and capabilities and capabilities.get("cache") is not True:
        raise NotImplementedHere(f"the isolation mode of pool {request.pool!r} cannot give a slot a cache", field="cache")


def _takes_network(request: AcquireRequest, spec: PoolSpec) -> bool:
    return request.allow_network is False and spec.slots_have_network


def needs_preparing(request: AcquireRequest, spec: PoolSpec) -> bool:
    """Whether a slot must be changed before it is granted for this."""
    return request.cache != NO_CACHE or _takes_network(request, spec)


def cache_of(lease: Lease) -> CacheRecord:
    """The cache of a lease that has one: its run's in that sandbox; without a run, its own."""
    own = lease.lease_id if lease.run_id is None else None
    name = f"{lease.tenant}\0{lease.lease_id if own else lease.run_id}"
    key = ("l" if own else "r") + "-" + hashlib.sha256(name.encode()).hexdigest()[:40]
    return CacheRecord(key=key, tenant=lease.tenant, run_id=lease.run_id, lease_id=own)


def check_narrows(lease: Lease, allow_network: bool | None, cache: str | None) -> None:
    """Refuse to give a held lease more than it has.

    Raises:
        InvalidRequest: it would; it names the field.
    """
    if allow_network and not lease.allow_network:
        raise InvalidRequest("allow_network: narrow only takes rights away, and this lease has no network", field="allow_network")
    if cache is not None and cache != NO_CACHE and lease.cache == NO_CACHE:
        raise InvalidRequest("cache: narrow only takes rights away, and this lease has no cache", field="cache")


def cannot(lease: Lease, reason: str) -> NotImplementedHere:
    """The error of an agent that cannot give a slot the rights of this lease, and no more."""
    field = "cache" if lease.cache != NO_CACHE else "allow_network"
    return NotImplementedHere(f"a slot of pool {lease.pool!r} cannot be given these rights: {reason}", field=field)
