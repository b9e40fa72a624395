"""A pool shows for whom it holds what comes free: whose acquire that is, only to admins and to its own tenant."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from env_client.cli.commands.pools import summarize_state
from env_client.values import PoolInfo
from tests.support.service_harness import ALICE, BOB, ServiceHarness, bearer, open_service_harness_on_port

BOBS = bearer(BOB)


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[ServiceHarness]:
    async with open_service_harness_on_port(tmp_path / "state", tenants=(ALICE, BOB), claim_after_s=0.0) as running:
        yield running


async def test_a_pool_shows_its_claimant(port: ServiceHarness) -> None:
    ready = (await port.http.get("/v1/pools/default")).json()
    assert ready["claimant"] is None
    slots = ready["spec"]["slots_per_sandbox"] * ready["spec"]["max_sandboxes"]
    held = [lease["lease_id"] for lease in (await port.http.post("/v1/acquire", json={}, headers=BOBS)).json()["leases"]]
    gang = asyncio.create_task(port.acquire(slots, run_id="g"))
    while (view := (await port.http.get("/v1/pools/default")).json())["claimant"] is None:
        await asyncio.sleep(0)
    bobs = (await port.http.get("/v1/pools/default", headers=BOBS)).json()["claimant"]
    refused = await port.http.post("/v1/acquire", json={"wait_s": 0}, headers=BOBS)
    figures = (await port.http.get("/metrics")).text

    claimant = view["claimant"]
    assert {name: claimant[name] for name in ("tenant", "run_id", "count")} == {"tenant": ALICE.name, "run_id": "g", "count": slots}
    assert claimant["held_slots"] == view["slots"]["ready"] == slots - 1
    assert claimant["waited_s"] >= 0
    assert set(bobs) == {"count", "held_slots", "waited_s"}
    assert (refused.status_code, refused.json()["code"], refused.json()["queue_position"]) == (503, "no_capacity", 2)
    assert "held for an acquire of" in refused.json()["detail"]
    assert f'sandbox_held_slots{{pool="default"}} {slots - 1}.0' in figures
    assert f"{slots - 1} free held for an acquire of {slots} of {ALICE.name}" in summarize_state(PoolInfo(**view))
    await port.http.post("/v1/release", json={"lease_ids": held}, headers=BOBS)
    assert len(await gang) == slots
    assert (await port.http.get("/v1/pools/default")).json()["claimant"] is None
