"""A tenant at one of its limits is told so, and when to come again; the others notice nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from env_client.retry import TRANSIENT_LIMITS
from sandbox_server.api.limits import LIMITS
from sandbox_server.api.tenants import Tenant
from sandbox_server.settings.file import TenantModel
from tests.contract.connections.test_hang_ups import Caller
from tests.contract.test_recorded import events
from tests.support.service_harness import ALICE, BOB, ServiceHarness, bash, bearer, open_service_harness_on_port

LIMITED = replace(BOB, max_waiters=1, max_running_calls=1)
BOBS = bearer(BOB)


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[ServiceHarness]:
    """Alice, who has no limits, and Bob, who may run one call and let one acquire wait."""
    async with open_service_harness_on_port(tmp_path / "state", tenants=(ALICE, LIMITED)) as running:
        yield running


async def bobs_leases(harness: ServiceHarness, count: int) -> list[str]:
    answer = await harness.http.post("/v1/acquire", json={"count": count}, headers=BOBS)
    return [lease["lease_id"] for lease in answer.json()["leases"]]


async def execute(harness: ServiceHarness, lease_id: str, command: str, call_id: str, tenant: Tenant = BOB) -> httpx.Response:
    return await harness.http.post(f"/v1/leases/{lease_id}/exec", json={"command": command, "call_id": call_id}, headers=bearer(tenant))


async def until_running(harness: ServiceHarness, *call_ids: str) -> None:
    while not set(call_ids) <= {call_id for call_id, _ in harness.agent.ran}:
        await asyncio.sleep(0)


async def until_waiting(harness: ServiceHarness, count: int) -> None:
    service = harness.application._edge.service
    assert service is not None
    limiter = service.dispatcher.concurrency_limiter
    while sum(len(line.waiting) for line in limiter._calls_by_tenant.values()) != count:
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def running(harness: ServiceHarness) -> AsyncIterator[list[str]]:
    """Three leases of Bob's; in the first his one call runs, and is cancelled at the end."""
    leases = await bobs_leases(harness, 3)
    first = asyncio.create_task(execute(harness, leases[0], "hang", "first"))
    await until_running(harness, "first")
    yield leases
    await harness.http.post("/v1/cancel", json={"lease_id": leases[0], "call_id": "first"}, headers=BOBS)
    assert (await first).json()["reason"] == "cancelled"


async def test_calls_beyond_the_limit_wait_and_a_request_beyond_those_comes_again(port: ServiceHarness) -> None:
    (mine,) = await port.acquire()
    async with running(port) as (_, second, third):
        waiting = asyncio.create_task(execute(port, second, "echo 2", "second"))
        await until_waiting(port, 1)
        refused = await execute(port, third, "echo 3", "third")
        batch = await port.http.post("/v1/exec-batch", json={"calls": [bash(third, "echo 3")]}, headers=BOBS)
        where = (await port.http.get(f"/v1/leases/{second}/calls/second", headers=BOBS)).json()
        alices = await execute(port, mine, "echo alice", "a", ALICE)

    assert [(answer.status_code, answer.json()["code"], answer.json()["limit"]) for answer in (refused, batch)] == [
        (429, "quota_exceeded", "max_running_calls")
    ] * 2
    assert int(refused.headers["retry-after"]) >= 1
    assert where == {"state": "running", "output_bytes": 0, "started_at": None}
    assert (alices.status_code, alices.json()["output"]) == (200, "alice\n")
    assert (await waiting).json()["output"] == "2\n"
    assert (await execute(port, third, "echo 3", "third")).json()["output"] == "3\n"


async def test_a_batch_is_taken_whole_and_its_results_come_as_they_are_there(port: ServiceHarness) -> None:
    leases = await bobs_leases(port, 3)
    calls = [bash(lease_id, "live", call_id=f"c{number}") for number, lease_id in enumerate(leases)]
    async with port.http.stream("POST", "/v1/exec-batch", json={"calls": calls}, headers={**BOBS, "Accept": "application/x-ndjson"}) as answer:
        lines = answer.aiter_lines()
        seen: list[dict[str, Any]] = []
        for number in range(3):
            await until_running(port, f"c{number}")
            assert len(port.agent.ran) == number + 1
            port.agent.finish(f"c{number}")
            seen.append(json.loads(await anext(lines)))

    assert [(line["call_id"], line["reason"]) for line in seen] == [(f"c{number}", "exit") for number in range(3)]


async def test_who_hangs_up_while_a_call_waits_ends_it_no_more_than_one_that_runs(port: ServiceHarness) -> None:
    async with running(port) as (_, second, _):
        caller = await Caller.of(port)
        body = json.dumps({"command": "echo 2", "call_id": "second"}).encode()
        await caller.send("POST", f"/v1/leases/{second}/exec", body, tenant=BOB)
        await until_waiting(port, 1)
        await caller.hang_up()
        await port.http.get("/healthz")

    await until_running(port, "second")
    assert (await execute(port, second, "echo 2", "second")).json()["output"] == "2\n"
    assert [call_id for call_id, _ in port.agent.ran] == ["first", "second"]


async def test_asking_again_for_what_waits_runs_or_is_done_is_never_refused(port: ServiceHarness) -> None:
    async with running(port) as (first, second, third):
        waiting = asyncio.create_task(execute(port, second, "echo 2", "second"))
        await until_waiting(port, 1)
        again = [asyncio.create_task(execute(port, lease_id, command, call_id)) for lease_id, command, call_id in (
            (first, "hang", "first"), (second, "echo 2", "second"),
        )]  # fmt: skip
        assert (await execute(port, third, "true", "new")).status_code == 429

    assert [(await answer).status_code for answer in again] == [200, 200]
    assert (await again[1]).json() == (await waiting).json()
    assert (await execute(port, second, "echo 2", "second")).json() == (await waiting).json()
    assert [call_id for call_id, _ in port.agent.ran] == ["first", "second"]


async def test_a_stream_of_a_call_that_waits_begins_with_its_turn(port: ServiceHarness) -> None:
    async with running(port) as (_, second, _):
        call = {"command": "echo 2", "call_id": "second"}
        request = port.http.build_request("POST", f"/v1/leases/{second}/exec", json=call, headers={**BOBS, "Accept": "text/event-stream"})
        answer = await port.http.send(request, stream=True)
        await until_waiting(port, 1)
        assert (answer.status_code, [call_id for call_id, _ in port.agent.ran]) == (200, ["first"])
    told = [one async for one in events(answer)]
    await answer.aclose()

    assert [(one.event, one.data.get("data")) for one in told] == [("output", "2\n"), ("result", None)]


async def test_a_call_that_waits_can_be_cancelled_and_ends_with_its_lease(port: ServiceHarness) -> None:
    async with running(port) as (_, second, third):
        cancelled = asyncio.create_task(execute(port, second, "echo 2", "second"))
        await until_waiting(port, 1)
        told = (await port.http.post("/v1/cancel", json={"lease_id": second, "call_id": "second"}, headers=BOBS)).json()
        assert (await cancelled).json() == told
        released = asyncio.create_task(execute(port, third, "echo 3", "third"))
        await until_waiting(port, 1)
        await port.http.post("/v1/release", json={"lease_ids": [third]}, headers=BOBS)
        ended = (await released).json()

    assert (told["reason"], told["fault"], ended["reason"]) == ("cancelled", "none", "lease_lost")
    assert [call_id for call_id, _ in port.agent.ran] == ["first"]


async def test_so_many_acquires_of_a_tenant_wait_and_the_others_do_as_before(port: ServiceHarness) -> None:
    held = await port.acquire(4)
    first = asyncio.create_task(port.http.post("/v1/acquire", json={}, headers=BOBS))
    while (await port.http.get("/v1/pools/default")).json()["queue"] == 0:
        await asyncio.sleep(0)

    refused = await port.http.post("/v1/acquire", json={}, headers=BOBS)
    at_once = await port.http.post("/v1/acquire", json={"wait_s": 0}, headers=BOBS)
    alices = asyncio.create_task(port.acquire())
    await port.http.post("/v1/release", json={"lease_ids": held})

    assert (refused.status_code, refused.json()["code"], refused.json()["limit"]) == (429, "quota_exceeded", "max_waiters")
    assert int(refused.headers["retry-after"]) >= 1
    assert (at_once.status_code, at_once.json()["code"]) == (503, "no_capacity")
    assert (await first).status_code == 200
    assert len(await alices) == 1


def test_the_limits_that_clients_wait_for_are_the_services() -> None:
    assert set(LIMITS) | set(TenantModel.model_fields) >= TRANSIENT_LIMITS


async def test_limits_are_read_again_with_the_tenants(port: ServiceHarness) -> None:
    raised = replace(port.settings, tenants=(ALICE, replace(LIMITED, max_running_calls=2)))
    port.application._load = lambda: raised
    async with running(port) as (_, second, _):
        waiting = asyncio.create_task(execute(port, second, "echo 2", "second"))
        await until_waiting(port, 1)

        os.kill(os.getpid(), signal.SIGHUP)

        assert (await waiting).json()["output"] == "2\n"
