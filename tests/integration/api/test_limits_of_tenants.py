"""Two tenants of one real service: one runs as many calls as it may, the other notices nothing."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from env_client import AsyncSandboxClient
from tests.support.service import SMALL_POOL, Service, running_service

TENANTS = [{"name": "many", "token": "token-of-many", "max_running_calls": 2}, {"name": "other", "token": "token-of-other"}]
ONE_CALL_S = 0.4


@pytest.fixture(scope="module")
def limited_service() -> Iterator[Service]:
    with running_service({"pools": {"default": {**SMALL_POOL, "max_sandboxes": 1}}, "tenants": TENANTS}) as service:
        yield service


@pytest.fixture
def many(limited_service: Service) -> Iterator[httpx.Client]:
    with client(limited_service, "token-of-many") as http:
        yield http


@pytest.fixture
def other(limited_service: Service) -> Iterator[httpx.Client]:
    with client(limited_service, "token-of-other") as http:
        yield http


def client(service: Service, token: str) -> httpx.Client:
    return httpx.Client(base_url=service.url, headers={"Authorization": f"Bearer {token}"}, timeout=60.0, trust_env=False, verify=False)


def acquire(http: httpx.Client, count: int) -> list[str]:
    return [lease["lease_id"] for lease in http.post("/v1/acquire", json={"count": count, "run_id": "r"}).raise_for_status().json()["leases"]]


def bash(lease_id: str, command: str, **fields: Any) -> dict[str, Any]:
    return {"lease_id": lease_id, "tool": "bash", "args": {"command": command}, **fields}


def batch(http: httpx.Client, *calls: dict[str, Any]) -> httpx.Response:
    return http.post("/v1/exec-batch", json={"calls": list(calls)})


def most_at_once(results: list[dict[str, Any]]) -> int:
    """How many of these calls ran at one time, as their own clocks saw it."""
    spans = [[int(word) for word in result["output"].split()] for result in results]
    return max(sum(begin <= moment < end for begin, end in spans) for moment, _ in spans)


def test_a_batch_runs_so_many_at_once_and_waiting_costs_no_call_its_time(many: httpx.Client, other: httpx.Client) -> None:
    leases = acquire(many, 6)
    (mine,) = acquire(other, 1)
    calls = [bash(lease_id, f"date +%s%N; sleep {ONE_CALL_S}; date +%s%N", timeout_s=2.5 * ONE_CALL_S) for lease_id in leases]
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(batch(many, *calls)))
    asking.start()
    others = 0
    while asking.is_alive():
        assert batch(other, bash(mine, "true")).json()["results"][0]["success"]
        others += 1
    asking.join()

    results = answers[0].json()["results"]
    assert [result["reason"] for result in results] == ["exit"] * 6, "three waves, each longer than what the next ones may take altogether"
    assert most_at_once(results) == 2
    assert others > 10
    many.post("/v1/release", json={"run_id": "r"})
    other.post("/v1/release", json={"run_id": "r"})


def test_a_request_at_the_limit_is_told_when_to_come_again(many: httpx.Client) -> None:
    leases = acquire(many, 6)
    calls = [bash(lease_id, "until test -e go; do sleep 0.02; done", call_id="c") for lease_id in leases[:4]]
    asking = threading.Thread(target=batch, args=(many, *calls))
    asking.start()
    while any(many.get(f"/v1/leases/{lease_id}/calls/c").status_code == 404 for lease_id in leases[:4]):
        time.sleep(0.01)  # a call that is sent before they are accepted would be accepted itself, and could wait behind them
    refused = batch(many, bash(leases[5], "true"))
    states = [many.get(f"/v1/leases/{lease_id}/calls/c").json() for lease_id in leases[:4]]
    for lease_id in leases[:4]:
        many.put(f"/v1/leases/{lease_id}/files", params={"path": "go"}, content=b"").raise_for_status()
    asking.join()

    assert (refused.status_code, refused.json()["code"], refused.json()["limit"]) == (429, "quota_exceeded", "max_running_calls")
    assert int(refused.headers["retry-after"]) >= 1
    assert sorted(state["started_at"] is None for state in states) == [False, False, True, True]
    assert batch(many, bash(leases[5], "true")).json()["results"][0]["success"]
    many.post("/v1/release", json={"run_id": "r"})


async def test_a_client_that_asks_for_more_at_once_gets_all_of_it_in_time(limited_service: Service) -> None:
    async with AsyncSandboxClient(limited_service.url, "token-of-many") as many, many.gang(8, run_id="r") as leases:
        results = await asyncio.gather(*(lease.bash("sleep 0.1; echo done") for lease in leases))

    assert [result.output for result in results] == ["done\n"] * 8


def test_what_an_agent_refuses_says_when(other: httpx.Client) -> None:
    (lease_id,) = acquire(other, 1)
    began = time.time()
    running = threading.Thread(target=batch, args=(other, bash(lease_id, "until test -e go; do sleep 0.02; done", call_id="c")))
    running.start()
    while other.get(f"/v1/leases/{lease_id}/calls/c").status_code != 200:
        pass
    refused = batch(
        other,
        bash(lease_id, "true", call_id="c"),
        {"lease_id": lease_id, "tool": "no-such-tool"},
        bash(lease_id, "true", cwd=3),
        {"lease_id": lease_id, "tool": "bash", "args": {"command": 3}},
    ).json()["results"]
    other.put(f"/v1/leases/{lease_id}/files", params={"path": "go"}, content=b"").raise_for_status()
    running.join()

    assert [result["reason"] for result in refused] == ["call_conflict", "invalid_args", "invalid_args", "invalid_args"]
    assert [began <= result["started_at"] <= time.time() for result in refused] == [True] * 4
    assert [result["duration_s"] for result in refused] == pytest.approx([0.0] * 4, abs=0.01)
    other.post("/v1/release", json={"run_id": "r"})
