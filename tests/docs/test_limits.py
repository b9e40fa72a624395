"""Past each limit the service does what the page of limits says: every one of them is passed once, on a service where they are low."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from sandbox_server.api.limits import LIMITS
from tests.docs.test_reference import rows
from tests.support.service import SMALL_POOL, running_service

LOW = {
    "body_bytes": 9000, "json_depth": 8, "json_values": 100,
    "query_bytes": 300, "header_bytes": 2000, "batch_calls": 5, "call_bytes": 500, "batch_output_bytes": 300_000,
    "calls_in_flight": 8, "lease_calls": 6, "call_wait_s": 5, "waiters": 1, "lease_ids": 2, "page_items": 3, "list_entries": 3, "upload_bytes": 1000,
    "labels": 2, "pools": 2, "pool_sandboxes": 2, "pool_slots": 16, "pool_env_vars": 1, "streams": 1, "terminals": 1,
    "answer_memory_bytes": 2 * 5 * 4096, "answer_file_bytes": 600_000, "answer_wait_s": 1,
}  # fmt: skip
POOL = {**SMALL_POOL, "slots_per_sandbox": 2, "max_sandboxes": 1}


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with running_service({"pools": {"default": POOL}, "limits": LOW}) as service, service.http() as client:
        yield client


@pytest.fixture
def lease(http: httpx.Client) -> Iterator[str]:
    lease_id = acquire(http)
    yield lease_id
    http.post("/v1/release", json={"lease_ids": [lease_id]})


def acquire(http: httpx.Client, **options: Any) -> str:
    return str(http.post("/v1/acquire", json=options).raise_for_status().json()["leases"][0]["lease_id"])


def batch(http: httpx.Client, lease: str, *calls: dict[str, Any]) -> httpx.Response:
    return http.post("/v1/exec-batch", json={"calls": [{"lease_id": lease, "tool": "bash", "args": {"command": "true"}} | call for call in calls]})


def put_pool(http: httpx.Client, name: str, **spec: Any) -> httpx.Response:
    return http.put(f"/v1/pools/{name}", json={"min_sandboxes": 0, "max_sandboxes": 1, "slots_per_sandbox": 1, **spec})


def past_waiters(http: httpx.Client, lease: str) -> httpx.Response:
    other = acquire(http)
    first = threading.Thread(target=http.post, args=("/v1/acquire",), kwargs={"json": {"wait_s": 20, "run_id": "waits"}})
    first.start()
    while http.get("/v1/pools/default").json()["queue"] == 0:
        pass
    answer = http.post("/v1/acquire", json={})
    http.post("/v1/release", json={"lease_ids": [other]})
    first.join()
    http.post("/v1/release", json={"run_id": "waits"})
    return answer


def past_streams(http: httpx.Client, lease: str) -> httpx.Response:
    with http.stream("GET", "/v1/events"):
        return http.get("/v1/events")


def past_terminals(http: httpx.Client, lease: str) -> httpx.Response:
    address = f"{str(http.base_url).rstrip('/').replace('http', 'ws', 1)}/v1/leases/{lease}/terminal"
    headers = {"Authorization": http.headers["Authorization"]}
    with connect(address, additional_headers=headers, proxy=None), pytest.raises(InvalidStatus) as refused:
        connect(address, additional_headers=headers, proxy=None)
    return httpx.Response(refused.value.response.status_code, content=bytes(refused.value.response.body))


def past_pools(http: httpx.Client, lease: str) -> httpx.Response:
    put_pool(http, "second").raise_for_status()
    return put_pool(http, "third")


def past_lease_calls(http: httpx.Client, lease: str) -> httpx.Response:
    for _ in range(LOW["lease_calls"]):
        http.post(f"/v1/leases/{lease}/exec", json={"command": "true"}).raise_for_status()
    assert batch(http, lease, {}).json()["results"][0]["reason"] == "backend_error"
    return http.post(f"/v1/leases/{lease}/exec", json={"command": "true"})


def past_answers(http: httpx.Client, lease: str) -> httpx.Response:
    call = {"lease_id": lease, "tool": "bash", "args": {"command": "sleep 20"}, "call_id": "slow", "output_limit_bytes": 300_000}
    first = threading.Thread(target=http.post, args=("/v1/exec-batch",), kwargs={"json": {"calls": [call]}})
    first.start()
    while http.get(f"/v1/leases/{lease}/calls/slow").status_code != httpx.codes.OK:
        pass
    answer = batch(http, lease, {"output_limit_bytes": 300_000})
    http.post("/v1/cancel", json={"lease_id": lease, "call_id": "slow"}).raise_for_status()
    first.join()
    return answer


def past_answer_memory(http: httpx.Client, lease: str) -> httpx.Response:
    calls = [{"lease_id": lease, "tool": "bash", "args": {"command": "sleep 20"}, "call_id": f"slow{n}"} for n in range(4)]
    first = threading.Thread(target=http.post, args=("/v1/exec-batch",), kwargs={"json": {"calls": calls}})
    first.start()
    while http.get(f"/v1/leases/{lease}/calls/slow0").status_code != httpx.codes.OK:
        pass
    answer = batch(http, lease, {}, {})
    for call in calls:
        http.post("/v1/cancel", json={"lease_id": lease, "call_id": call["call_id"]})
    first.join()
    return answer


def past_list_entries(http: httpx.Client, lease: str) -> httpx.Response:
    http.post(f"/v1/leases/{lease}/exec", json={"command": "mkdir many; touch many/{1..4}"}).raise_for_status()
    return http.get(f"/v1/leases/{lease}/files/list", params={"path": "many"})


PAST = {
    "body_bytes": lambda http, lease: http.post("/v1/acquire", json={"run_id": "x" * 10_000}),
    "json_values": lambda http, lease: http.post("/v1/release", json={"lease_ids": ["x"] * 101}),
    "json_depth": lambda http, lease: http.post("/v1/acquire", content="[" * 9 + "]" * 9),
    "query_bytes": lambda http, lease: http.get("/v1/leases", params={"run_id": "x" * 400}),
    "header_bytes": lambda http, lease: http.get("/v1/leases", headers={"X-Long": "x" * 2000}),
    "batch_calls": lambda http, lease: batch(http, lease, *[{}] * 6),
    "call_bytes": lambda http, lease: batch(http, lease, {"args": {"command": "x" * 600}}),
    "batch_output_bytes": lambda http, lease: batch(http, lease, {"output_limit_bytes": 300_001}),
    "calls_in_flight": lambda http, lease: batch(http, lease, *[{}] * 5),
    "lease_calls": past_lease_calls,
    "call_wait_s": lambda http, lease: http.get(f"/v1/leases/{lease}/calls/c-1", params={"wait_s": 6}),
    "waiters": past_waiters,
    "lease_ids": lambda http, lease: http.post("/v1/renew", json={"lease_ids": ["a", "b", "c"]}),
    "page_items": lambda http, lease: http.get("/v1/leases", params={"limit": 4}),
    "list_entries": past_list_entries,
    "upload_bytes": lambda http, lease: http.put(f"/v1/leases/{lease}/files", params={"path": "large"}, content=b"x" * 1001),
    "labels": lambda http, lease: http.post("/v1/acquire", json={"labels": {"a": "", "b": "", "c": ""}}),
    "pools": past_pools,
    "pool_sandboxes": lambda http, lease: put_pool(http, "large", max_sandboxes=3),
    "pool_slots": lambda http, lease: put_pool(http, "large", slots_per_sandbox=17),
    "pool_env_vars": lambda http, lease: put_pool(http, "large", env_vars={"A": "", "B": ""}),
    "streams": past_streams,
    "terminals": past_terminals,
    "answer_memory_bytes": past_answer_memory,
    "answer_file_bytes": past_answers,
    "answer_wait_s": past_answers,
}


@pytest.mark.parametrize("name", [name for name in LIMITS if name in LOW])
def test_past_a_limit_comes_what_the_page_says(name: str, http: httpx.Client, lease: str) -> None:
    said = next(row[3] for row in rows("limits.md", "limits") if row[0] == name)
    code = said.partition(";")[0].rpartition(" ")[2]

    answer = PAST[name](http, lease)

    document = answer.json()["results"][0] | {"code": answer.json()["results"][0]["reason"]} if "own result" in said.partition(";")[0] else answer.json()
    assert document["code"] == code, document
    assert f"limits.{name}" in str(document) or document.get("limit") == name, document
