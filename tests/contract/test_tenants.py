"""Who may call."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sandbox_server.api.tenants import Tenant
from tests.contract.contract import BUILT, named
from tests.support.house import ALICE, BOB, House, bash, bearer, lifespan, make_application, make_settings, open_house


async def test_each_tenant_has_its_own_leases(house: House) -> None:
    (mine,) = await house.acquire()
    hers = (await house.http.post("/v1/acquire", json={}, headers=bearer(BOB))).json()["leases"][0]

    assert [lease["lease_id"] for lease in (await house.http.get("/v1/leases")).json()["leases"]] == [mine]
    assert (hers["tenant"], (await house.http.get(f"/v1/leases/{hers['lease_id']}")).status_code) == ("bob", 404)


async def test_an_open_door_lets_everybody_in_and_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with open_house(tmp_path / "state", open_door=True) as house:
        answer = await house.http.post("/v1/acquire", json={}, headers={"Authorization": ""})

    assert answer.json()["leases"][0]["tenant"] == "local"
    assert "SANDBOX_AUTH=none" in caplog.text


async def test_without_tokens_the_service_makes_one_and_never_prints_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with open_house(tmp_path / "state", tenants=()) as house:
        token = (tmp_path / "state" / "token").read_text().strip()
        mine = await house.http.get("/v1/pools", headers={"Authorization": f"Bearer {token}"})
        wrong = await house.http.get("/v1/pools")

    told = capsys.readouterr()
    assert (mine.status_code, wrong.status_code) == (200, 401)
    assert f'curl -H "Authorization: Bearer $(cat {tmp_path / "state" / "token"})" http://ADDRESS/' in told.out
    assert token not in told.out + told.err


async def test_a_hang_up_signal_reads_the_tenants_again(tmp_path: Path) -> None:
    settings = make_settings(tmp_path / "state")
    told = [settings, replace(settings, tenants=(Tenant(name="carol", token="carols-token"),))]
    application, _ = make_application(settings)
    application._load = lambda: told.pop(0)

    async with lifespan(application):
        service = application._front.service
        assert service is not None
        os.kill(os.getpid(), signal.SIGHUP)
        while told:
            await asyncio.sleep(0)

        assert service.tenants.authenticate(b"Bearer carols-token").name == "carol"
        assert {tenant.name for tenant in service.tenants.all} == {"carol"}


async def test_an_advertised_url_is_left_for_this_machines_clients(tmp_path: Path) -> None:
    async with open_house(tmp_path / "state", advertise_url="https://pool.example"):
        told = (tmp_path / "state" / "server.json").read_text()

    assert '"url": "https://pool.example"' in told
    assert not (tmp_path / "state" / "server.json").exists()
    assert ALICE.token is not None
    assert ALICE.token not in told


@pytest.mark.parametrize("route", [route for route in BUILT if route["path"].startswith("/v1/leases/{}")], ids=named)
async def test_anothers_lease_is_not_found_whatever_is_asked_of_it(house: House, route: dict[str, Any]) -> None:
    (lease_id,) = await house.acquire()
    await house.batch(bash(lease_id, "true", call_id="c"))
    path = route["path"].replace("{}", lease_id, 1).replace("{}", "c")
    body = {"NarrowBody": {"allow_network": False}, "ExecBody": {"command": "true"}}.get(route.get("body", ""))
    params = {"path": "a"} if "path" in route.get("query", ()) else {}

    answer = await house.http.request(route["method"], path, params=params, json=body, headers=bearer(BOB))

    assert (answer.status_code, answer.json()["code"]) == (404, "lease_not_found")


async def test_anothers_lease_can_be_neither_renewed_released_cancelled_nor_used(house: House) -> None:
    (lease_id,) = await house.acquire(run_id="r")
    bob = bearer(BOB)
    renewed = (await house.http.post("/v1/renew", json={"lease_ids": [lease_id]}, headers=bob)).json()
    released = (await house.http.post("/v1/release", json={"lease_ids": [lease_id]}, headers=bob)).json()
    of_run = (await house.http.post("/v1/release", json={"run_id": "r"}, headers=bob)).json()
    used = (await house.http.post("/v1/exec-batch", json={"calls": [bash(lease_id, "true")]}, headers=bob)).json()["results"][0]

    assert renewed["lost"][0]["code"] == "lease_not_found"
    assert (released, of_run) == ({"released": [], "unknown": [lease_id]}, {"released": [], "unknown": []})
    assert used["reason"] == "lease_lost"
    assert (await house.http.get(f"/v1/leases/{lease_id}")).status_code == 200


async def test_a_tenant_may_hold_so_many_leases(tmp_path: Path) -> None:
    limited = replace(BOB, max_leases=2)
    async with open_house(tmp_path / "state", tenants=(ALICE, limited)) as house:
        two = await house.http.post("/v1/acquire", json={"count": 2}, headers=bearer(BOB))
        third = await house.http.post("/v1/acquire", json={}, headers=bearer(BOB))

    assert (two.status_code, third.status_code) == (200, 429)
    assert (third.json()["code"], third.json()["limit"]) == ("quota_exceeded", "max_leases")
    assert int(third.headers["retry-after"]) >= 1
