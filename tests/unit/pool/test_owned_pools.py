"""Pools that tenants own, on fakes and on the state file: kept apart, found again after a restart, and those of a version that knew no owners."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from dataclasses import replace

import pytest

from sandbox_server.core.errors import Forbidden, PoolConflict, PoolNotFound
from sandbox_server.core.types import AcquireRequest, PoolId, PoolSpec
from sandbox_server.pool.access import SERVICE, Actor
from sandbox_server.store.base import Deletion, PoolRecord
from sandbox_server.store.sqlite.migrations import APPLICATION_ID, MIGRATIONS
from sandbox_server.store.sqlite.options import SqliteOptions
from sandbox_server.store.sqlite.store import SqliteStore, StoreUnusable
from sandbox_server.testing import settle
from tests.unit.pool.restartable_service import RestartableService

SPEC = PoolSpec(slots_per_sandbox=2, min_sandboxes=1, max_sandboxes=2)
ADMIN = Actor(tenant="ops", admin=True)
ANN, BEN = Actor(tenant="ann"), Actor(tenant="ben")


@pytest.fixture
async def service():
    service = await RestartableService().start()
    yield service
    await service.pools.stop()


async def acquire(service, actor, pool="mine", **fields):
    (lease,) = (await service.pools.acquire(AcquireRequest(tenant=actor.tenant, pool=pool, **fields))).leases
    return lease


def owned(service):
    return [(view.name, view.tenant) for view in service.pools.views(actor=SERVICE, tenant="*")]


async def test_same_named_pools_come_back_after_a_crash_each_with_its_own_sandboxes_and_leases(service):
    leases = {}
    for actor in (ANN, BEN):
        await service.pools.put_pool("mine", SPEC, actor=actor)
        await settle()
        leases[actor] = await acquire(service, actor)

    await service.restart()

    assert owned(service) == [("default", None), ("mine", "ann"), ("mine", "ben")]
    for actor in (ANN, BEN):
        lease = service.pools.lease(actor.tenant, leases[actor].lease_id)
        assert (lease.pool, lease.pool_tenant, lease.sandbox_id) == ("mine", actor.tenant, leases[actor].sandbox_id)
        assert {view.sandbox_id for view in service.pools.sandboxes(actor=actor) if view.pool_tenant == actor.tenant} == {lease.sandbox_id}
        assert service.pools.view("mine", actor=actor).slots["leased"] == 1
    await service.pools.delete_pool("mine", actor=ANN, force=True)
    await service.clock.advance(1)
    await service.restart()
    assert owned(service) == [("default", None), ("mine", "ben")]
    assert service.pools.lease("ben", leases[BEN].lease_id)


async def test_who_waits_in_a_pool_that_is_shared_no_longer_is_told(service):
    await service.pools.put_pool("common", replace(SPEC, shared=True, max_sandboxes=1), actor=ADMIN)
    await settle()
    held = [await acquire(service, actor, "common") for actor in (ADMIN, BEN)]
    waiting = {actor: asyncio.create_task(acquire(service, actor, "common")) for actor in (ADMIN, BEN)}
    await settle()

    await service.pools.put_pool("common", replace(SPEC, max_sandboxes=1), actor=ADMIN)
    await settle()

    with pytest.raises(PoolNotFound, match="no longer shared with this tenant"):
        await waiting[BEN]
    assert not waiting[ADMIN].done()
    assert service.pools.lease("ben", held[1].lease_id), "a lease that is held goes on to its end"
    assert len(service.backend.created) == 2, "no sandbox was made anew"
    with pytest.raises(PoolNotFound):
        await acquire(service, BEN, "common")
    service.pools.release("ben", [held[1].lease_id])
    assert (await waiting[ADMIN]).tenant == "ops"


async def test_a_shared_pool_whose_name_the_settings_file_takes_stays_its_owners(service):
    await service.pools.put_pool("common", replace(SPEC, shared=True), actor=ADMIN)
    service.specs = {**service.specs, "common": SPEC}

    await service.restart()

    assert service.pools.view("common", actor=ADMIN).tenant == "ops"
    assert service.pools.view("common", actor=BEN).tenant is None


async def test_a_pool_that_no_tenant_owns_is_every_admins(service):
    await service.pools.put_pool("old", SPEC)

    assert service.pools.view("old", actor=ANN).shared
    with pytest.raises(PoolConflict, match="take another name"):
        await service.pools.put_pool("old", SPEC, actor=ANN)
    with pytest.raises(Forbidden, match="only an admin"):
        await service.pools.delete_pool("old", actor=ANN)
    view, made = await service.pools.put_pool("old", replace(SPEC, max_sandboxes=3), actor=ADMIN)
    assert (view.tenant, view.spec.max_sandboxes, made) == (None, 3, False)
    await service.pools.delete_pool("old", actor=ADMIN)


def old_file(path, *pools):
    """A state file as the version before owners left it."""
    with sqlite3.connect(path) as file:
        for statement in MIGRATIONS[0]:
            file.execute(statement)
        for name, spec in pools:
            document = {"name": name, "spec": spec, "origin": "api", "closing": False}
            file.execute("INSERT INTO record VALUES ('pool', ?, ?)", (name, json.dumps(document)))
        sandbox = {"sandbox_id": "s-1", "pool": "old", "state": "ready", "handle": None, "created_at": 1.0, "boot": "b"}
        file.execute("INSERT INTO record VALUES ('sandbox', 's-1', ?)", (json.dumps(sandbox),))
        file.execute("PRAGMA user_version = 1")
        file.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    file.close()


async def test_pools_of_a_version_without_owners_become_the_admins_and_shared(tmp_path):
    path = tmp_path / "state.db"
    old_file(path, ("old", {"slots_per_sandbox": 3, "env_vars": {"A": "b"}}), ("other", {}))

    store = SqliteStore(path)
    state = store.load()

    expected = [PoolSpec(slots_per_sandbox=3, env_vars={"A": "b"}, shared=True), PoolSpec(shared=True)]
    assert [(pool.name, pool.tenant, pool.spec) for pool in state.pools] == list(zip(("old", "other"), (None, None), expected, strict=True))
    assert [sandbox.pool_id for sandbox in state.sandboxes] == [PoolId("old")]
    # It is deleted under the key that the old version gave it, and made anew beside a tenant's.
    store.put(Deletion(pool=PoolId("old").key))
    store.put(PoolRecord(name="other", tenant="ann", spec=SPEC, origin="api"))
    await store.close()
    again = SqliteStore(path)
    assert sorted((pool.name, pool.tenant or "") for pool in again.load().pools) == [("other", ""), ("other", "ann")]
    await again.close()


def test_a_version_that_knows_no_owners_does_not_open_the_file(tmp_path):
    path = tmp_path / "state.db"
    asyncio.run(_opened(path))

    with pytest.raises(StoreUnusable, match="newer version"):
        SqliteStore(path, options=SqliteOptions(migrations=MIGRATIONS[:1]))


async def _opened(path):
    await SqliteStore(path).close()
