"""Who may call."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from sandbox_server.api.tenants import Tenant
from tests.support.house import ALICE, BOB, House, bearer, lifespan, make_application, make_settings, open_house


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
    assert f'curl -H "Authorization: Bearer $(cat {tmp_path / "state" / "token"})" http://127.0.0.1:8000/' in told.out
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
