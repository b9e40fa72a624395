"""Which pool a name stands for, and which pools an actor may see, change and delete. Plain functions without I/O.

Pool names are per tenant: a name stands for the tenant's own pool of that name, else for a shared pool. Only admins can use another tenant's pool,
by naming the tenant.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from sandbox_server.core.errors import Forbidden, PoolConflict, PoolNotFound
from sandbox_server.core.types import PoolId

ALL_TENANTS: Final = "*"
"""In place of a tenant's name: the pools of all tenants."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Actor:
    """The tenant that asks for an operation on pools, and whether it is an admin.

    Attributes:
        tenant: the tenant of its token; None for the service itself.
        admin: whether it is an admin.
    """

    tenant: str | None
    admin: bool = False


SERVICE: Final = Actor(tenant=None, admin=True)


class Owned(Protocol):
    """The attributes of a pool that these functions read."""

    @property
    def pool_id(self) -> PoolId: ...

    @property
    def shared(self) -> bool: ...


AnyPool = TypeVar("AnyPool", bound=Owned)
PoolsById = Mapping[PoolId, AnyPool]


def may_see(actor: Actor, pool: Owned) -> bool:
    """Whether an actor may see a pool: a shared pool, a pool of its own, and as an admin every pool."""
    return actor.admin or pool.shared or pool.pool_id.tenant == actor.tenant


def shared_pool(pools: PoolsById[AnyPool], name: str) -> AnyPool | None:
    """The shared pool of a name; None if there is none. A pool that no tenant owns comes first, because the settings file may name it later."""
    unowned = pools.get(PoolId(name))
    return unowned if unowned is not None else next((pool for pool in pools.values() if pool.pool_id.name == name and pool.shared), None)


def find_pool(pools: PoolsById[AnyPool], name: str, actor: Actor, tenant: str | None = None) -> AnyPool:
    """Find the pool that a name stands for.

    Args:
        pools: all pools.
        name: the name.
        actor: the tenant that sends the request.
        tenant: the tenant that owns the pool; default the actor's own, else a shared pool.

    Raises:
        PoolNotFound: there is no such pool, or the actor may not see it.
        Forbidden: the actor is no admin and names another tenant.
    """
    if tenant is not None:
        _check_may_name(actor, tenant)
        pool = pools.get(PoolId(name, tenant))
        if pool is None:
            raise PoolNotFound(f"tenant {tenant!r} has no pool {name!r}")
        return pool
    pool = pools.get(PoolId(name, actor.tenant)) or shared_pool(pools, name)
    if pool is None:
        raise PoolNotFound(f"there is no pool {name!r}")
    return pool


def visible_pools(pools: PoolsById[AnyPool], actor: Actor, tenant: str | None = None) -> Iterator[AnyPool]:
    """The pools that an actor's names stand for: its own and the shared ones, each name once.

    Args:
        pools: all pools.
        actor: the tenant that sends the request.
        tenant: return the pools of this tenant instead; `*` for those of all tenants.

    Raises:
        Forbidden: the actor is no admin and names another tenant.
    """
    if tenant is not None:
        _check_may_name(actor, tenant)
        return (pool for pool in pools.values() if tenant in (ALL_TENANTS, pool.pool_id.tenant))
    names = {pool.pool_id.name: None for pool in pools.values() if pool.shared or pool.pool_id.tenant == actor.tenant}
    return (find_pool(pools, name, actor) for name in names)


def find_to_put(pools: PoolsById[AnyPool], name: str, actor: Actor, tenant: str | None = None) -> tuple[PoolId, AnyPool | None]:
    """Find the pool that a name stands for when an actor creates or changes it.

    Returns:
        The pool's id, and the pool; None if it does not exist yet.

    Raises:
        PoolConflict: the name is that of a shared pool, which the actor may not change.
        Forbidden: the pool is shared and the actor is no admin, or the actor is no admin and names another tenant.
    """
    if tenant is not None:
        _check_may_name(actor, tenant)
    pool_id = PoolId(name, actor.tenant if tenant is None else tenant)
    pool = pools.get(pool_id)
    shared = shared_pool(pools, name)
    if pool is None and shared is not None:
        if tenant is not None or shared.pool_id.tenant is not None or not actor.admin:
            raise PoolConflict(f"pool {name!r} is shared with every tenant, and its name is taken: {_way_to_change(shared, actor)}")
        pool_id, pool = shared.pool_id, shared
    if pool is not None:
        check_may_change(pool, actor)
    return pool_id, pool


def find_to_delete(pools: PoolsById[AnyPool], name: str, actor: Actor, tenant: str | None = None) -> AnyPool:
    """Find the pool that a name stands for when an actor deletes it.

    Raises:
        PoolNotFound: there is no such pool, or the actor may not see it.
        PoolConflict: it belongs to another admin, whose tenant has to be named.
        Forbidden: the pool is shared and the actor is no admin, or the actor is no admin and names another tenant.
    """
    pool = find_pool(pools, name, actor, tenant)
    check_may_change(pool, actor)
    owner = pool.pool_id.tenant
    if tenant is None and owner not in (None, actor.tenant):
        raise PoolConflict(f"pool {name!r} is tenant {owner!r}'s, and shared: name its owner with `tenant={owner}`")
    return pool


def check_may_change(pool: Owned, actor: Actor) -> None:
    """Check that only admins change shared pools.

    Raises:
        Forbidden: the pool is shared, and the actor is no admin.
    """
    if pool.shared and not actor.admin:
        raise Forbidden(f"pool {pool.pool_id.name!r} is shared with every tenant: only an admin may change or delete it")


def check_may_share(pools: PoolsById[AnyPool], pool_id: PoolId) -> None:
    """Check that no other shared pool has the same name.

    Raises:
        PoolConflict: another one has.
    """
    shared = shared_pool(pools, pool_id.name)
    if shared is not None and shared.pool_id != pool_id:
        raise PoolConflict(f"there is a shared pool {pool_id.name!r} already, {_owner_of(shared)}: a name means one shared pool")


def _check_may_name(actor: Actor, tenant: str) -> None:
    if not actor.admin and tenant != actor.tenant:
        raise Forbidden("tenant: only an admin may name another tenant", field="tenant")


def _owner_of(pool: Owned) -> str:
    return "which no tenant owns" if pool.pool_id.tenant is None else f"tenant {pool.pool_id.tenant!r}'s"


def _way_to_change(shared: Owned, actor: Actor) -> str:
    if not actor.admin:
        return "take another name"
    if shared.pool_id.tenant is None:
        return "take another name, or change it without naming a tenant"
    return f"take another name, or change it with `tenant={shared.pool_id.tenant}`"
