"""Whose pool a name means over HTTP, what nobody does to another tenant's, and what a tenant's pools may take of its limits."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from sandbox_server.api.tenants import Tenant
from sandbox_server.core.types import PoolSpec
from sandbox_server.settings import Settings
from tests.support.service_harness import ALICE, BOB, POOL, ServiceHarness, bearer, open_service_harness, open_service_harness_on_port

SMALL: dict[str, Any] = {"slots_per_sandbox": 1, "min_sandboxes": 0, "max_sandboxes": 1}
CARL = Tenant(name="carl", token="carls-token")
OPERATOR = Tenant(name="operator", token="operators-token", admin=True)
TENANTS = (ALICE, BOB, CARL, OPERATOR)


@pytest.fixture
async def harness(tmp_path: Path) -> Any:
    """The service with two admins and two tenants who are none."""
    async with open_service_harness(tmp_path / "state", tenants=TENANTS) as running:
        yield running


async def put(harness: ServiceHarness, tenant: Tenant, name: str, owner: str | None = None, **spec: Any) -> httpx.Response:
    params = {} if owner is None else {"tenant": owner}
    return await harness.http.put(f"/v1/pools/{name}", json={**SMALL, **spec}, params=params, headers=bearer(tenant))


async def ask(harness: ServiceHarness, tenant: Tenant, method: str, path: str, **more: Any) -> httpx.Response:
    return await harness.http.request(method, path, headers=bearer(tenant), **more)


def refused(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["code"]


def told(answer: httpx.Response) -> list[tuple[str, str | None, bool]]:
    return [(pool["name"], pool["tenant"], pool["shared"]) for pool in answer.json()["pools"]]


async def test_anothers_pool_can_be_neither_seen_used_changed_nor_deleted(harness: ServiceHarness) -> None:
    made = (await put(harness, BOB, "mine", min_sandboxes=1)).json()
    leased = await ask(harness, BOB, "POST", "/v1/acquire", json={"pool": "mine"})

    assert (made["name"], made["tenant"], made["shared"], made["origin"]) == ("mine", "bob", False, "api")
    assert leased.status_code == 200
    sandbox_id = leased.json()["leases"][0]["sandbox_id"]
    assert refused(await ask(harness, CARL, "GET", "/v1/pools/mine")) == (404, "pool_not_found")
    assert refused(await ask(harness, CARL, "DELETE", "/v1/pools/mine")) == (404, "pool_not_found")
    assert refused(await ask(harness, CARL, "POST", "/v1/acquire", json={"pool": "mine"})) == (404, "pool_not_found")
    programs = [{"tool": "bash", "args": {"command": "true"}}]
    assert refused(await ask(harness, CARL, "POST", "/v1/run-batch", json={"pool": "mine", "items": programs})) == (404, "pool_not_found")
    assert refused(await ask(harness, CARL, "POST", "/v1/pools/mine/verify")) == (403, "forbidden")
    assert told(await ask(harness, CARL, "GET", "/v1/pools")) == [("default", None, True)]
    assert sandbox_id not in (await ask(harness, CARL, "GET", "/v1/sandboxes")).text
    assert sandbox_id in (await ask(harness, BOB, "GET", "/v1/sandboxes")).text
    assert "mine" not in (await harness.http.get("/readyz", headers={"Authorization": ""})).json()["pools"]
    assert (await harness.http.get("/readyz", params={"pool": "mine"}, headers={"Authorization": ""})).status_code == 404
    for method, path in (("GET", "/v1/pools/mine"), ("PUT", "/v1/pools/mine"), ("DELETE", "/v1/pools/mine"), ("GET", "/v1/pools")):
        answer = await ask(harness, CARL, method, path, params={"tenant": "bob"}, json=SMALL)
        assert (*refused(answer), answer.json()["field"]) == (403, "forbidden", "tenant")
    # A PUT of the same name makes another pool, and leaves this one as it is.
    assert (await put(harness, CARL, "mine", max_sandboxes=2)).status_code == 201
    assert (await ask(harness, BOB, "GET", "/v1/pools/mine")).json()["spec"]["max_sandboxes"] == 1


async def test_same_named_pools_of_two_tenants_are_two(harness: ServiceHarness) -> None:
    leases = {}
    for tenant in (BOB, CARL):
        await put(harness, tenant, "mine")
        answer = await ask(harness, tenant, "POST", "/v1/acquire", json={"pool": "mine"})
        leases[tenant.name] = answer.json()["leases"][0]
    figures = (await harness.http.get("/metrics")).text

    assert leases["bob"]["sandbox_id"] != leases["carl"]["sandbox_id"]
    assert 'sandbox_slots{pool="mine",pool_tenant="bob",state="leased"} 1.0' in figures
    assert 'sandbox_slots{pool="mine",pool_tenant="carl",state="leased"} 1.0' in figures
    assert 'sandbox_acquire_seconds_count{pool="mine",pool_tenant="carl"} 1.0' in figures
    assert (await ask(harness, BOB, "DELETE", "/v1/pools/mine", params={"force": "1"})).status_code == 202
    assert (await ask(harness, BOB, "GET", f"/v1/leases/{leases['bob']['lease_id']}")).status_code in (404, 410)
    assert (await ask(harness, CARL, "GET", f"/v1/leases/{leases['carl']['lease_id']}")).status_code == 200


async def test_an_admin_comes_to_anothers_pool_by_naming_its_owner(harness: ServiceHarness) -> None:
    await put(harness, BOB, "mine")
    await put(harness, CARL, "mine", max_sandboxes=2)
    await put(harness, ALICE, "mine", max_sandboxes=3)

    async def sandboxes(**params: str) -> int:
        pool: dict[str, Any] = (await harness.http.get("/v1/pools/mine", params=params)).json()
        most: int = pool["spec"]["max_sandboxes"]
        return most

    assert [await sandboxes(), await sandboxes(tenant="bob"), await sandboxes(tenant="carl")] == [3, 1, 2]
    assert told(await harness.http.get("/v1/pools")) == [("default", None, True), ("mine", "alice", False)]
    assert told(await harness.http.get("/v1/pools", params={"tenant": "bob"})) == [("mine", "bob", False)]
    everyone = [("default", None, True), ("mine", "alice", False), ("mine", "bob", False), ("mine", "carl", False)]
    assert told(await harness.http.get("/v1/pools", params={"tenant": "*"})) == everyone
    first = (await harness.http.get("/v1/pools", params={"tenant": "*", "limit": "2"})).json()
    rest = await harness.http.get("/v1/pools", params={"tenant": "*", "limit": "2", "cursor": first["next_cursor"]})
    assert told(rest) == everyone[2:]
    assert (await put(harness, ALICE, "mine", "bob", max_sandboxes=4)).status_code == 200
    assert await sandboxes(tenant="bob") == 4
    assert refused(await harness.http.post("/v1/pools/mine/verify", params={"tenant": "bob"})) == (503, "no_capacity")
    assert (await harness.http.delete("/v1/pools/mine", params={"tenant": "carl", "force": "1"})).status_code == 202
    assert (await ask(harness, BOB, "GET", "/v1/pools/mine")).json()["state"] == "ready"
    assert refused(await put(harness, ALICE, "new", "nobody")) == (422, "invalid_request")
    assert refused(await put(harness, ALICE, "new", "*")) == (422, "invalid_request")


async def test_a_shared_pool_is_everybodys_to_use_and_the_admins_to_change(harness: ServiceHarness) -> None:
    made = (await put(harness, ALICE, "common", shared=True)).json()

    assert (made["tenant"], made["shared"], made["spec"]["shared"]) == ("alice", True, True)
    assert ("common", "alice", True) in told(await ask(harness, BOB, "GET", "/v1/pools"))
    assert (await ask(harness, BOB, "POST", "/v1/acquire", json={"pool": "common"})).status_code == 200
    for name in ("common", "default"):
        assert refused(await put(harness, BOB, name)) == (409, "pool_conflict")
        assert refused(await ask(harness, BOB, "DELETE", f"/v1/pools/{name}")) == (403, "forbidden")
    another = await put(harness, OPERATOR, "common")
    assert refused(another) == (409, "pool_conflict")
    assert "change it with `tenant=alice`" in another.json()["detail"]
    assert refused(await ask(harness, OPERATOR, "DELETE", "/v1/pools/common")) == (409, "pool_conflict")
    assert (await put(harness, OPERATOR, "common", "alice", shared=True, max_sandboxes=2)).status_code == 200
    # Who has a pool of that name already keeps it, and the name goes on meaning it.
    await put(harness, BOB, "own")
    await put(harness, ALICE, "own", shared=True, max_sandboxes=2)
    assert (await ask(harness, BOB, "GET", "/v1/pools/own")).json()["tenant"] == "bob"
    assert (await ask(harness, CARL, "GET", "/v1/pools/own")).json()["tenant"] == "alice"
    assert [pool for pool in told(await ask(harness, BOB, "GET", "/v1/pools")) if pool[0] == "own"] == [("own", "bob", False)]
    second = await put(harness, ALICE, "own", "bob", shared=True)
    assert refused(second) == (409, "pool_conflict"), "one shared pool of a name"


async def test_a_tenant_has_the_default_pool_it_has_named_so(tmp_path: Path) -> None:
    async with open_service_harness(tmp_path / "state", tenants=TENANTS, pools={"other": POOL}, default_pool="default") as harness:
        await put(harness, BOB, "default")
        bobs = await ask(harness, BOB, "POST", "/v1/acquire", json={})
        carls = await ask(harness, CARL, "POST", "/v1/acquire", json={})

    assert (bobs.status_code, refused(carls)) == (200, (404, "pool_not_found"))


async def test_nobody_hears_of_anothers_pool_but_admins_who_are_told_who_did_what(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with open_service_harness_on_port(tmp_path / "state", tenants=TENANTS) as harness:
        await put(harness, BOB, "bobs")
        await put(harness, ALICE, "bobs", "bob", max_sandboxes=2)
        await ask(harness, BOB, "DELETE", "/v1/pools/bobs")
        await put(harness, ALICE, "last", shared=True)
        heard = {tenant.name: await _pool_events(harness, tenant) for tenant in (BOB, CARL, OPERATOR)}

    bobs = [("pool.created", "bobs", "bob", "bob"), ("pool.changed", "bobs", "bob", "alice"), ("pool.draining", "bobs", "bob", "bob")]
    assert heard["carl"] == [("pool.created", "last", "alice", "alice")]
    assert set(bobs) <= set(heard["bob"])
    assert heard["bob"] == heard["operator"]
    lines = [(record.getMessage(), record.pool_tenant, record.by) for record in caplog.records if hasattr(record, "by")]
    assert lines[:3] == [("a pool was made", "bob", "bob"), ("a pool was changed", "bob", "alice"), ("a pool was deleted", "bob", "bob")]


async def _pool_events(harness: ServiceHarness, tenant: Tenant) -> list[tuple[str, str, str | None, str | None]]:
    """What a tenant is told of pools, from the start of the service up to the pool `last`."""
    found: list[tuple[str, str, str | None, str | None]] = []
    headers = {**bearer(tenant), "Last-Event-ID": "1"}
    async with harness.http.stream("GET", "/v1/events", headers=headers) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data:"):
                data = json.loads(line.removeprefix("data:"))
                if data.get("kind", "").startswith("pool."):
                    found.append((data["kind"], data["pool"], data["pool_tenant"], data["by"]))
                    if data["pool"] == "last":
                        return found
    raise AssertionError("the stream ended")


LIMITED = replace(BOB, max_leases=6, max_slots=10)


@pytest.fixture
async def limited(tmp_path: Path) -> Any:
    """The service, with a tenant that may hold 6 leases and have pools of 10 slots."""
    async with open_service_harness(tmp_path / "state", tenants=(ALICE, LIMITED)) as running:
        yield running


async def test_a_tenant_reserves_no_more_slots_than_it_may_have_leases(limited: ServiceHarness) -> None:
    for spec in ({"min_sandboxes": 1000, "max_sandboxes": 1000}, {"warm_slots": 7, "max_sandboxes": 7}, {"slots_per_sandbox": 7, "min_sandboxes": 1}):
        answer = await put(limited, LIMITED, "mine", **spec)
        assert (*refused(answer), answer.json()["limit"]) in ((429, "quota_exceeded", "max_leases"), (429, "quota_exceeded", "max_slots"))
        assert int(answer.headers["retry-after"]) >= 1
    assert (await put(limited, LIMITED, "first", min_sandboxes=4, max_sandboxes=4)).status_code == 201
    second = await put(limited, LIMITED, "second", min_sandboxes=3, max_sandboxes=3)
    assert (*refused(second), second.json()["limit"]) == (429, "quota_exceeded", "max_leases")
    assert (await put(limited, LIMITED, "second", min_sandboxes=2, max_sandboxes=3)).status_code == 201
    # An admin who makes it a pool is held to its limits, too.
    assert refused(await put(limited, ALICE, "third", "bob", min_sandboxes=1)) == (429, "quota_exceeded")
    assert (await put(limited, LIMITED, "first", min_sandboxes=3, max_sandboxes=4)).status_code == 200


async def test_a_tenants_pools_promise_no_more_than_its_max_slots(limited: ServiceHarness) -> None:
    assert (await put(limited, LIMITED, "first", max_sandboxes=6)).status_code == 201
    second = await put(limited, LIMITED, "second", slots_per_sandbox=5)

    assert (*refused(second), second.json()["limit"]) == (429, "quota_exceeded", "max_slots")
    assert (await put(limited, LIMITED, "second", max_sandboxes=4)).status_code == 201
    assert refused(await put(limited, LIMITED, "second", max_sandboxes=5)) == (429, "quota_exceeded")


async def test_slots_a_tenants_own_pools_reserve_count_as_leases_elsewhere(limited: ServiceHarness) -> None:
    await put(limited, LIMITED, "mine", min_sandboxes=4, max_sandboxes=8)

    async def acquire(count: int, pool: str) -> httpx.Response:
        return await ask(limited, LIMITED, "POST", "/v1/acquire", json={"count": count, "pool": pool})

    assert (await acquire(2, "default")).status_code == 200
    third = await acquire(1, "default")
    assert (*refused(third), third.json()["limit"]) == (429, "quota_exceeded", "max_leases")
    assert "own pools reserve 4 slots more" in third.json()["detail"]
    assert (await acquire(4, "mine")).status_code == 200, "what is reserved for it, it may have"
    assert refused(await acquire(1, "mine")) == (429, "quota_exceeded")
    more = await put(limited, LIMITED, "mine", min_sandboxes=5, max_sandboxes=8)
    assert refused(more) == (429, "quota_exceeded"), "leases in shared pools count"


async def test_limits_that_shrink_take_nothing_away_and_give_nothing_more(tmp_path: Path) -> None:
    now = [LIMITED]
    async with open_service_harness(tmp_path / "state", tenants=(ALICE, LIMITED)) as harness:
        await put(harness, LIMITED, "mine", min_sandboxes=4, max_sandboxes=8)
        settings: Settings = harness.settings
        harness.application._load = lambda: replace(settings, tenants=(ALICE, now[0]))
        now[0] = replace(LIMITED, max_leases=2, max_slots=3)
        harness.application._reload_tenants()

        assert (await ask(harness, LIMITED, "GET", "/v1/pools/mine")).json()["spec"]["min_sandboxes"] == 4
        leased = await ask(harness, LIMITED, "POST", "/v1/acquire", json={"count": 2, "pool": "mine"})
        assert leased.status_code == 200
        assert refused(await ask(harness, LIMITED, "POST", "/v1/acquire", json={"pool": "mine"})) == (429, "quota_exceeded")
        assert (await put(harness, LIMITED, "mine", min_sandboxes=4, max_sandboxes=8)).status_code == 200
        assert (await put(harness, LIMITED, "mine", min_sandboxes=3, max_sandboxes=7)).status_code == 200
        assert refused(await put(harness, LIMITED, "mine", min_sandboxes=4, max_sandboxes=7)) == (429, "quota_exceeded")
        assert refused(await put(harness, LIMITED, "mine", min_sandboxes=3, max_sandboxes=8)) == (429, "quota_exceeded")


async def test_a_tenant_makes_pools_on_its_backends_alone(tmp_path: Path) -> None:
    far = replace(CARL, backends=("local", "nomad"))
    async with open_service_harness(tmp_path / "state", tenants=(ALICE, BOB, far)) as harness:
        bobs = await put(harness, BOB, "far", backend="nomad")
        carls = await put(harness, far, "far", backend="nomad")
        alices = await put(harness, ALICE, "far", backend="nomad")
        given = await put(harness, ALICE, "given", "bob", backend="nomad")
        same = await put(harness, BOB, "given", backend="nomad")
        more = await put(harness, BOB, "given", backend="nomad", max_sandboxes=9)

    assert (*refused(bobs), bobs.json()["field"]) == (403, "forbidden", "backend")
    assert [answer.status_code for answer in (carls, alices, given, same)] == [201, 201, 201, 200]
    assert refused(more) == (403, "forbidden")


def test_the_pools_of_the_settings_are_shared() -> None:
    assert all(spec.shared for spec in Settings(state_dir=Path("/nowhere")).pools.values())
    assert PoolSpec().shared is False
