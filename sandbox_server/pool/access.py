"""Which pool a name means to whom, and who may see, change and delete which. Pure.

Pool names are per tenant: a name means a tenant's own pool, else a shared one. Nobody but admins comes to another tenant's pool, and they by naming
the tenant.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from sandbox_server.core.errors import Forbidden, PoolConflict, PoolNotFound
from sandbox_server.core.types import PoolId

ALL_TENANTS: Final = "*"
"""In the place of a tenant's name: whosever they are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Actor:
    """Who looks at pools, or does something to them. `tenant`: whose token it came with; None: the service itself."""

    tenant: str | None
    admin: bool = False


SERVICE: Final = Actor(tenant=None, admin=True)


class Owned(Protocol):
    """What is to be known of a pool here."""

    @property
    def pool_id(self) -> PoolId: ...

    @property
    def shared(self) -> bool: ...


AnyPool = TypeVar("AnyPool", bound=Owned)
PoolService = Mapping[PoolId, AnyPool]


def may_see(actor: Actor, pool: Owned) -> bool:
    """Whether a pool is this one's business: a shared one, its own, and to an admin every one."""
    return actor.admin or pool.shared or pool.pool_id.tenant == actor.tenant


def shared_pool(pools: PoolService[AnyPool], name: str) -> AnyPool | None:
    """What a name means to whoever has no pool of that name. One that no tenant owns goes first: the settings file may have got it later."""
    unowned = pools.get(PoolId(name))
    return unowned if unowned is not None else next((pool for pool in pools.values() if pool.pool_id.name == name and pool.shared), None)


def find_pool(pools: PoolService[AnyPool], name: str, actor: Actor, tenant: str | None = None) -> AnyPool:
    """The pool that a name means.

    Args:
        pools: every pool there is.
        name: the name.
        actor: who says it.
        tenant: whose pool is meant; default the actor's own, else a shared one.

    Raises:
        PoolNotFound: there is none, or it is not this one's business.
        Forbidden: somebody who is no admin names another tenant.
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


def seen_pools(pools: PoolService[AnyPool], actor: Actor, tenant: str | None = None) -> Iterator[AnyPool]:
    """The pools that an actor's names mean: its own and the shared ones, each name once.

    Args:
        pools: every pool there is.
        actor: who looks.
        tenant: instead, those that this tenant owns; `*`: every one.

    Raises:
        Forbidden: somebody who is no admin names another tenant.
    """
    if tenant is not None:
        _check_may_name(actor, tenant)
        return (pool for pool in pools.values() if tenant in (ALL_TENANTS, pool.pool_id.tenant))
    names = {pool.pool_id.name: None for pool in pools.values() if pool.shared or pool.pool_id.tenant == actor.tenant}
    return (find_pool(pools, name, actor) for name in names)


def find_to_put(pools: PoolService[AnyPool], name: str, actor: Actor, tenant: str | None = None) -> tuple[PoolId, AnyPool | None]:
    """The pool that a name means to somebody who makes or changes it.

    Returns:
        Its id, and the pool itself where there is one.

    Raises:
        PoolConflict: it is a shared pool's name, and that pool is not this one's to change.
        Forbidden: it is shared and the actor is no admin, or somebody who is no admin names another tenant.
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


def find_to_delete(pools: PoolService[AnyPool], name: str, actor: Actor, tenant: str | None = None) -> AnyPool:
    """The pool that a name means to somebody who deletes it.

    Raises:
        PoolNotFound: there is none, or it is not this one's business.
        PoolConflict: it is another admin's, and that is to be said.
        Forbidden: it is shared and the actor is no admin, or somebody who is no admin names another tenant.
    """
    pool = find_pool(pools, name, actor, tenant)
    check_may_change(pool, actor)
    owner = pool.pool_id.tenant
    if tenant is None and owner not in (None, actor.tenant):
        raise PoolConflict(f"pool {name!r} is tenant {owner!r}'s, and shared: name its owner with `tenant={owner}`")
    return pool


def check_may_change(pool: Owned, actor: Actor) -> None:
    """Refuse that somebody who is no admin changes what every tenant uses, whosever it is.

    Raises:
        Forbidden: so it is.
    """
    if pool.shared and not actor.admin:
        raise Forbidden(f"pool {pool.pool_id.name!r} is shared with every tenant: only an admin may change or delete it")


def check_may_share(pools: PoolService[AnyPool], pool_id: PoolId) -> None:
    """Refuse a second shared pool of one name.

    Raises:
        PoolConflict: there is one.
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
