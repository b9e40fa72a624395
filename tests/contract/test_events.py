"""What changes is told to whom it concerns, in order, and from where they left."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.contract.test_recorded import Told, events
from tests.support.service_harness import BOB, ServiceHarness, bearer


async def until(found: AsyncIterator[Told], kind: str) -> list[Told]:
    """The events up to the first of a kind, with it."""
    seen = []
    async for told in found:
        seen.append(told)
        if told.event == kind:
            break
    return seen


async def test_a_lease_is_told_from_acquire_to_release(port: ServiceHarness) -> None:
    async with port.http.stream("GET", "/v1/events") as answer:
        (lease_id,) = await port.acquire(run_id="r")
        await port.http.post("/v1/renew", json={"lease_ids": [lease_id], "ttl_s": 900})
        await port.http.post("/v1/release", json={"lease_ids": [lease_id]})
        seen = await until(events(answer), "lease.released")

    mine = [told for told in seen if told.data.get("lease_id") == lease_id]
    assert [told.event for told in mine] == ["lease.acquired", "lease.renewed", "lease.released"]
    assert [int(told.id or 0) for told in seen] == sorted(int(told.id or 0) for told in seen)
    assert all(told.data["at"] > 0 for told in seen)


async def test_nobody_hears_of_anothers_leases_and_only_admins_of_sandboxes(port: ServiceHarness) -> None:
    async with port.http.stream("GET", "/v1/events", headers=bearer(BOB)) as bobs, port.http.stream("GET", "/v1/events") as alices:
        await port.acquire()
        await port.http.post("/v1/acquire", json={}, headers=bearer(BOB))
        sandbox_id = port.agent.sandbox_id
        await port.http.post(f"/v1/sandboxes/{sandbox_id}/drain")
        await port.http.put("/v1/pools/last", json={"slots_per_sandbox": 1, "min_sandboxes": 0, "shared": True})
        to_bob = await until(events(bobs), "pool.created")
        to_alice = await until(events(alices), "pool.created")

    assert {told.data.get("tenant") for told in to_bob} <= {None, "bob"}
    assert [told.event for told in to_bob if told.event.startswith("lease.")] == ["lease.acquired"]
    assert [told.event for told in to_bob if told.event.startswith("sandbox.")] == []
    assert [told.event for told in to_alice if told.event.startswith("lease.")] == ["lease.acquired"]
    assert "sandbox.draining" in [told.event for told in to_alice]


async def test_a_slot_has_one_name_wherever_it_is_told(port: ServiceHarness, caplog: pytest.LogCaptureFixture) -> None:
    async with port.http.stream("GET", "/v1/events") as answer:
        lease = (await port.http.post("/v1/acquire", json={})).json()["leases"][0]
        acquired = (await until(events(answer), "lease.acquired"))[-1]
    checked = (await port.http.post("/v1/pools/default/verify")).json()["slots"]
    async with port.http.stream("GET", "/v1/events") as answer:
        port.agent.set_slot(lease["slot_id"].rpartition("/")[2], "quarantined", "a process would not die")
        quarantined = (await until(events(answer), "slot.quarantined"))[-1]

    of_sandbox = {f"{lease['sandbox_id']}/{number}" for number in range(4)}
    assert lease["slot_id"] == acquired.data["slot_id"] == quarantined.data["slot_id"]
    assert {slot["slot_id"] for slot in checked} == of_sandbox - {lease["slot_id"]}
    assert {record.slot_id for record in caplog.records if hasattr(record, "slot_id")} == {lease["slot_id"]}


async def first(port: ServiceHarness, **headers: str) -> Told:
    async with port.http.stream("GET", "/v1/events", headers=headers) as answer:
        return await anext(events(answer))


async def test_who_comes_back_hears_what_was_missed_or_that_it_is_gone(port: ServiceHarness) -> None:
    async with port.http.stream("GET", "/v1/events") as answer:
        await port.acquire()
        (seen,) = (await until(events(answer), "lease.acquired"))[-1:]
    await port.http.put("/v1/pools/meanwhile", json={"slots_per_sandbox": 1, "min_sandboxes": 0})
    data: dict[str, Any] = (await first(port, **{"Last-Event-ID": str(seen.id)})).data

    assert (data["kind"], data.get("pool", data.get("name"))) == ("pool.created", "meanwhile")
    assert (await first(port, **{"Last-Event-ID": "1"})).event == "missed"
