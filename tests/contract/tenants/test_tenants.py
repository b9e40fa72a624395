"""Who may call."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sandbox_server.api.request_context import Service
from sandbox_server.api.tenants import Tenant
from sandbox_server.settings import Settings
from tests.contract.contract import BUILT, named
from tests.contract.tenants import test_pools_of_tenants
from tests.contract.test_events import until
from tests.contract.test_recorded import events
from tests.support.service_harness import ALICE, BOB, POOL, ServiceHarness, bash, bearer, lifespan, make_application, make_settings, open_service_harness


async def test_each_tenant_has_its_own_leases(harness: ServiceHarness) -> None:
    (mine,) = await harness.acquire()
    hers = (await harness.http.post("/v1/acquire", json={}, headers=bearer(BOB))).json()["leases"][0]

    assert [lease["lease_id"] for lease in (await harness.http.get("/v1/leases")).json()["leases"]] == [mine]
    assert (hers["tenant"], (await harness.http.get(f"/v1/leases/{hers['lease_id']}")).status_code) == ("bob", 404)


async def test_an_open_door_lets_everybody_in_and_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with open_service_harness(tmp_path / "state", authentication_disabled=True) as harness:
        answer = await harness.http.post("/v1/acquire", json={}, headers={"Authorization": ""})

    assert answer.json()["leases"][0]["tenant"] == "local"
    assert "SANDBOX_AUTH=none" in caplog.text


async def test_without_tokens_the_service_makes_one_and_never_prints_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with open_service_harness(tmp_path / "state", tenants=()) as harness:
        token = (tmp_path / "state" / "token").read_text().strip()
        mine = await harness.http.get("/v1/pools", headers={"Authorization": f"Bearer {token}"})
        wrong = await harness.http.get("/v1/pools")

    told = capsys.readouterr()
    assert (mine.status_code, wrong.status_code) == (200, 401)
    assert f'curl -H "Authorization: Bearer $(cat {tmp_path / "state" / "token"})" http://ADDRESS/' in told.out
    assert token not in told.out + told.err


@asynccontextmanager
async def service_with_reloaded_settings(first: Settings, second: Settings) -> AsyncIterator[Service]:
    """Start a service with some settings, and have it read others after a hang-up signal."""
    unread = [first, second]
    application, _ = make_application(first)
    application._load = lambda: unread.pop(0)
    async with lifespan(application):
        service = application._edge.service
        assert service is not None
        os.kill(os.getpid(), signal.SIGHUP)
        while unread:
            await asyncio.sleep(0)
        yield service


async def test_a_hang_up_signal_reads_the_tenants_again(tmp_path: Path) -> None:
    settings = make_settings(tmp_path / "state")
    async with service_with_reloaded_settings(settings, replace(settings, tenants=(Tenant(name="carol", token="carols-token"),))) as service:
        assert service.tenants.authenticate(b"Bearer carols-token").name == "carol"
        assert {tenant.name for tenant in service.tenants.all} == {"carol"}


@pytest.mark.parametrize(
    ("header", "detail"),
    [
        ({}, "the request carries no token: send `Authorization: Bearer TOKEN`"),
        ({"Authorization": "Basic abc"}, "the Authorization header carries no token: send `Authorization: Bearer TOKEN`"),
        ({"Authorization": "Bearer abc"}, "this token is not known here"),
    ],
)
async def test_who_is_not_let_in_is_told_why(tmp_path: Path, header: dict[str, str], detail: str) -> None:
    async with open_service_harness(tmp_path / "state", tenants=(ALICE,)) as harness:
        del harness.http.headers["Authorization"]
        answer = await harness.http.get("/v1/pools", headers=header)

    assert (answer.status_code, answer.json()["detail"]) == (401, detail)


async def test_what_may_be_narrowed_is_said_in_json(harness: ServiceHarness) -> None:
    (lease_id,) = await harness.acquire()
    answer = await harness.http.post(f"/v1/leases/{lease_id}/narrow", json={"allow_network": True})

    assert (answer.status_code, answer.json()["detail"]) == (422, "allow_network: should be false")


async def test_a_file_that_names_no_tenants_any_more_locks_nobody_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = make_settings(tmp_path / "state")
    with_tenants, without = replace(settings, tenants=(BOB,)), replace(settings, tenants=(), config_path=Path("/etc/pools.yaml"))
    async with service_with_reloaded_settings(with_tenants, without) as service:
        assert {tenant.name for tenant in service.tenants.all} == {BOB.name}
    (line,) = [record.message for record in caplog.records if "the tenants were not changed" in record.message]
    assert "/etc/pools.yaml names no tenants any more" in line


async def test_an_advertised_url_is_left_for_this_machines_clients(tmp_path: Path) -> None:
    async with open_service_harness(tmp_path / "state", advertise_url="https://pool.example"):
        told = (tmp_path / "state" / "server.json").read_text()

    assert '"url": "https://pool.example"' in told
    assert not (tmp_path / "state" / "server.json").exists()
    assert ALICE.token is not None
    assert ALICE.token not in told


@pytest.mark.parametrize("route", [route for route in BUILT if route["path"].startswith("/v1/leases/{}")], ids=named)
async def test_anothers_lease_is_not_found_whatever_is_asked_of_it(harness: ServiceHarness, route: dict[str, Any]) -> None:
    (lease_id,) = await harness.acquire()
    await harness.batch(bash(lease_id, "true", call_id="c"))
    path = route["path"].replace("{}", lease_id, 1).replace("ports/{}", "ports/8000").replace("{}", "c")
    body = {"NarrowBody": {"allow_network": False}, "ExecBody": {"command": "true"}}.get(route.get("body", ""))
    params = {"path": "a"} if "path" in route.get("query", ()) else {}

    answer = await harness.http.request(route["method"], path, params=params, json=body, headers=bearer(BOB))

    assert (answer.status_code, answer.json()["code"]) == (404, "lease_not_found")


async def test_anothers_lease_can_be_neither_renewed_released_cancelled_nor_used(harness: ServiceHarness) -> None:
    (lease_id,) = await harness.acquire(run_id="r")
    bob = bearer(BOB)
    renewed = (await harness.http.post("/v1/renew", json={"lease_ids": [lease_id]}, headers=bob)).json()
    released = (await harness.http.post("/v1/release", json={"lease_ids": [lease_id]}, headers=bob)).json()
    of_run = (await harness.http.post("/v1/release", json={"run_id": "r"}, headers=bob)).json()
    used = (await harness.http.post("/v1/exec-batch", json={"calls": [bash(lease_id, "true")]}, headers=bob)).json()["results"][0]
    await harness.batch(bash(lease_id, "true", call_id="c"))
    cancelled = await harness.http.post("/v1/cancel", json={"lease_id": lease_id, "call_id": "c"}, headers=bob)

    assert (cancelled.status_code, cancelled.json()["code"]) == (404, "lease_not_found")
    assert renewed["lost"][0]["code"] == "lease_not_found"
    assert (released, of_run) == ({"released": [], "unknown": [lease_id]}, {"released": [], "unknown": []})
    assert used["reason"] == "lease_lost"
    assert (await harness.http.get(f"/v1/leases/{lease_id}")).status_code == 200


async def test_a_run_and_a_request_key_of_one_name_are_two_tenants_own(harness: ServiceHarness) -> None:
    body = {"run_id": "r", "trajectory_id": "t", "request_key": "k"}
    mine = (await harness.http.post("/v1/acquire", json=body)).json()["leases"][0]["lease_id"]
    hers = (await harness.http.post("/v1/acquire", json={**body, "ttl_s": 5}, headers=bearer(BOB))).json()["leases"][0]["lease_id"]
    listed = (await harness.http.get("/v1/leases", params={"run_id": "r", "trajectory_id": "t"}, headers=bearer(BOB))).json()["leases"]
    released = (await harness.http.post("/v1/release", json={"run_id": "r"}, headers=bearer(BOB))).json()

    assert mine != hers
    assert [lease["lease_id"] for lease in listed] == [hers]
    assert released == {"released": [hers], "unknown": []}
    assert (await harness.http.get(f"/v1/leases/{mine}")).status_code == 200


async def test_a_run_batch_and_its_request_key_are_two_tenants_own(harness: ServiceHarness) -> None:
    def batch(command: str) -> dict[str, Any]:
        return {"request_key": "k", "run_id": "r", "items": [{"tool": "bash", "args": {"command": command}}]}

    mine = (await harness.http.post("/v1/run-batch", json=batch("true"))).json()["results"]
    hers = await harness.http.post("/v1/run-batch", json=batch("false"), headers=bearer(BOB))  # another body, which would be a conflict in one tenant
    await harness.http.post("/v1/release", json={"run_id": "r"}, headers=bearer(BOB))
    again = (await harness.http.post("/v1/run-batch", json=batch("true"))).json()["results"]

    assert (hers.status_code, len(hers.json()["results"])) == (200, 1)
    assert again == mine


async def test_nobody_but_admins_reads_a_variable_anywhere(tmp_path: Path) -> None:
    secret = replace(POOL, env_vars={"KEY": "for-admins-only"})
    async with open_service_harness(tmp_path / "state", pools={"default": secret}) as harness:
        await harness.http.post("/v1/acquire", json={}, headers=bearer(BOB))
        asked = [
            await harness.http.request(route["method"], route["path"].replace("{}", "default"), headers=bearer(BOB))
            for route in BUILT
            if route["method"] == "GET" and "media" not in route and not route["path"].startswith("/v1/leases")
        ]
        put = await harness.http.put("/v1/pools/default", json={"slots_per_sandbox": 4}, headers=bearer(BOB))
        verify = await harness.http.post("/v1/pools/default/verify", headers=bearer(BOB))
        figures = await harness.http.get("/metrics", headers=bearer(BOB))
        admins = await harness.http.get("/v1/pools/default")

    assert len(asked) >= 5
    assert [answer.url.path for answer in (*asked, put, verify, figures) if "for-admins-only" in answer.text] == []
    assert "for-admins-only" in admins.text


async def test_a_stream_that_goes_on_where_it_was_cut_tells_nothing_of_anothers(port: ServiceHarness) -> None:
    async with port.http.stream("GET", "/v1/events") as answer:
        (mine,) = await port.acquire()
        acquired = (await until(events(answer), "lease.acquired"))[-1]
    hers = (await port.http.post("/v1/acquire", json={}, headers=bearer(BOB))).json()["leases"][0]["lease_id"]

    async with port.http.stream("GET", "/v1/events", headers={**bearer(BOB), "Last-Event-ID": str(int(acquired.id or 0) - 1)}) as answer:
        first = await anext(events(answer))

    assert acquired.data["lease_id"] == mine
    assert (first.event, first.data["lease_id"]) == ("lease.acquired", hers)


KEPT_APART: dict[str, str] = {
    "POST /v1/acquire": "test_a_run_and_a_request_key_of_one_name_are_two_tenants_own",
    "POST /v1/run-batch": "test_a_run_batch_and_its_request_key_are_two_tenants_own",
    "POST /v1/exec-batch": "test_anothers_lease_can_be_neither_renewed_released_cancelled_nor_used",
    "POST /v1/release": "test_anothers_lease_can_be_neither_renewed_released_cancelled_nor_used",
    "POST /v1/renew": "test_anothers_lease_can_be_neither_renewed_released_cancelled_nor_used",
    "POST /v1/cancel": "test_anothers_lease_can_be_neither_renewed_released_cancelled_nor_used",
    "GET /v1/leases": "test_each_tenant_has_its_own_leases",
    "GET /v1/events": "test_a_stream_that_goes_on_where_it_was_cut_tells_nothing_of_anothers",
    **dict.fromkeys(
        (
            "GET /v1/pools", "GET /v1/pools/{}", "PUT /v1/pools/{}", "DELETE /v1/pools/{}", "POST /v1/pools/{}/verify", "GET /v1/sandboxes", "GET /readyz",
        ),
        "test_anothers_pool_can_be_neither_seen_used_changed_nor_deleted",
    ),
    "GET /metrics": "test_nobody_but_admins_reads_a_variable_anywhere",
}  # fmt: skip
"""Which test keeps tenants apart at a route. The routes of one lease are all in one; those that are missing here tell or do nothing of a tenant's."""
OF_NOBODY = {"POST /v1/sandboxes/{}/drain", "GET /healthz", "GET /docs", "GET /v1/agent.pyz"}


def test_every_route_keeps_tenants_apart() -> None:
    of_a_lease = {named(route) for route in BUILT if route["path"].startswith("/v1/leases/{}")}

    assert {named(route) for route in BUILT} == of_a_lease | set(KEPT_APART) | OF_NOBODY
    assert set(KEPT_APART.values()) <= {*globals(), *vars(test_pools_of_tenants)}


async def test_a_tenant_may_hold_so_many_leases(tmp_path: Path) -> None:
    limited = replace(BOB, max_leases=2)
    async with open_service_harness(tmp_path / "state", tenants=(ALICE, limited)) as harness:
        two = await harness.http.post("/v1/acquire", json={"count": 2}, headers=bearer(BOB))
        third = await harness.http.post("/v1/acquire", json={}, headers=bearer(BOB))

    assert (two.status_code, third.status_code) == (200, 429)
    assert (third.json()["code"], third.json()["limit"]) == ("quota_exceeded", "max_leases")
    assert int(third.headers["retry-after"]) >= 1
