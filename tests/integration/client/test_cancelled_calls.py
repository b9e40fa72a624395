"""Calls that are cancelled over HTTP at any moment: before they run, while they start, while they write, and when they end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from tests.support.service import Service

ROUNDS = 24
STEP_S = 0.001  # From one round to the next, which together cover what a call takes from its request until its end.
#: It begins at once, leaves a process behind, writes, and ends soon by itself.
COMMAND = "sleep 7117 & for i in 1 2 3 4 5; do echo $i; done; sleep 0.005"


@pytest.fixture
async def http(service: Service) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=service.url, headers=service.headers, timeout=60, trust_env=False, verify=False) as client:
        yield client


async def cancel_call(http: httpx.AsyncClient, lease_id: str, call_id: str) -> dict[str, object]:
    """Cancel a call as soon as the service knows it; return the response."""
    while True:
        answer = await http.post("/v1/cancel", json={"lease_id": lease_id, "call_id": call_id})
        if answer.status_code != 404:
            assert answer.status_code == 200, answer.text
            cancelled: dict[str, object] = answer.json()
            return cancelled
        assert answer.json()["code"] == "call_not_found"


async def test_whenever_a_call_is_cancelled_it_has_one_result_and_the_calls_behind_it_run(http: httpx.AsyncClient) -> None:
    (lease,) = (await http.post("/v1/acquire", json={"wait_s": 30})).json()["leases"]
    lease_id, reasons = lease["lease_id"], []
    for number in range(ROUNDS):
        names = [f"{name}-{number}" for name in ("first", "second", "third")]
        calls = [{"call_id": name, "lease_id": lease_id, "tool": "bash", "args": {"command": COMMAND}, "timeout_s": 30} for name in names]
        running = asyncio.create_task(http.post("/v1/exec-batch", json={"calls": calls}))
        await asyncio.sleep(STEP_S * number)
        cancelled = await asyncio.gather(*(cancel_call(http, lease_id, name) for name in names[:2]))
        first, second, third = (await running).json()["results"]
        known = [(await http.get(f"/v1/leases/{lease_id}/calls/{name}")).json() for name in names[:2]]

        assert [first, second] == cancelled
        assert known == [{"state": "done", "result": result} for result in cancelled]
        assert (third["reason"], third["output"]) == ("exit", "1\n2\n3\n4\n5\n")
        for result in cancelled:
            assert result["reason"] in ("cancelled", "exit")
            assert "1\n2\n3\n4\n5\n".startswith(str(result["output"]))
        reasons.append((first["reason"], second["reason"]))
        # What a call that was not cancelled has left behind runs on; a cancelled one leaves nothing.
        ended = [first["reason"], second["reason"], third["reason"]].count("exit")
        left = (await http.post(f"/v1/leases/{lease_id}/exec", json={"command": "pgrep -c -f '[s]leep 7117'; pkill -f '[s]leep 7117'"})).json()
        assert int(left["output"]) == ended, (first, second)
    await http.post("/v1/release", json={"lease_ids": [lease_id]})

    assert ("cancelled", "cancelled") in reasons
