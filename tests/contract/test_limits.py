"""Every named limit, passed by one: a clear error that names it, and the service goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from sandbox_server.api.limits import LIMITS, Limits, text_of
from tests.contract.connections.test_websockets import open_websocket
from tests.support.service_harness import ALICE, ServiceHarness, bash, open_service_harness

Pass = Callable[[ServiceHarness], Awaitable[httpx.Response]]
PASSED: dict[str, tuple[int, int, Pass]] = {}


def passes(name: str, value: int, status: int) -> Callable[[Pass], Pass]:
    """Register how a limit of this value is passed, and what that is answered with."""

    def register(ask: Pass) -> Pass:
        PASSED[name] = (value, status, ask)
        return ask

    return register


async def batch(harness: ServiceHarness, *calls: dict[str, Any]) -> httpx.Response:
    return await harness.http.post("/v1/exec-batch", json={"calls": list(calls)})


@passes("body_bytes", 100, 413)
async def _body(harness: ServiceHarness) -> httpx.Response:
    return await harness.http.post("/v1/acquire", content=b" " * 101)


@passes("body_memory_bytes", 100_000, 413)
async def _body_memory(harness: ServiceHarness) -> httpx.Response:
    return await harness.http.post("/v1/acquire", content=b" " * 60_000)


@passes("body_wait_s", 1, 429)
async def _body_wait(harness: ServiceHarness) -> httpx.Response:
    service = harness.application._edge.service
    assert service is not None
    reservation = await service.body_budget.reserve("alice", 256 << 20)
    answer = await harness.http.post("/v1/acquire", content=b" " * 60_000)
    reservation.release()
    assert answer.json()["limit"] == "body_memory_bytes"
    assert answer.headers["retry-after"]
    return answer


@passes("body_stall_s", 1, 422)
async def _body_stall(harness: ServiceHarness) -> httpx.Response:
    async def body() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(5)

    answer = await harness.http.post("/v1/acquire", content=body())
    assert answer.headers["connection"] == "close"
    return answer


@passes("json_depth", 2, 422)
async def _depth(harness: ServiceHarness) -> httpx.Response:
    return await harness.http.post("/v1/acquire", content=b'{"a": {"b": {}}}')


@passes("json_values", 20, 422)
async def _values(harness: ServiceHarness) -> httpx.Response:
    return await harness.http.post("/v1/release", json={"lease_ids": ["l"] * 21})


@passes("query_bytes", 100, 422)
async def _query(harness: ServiceHarness) -> httpx.Response:
    return await harness.http.get("/v1/leases", params={"run_id": "r" * 100})


@passes("header_bytes", 500, 422)
async def _headers(harness: ServiceHarness) -> httpx.Response:
    return await harness.http.get("/v1/leases", headers={"X-Much": "a" * 500})


@passes("batch_calls", 1, 422)
async def _calls(harness: ServiceHarness) -> httpx.Response:
    return await batch(harness, bash("l", "true"), bash("l", "true"))


@passes("call_bytes", 50, 200)
async def _call(harness: ServiceHarness) -> httpx.Response:
    (lease_id,) = await harness.acquire()
    return await batch(harness, bash(lease_id, "x" * 60))


@passes("batch_output_bytes", 150, 200)
async def _outputs(harness: ServiceHarness) -> httpx.Response:
    (lease_id,) = await harness.acquire()
    return await batch(harness, bash(lease_id, "true", output_limit_bytes=100), bash(lease_id, "true", output_limit_bytes=100))


@passes("calls_in_flight", 1, 429)
async def _in_flight(harness: ServiceHarness) -> httpx.Response:
    (lease_id,) = await harness.acquire()
    return await batch(harness, bash(lease_id, "true"), bash(lease_id, "true"))


@passes("lease_calls", 1, 429)
async def _of_lease(harness: ServiceHarness) -> httpx.Response:
    (lease_id,) = await harness.acquire()
    await harness.batch(bash(lease_id, "true"))
    return await harness.http.post(f"/v1/leases/{lease_id}/exec", json={"command": "true"})


@passes("call_wait_s", 1, 422)
async def _wait(harness: ServiceHarness) -> httpx.Response:
    return await harness.http.get("/v1/leases/l/calls/c", params={"wait_s": "1.5"})


@passes("waiters", 1, 429)
async def _waiters(harness: ServiceHarness) -> httpx.Response:
    await harness.acquire(4)
    first = asyncio.create_task(harness.http.post("/v1/acquire", json={"wait_s": 20}))
    while (await harness.http.get("/v1/pools/default")).json()["queue"] == 0:
        await asyncio.sleep(0)
    second = await harness.http.post("/v1/acquire", json={"wait_s": 20})
    first.cancel()
    return second


@passes("lease_ids", 1, 422)
async def _lease_ids(harness: ServiceHarness) -> httpx.Response:
    return await harness.http.post("/v1/renew", json={"lease_ids": ["a", "b"]})


@passes("page_items", 1, 422)
async def _page(harness: ServiceHarness) -> httpx.Response:
    return await harness.http.get("/v1/pools", params={"limit": "2"})


@passes("list_entries", 1, 422)
async def _entries(harness: ServiceHarness) -> httpx.Response:
    (lease_id,) = await harness.acquire()
    for name in ("a", "b"):
        await harness.http.put(f"/v1/leases/{lease_id}/files", params={"path": name}, content=b"")
    return await harness.http.get(f"/v1/leases/{lease_id}/files/list", params={"path": "."})


@passes("upload_bytes", 10, 413)
async def _upload(harness: ServiceHarness) -> httpx.Response:
    (lease_id,) = await harness.acquire()
    return await harness.http.put(f"/v1/leases/{lease_id}/files", params={"path": "a"}, content=b"x" * 11)


@passes("labels", 1, 422)
async def _labels(harness: ServiceHarness) -> httpx.Response:
    return await harness.http.post("/v1/acquire", json={"labels": {"a": "1", "b": "2"}})


@passes("pools", 1, 429)
async def _pools(harness: ServiceHarness) -> httpx.Response:
    return await harness.http.put("/v1/pools/another", json={"min_sandboxes": 0})


@passes("pool_sandboxes", 2, 422)
async def _sandboxes(harness: ServiceHarness) -> httpx.Response:
    return await harness.http.put("/v1/pools/another", json={"max_sandboxes": 3})


@passes("pool_slots", 10, 422)
async def _slots(harness: ServiceHarness) -> httpx.Response:
    return await harness.http.put("/v1/pools/another", json={"max_sandboxes": 2, "slots_per_sandbox": 6})


@passes("pool_env_vars", 1, 422)
async def _env_vars(harness: ServiceHarness) -> httpx.Response:
    return await harness.http.put("/v1/pools/another", json={"env_vars": {"A": "1", "B": "2"}})


@passes("streams", 1, 429)
async def _streams(harness: ServiceHarness) -> httpx.Response:
    service = harness.application._edge.service
    assert service is not None
    service.stream_counts[ALICE.name] += 1
    return await harness.http.get("/v1/events")


@passes("port_connections", 1, 429)
async def _port_connections(harness: ServiceHarness) -> httpx.Response:
    service = harness.application._edge.service
    assert service is not None
    (lease_id,) = await harness.acquire()
    async with service.ports.connect(ALICE.name, lease_id, 8000):
        refused = await harness.http.get(f"/v1/leases/{lease_id}/ports/8000/")
    assert (await harness.http.get(f"/v1/leases/{lease_id}/ports/8000/")).status_code == 200
    return refused


@passes("terminals", 1, 429)
async def _terminals(harness: ServiceHarness) -> httpx.Response:
    service = harness.application._edge.service
    assert service is not None
    service.terminal_counts[ALICE.name] += 1
    start, body = await open_websocket(harness, token=ALICE.token, query=b"")
    return httpx.Response(start["status"], content=body["body"])


async def run_batch(harness: ServiceHarness, *items: dict[str, Any], **header: Any) -> httpx.Response:
    return await harness.http.post("/v1/run-batch", json={"items": list(items), **header})


PROGRAM = {"tool": "bash", "args": {"command": "true"}}
WITH_ARTIFACT = {**PROGRAM, "files": {"a": "x" * 100}, "artifacts": ["a"]}


@passes("run_batches", 1, 429)
async def _run_batches(harness: ServiceHarness) -> httpx.Response:
    service = harness.application._edge.service
    assert service is not None
    with service.run_batches.admit(ALICE.name):
        return await run_batch(harness, PROGRAM)


@passes("run_batch_items", 1, 422)
async def _run_batch_items(harness: ServiceHarness) -> httpx.Response:
    return await run_batch(harness, PROGRAM, PROGRAM)


@passes("run_batch_bytes", 10, 413)
async def _run_batch_bytes(harness: ServiceHarness) -> httpx.Response:
    return await harness.http.post("/v1/run-batch", content=b"{}\n" + b" " * 10, headers={"content-type": "application/x-ndjson"})


@passes("run_batch_item_bytes", 99, 422)
async def _run_batch_item_bytes(harness: ServiceHarness) -> httpx.Response:
    return await run_batch(harness, WITH_ARTIFACT)


@passes("run_batch_item_artifact_bytes", 1, 200)
async def _run_batch_item_artifact_bytes(harness: ServiceHarness) -> httpx.Response:
    return await run_batch(harness, WITH_ARTIFACT)


@passes("run_batch_artifact_bytes", 1, 200)
async def _run_batch_artifact_bytes(harness: ServiceHarness) -> httpx.Response:
    return await run_batch(harness, WITH_ARTIFACT)


@passes("run_batch_kept_bytes", 100, 410)
async def _run_batch_kept_bytes(harness: ServiceHarness) -> httpx.Response:
    assert (await run_batch(harness, PROGRAM, request_key="large")).status_code == 200
    return await run_batch(harness, PROGRAM, request_key="large")


@passes("answer_memory_bytes", 3 * 4096, 422)
async def _answer_memory(harness: ServiceHarness) -> httpx.Response:
    return await batch(harness, bash("l", "true"), bash("l", "true"))


@passes("answer_file_bytes", 1_000_000, 422)
async def _answer_files(harness: ServiceHarness) -> httpx.Response:
    return await batch(harness, bash("l", "true", output_limit_bytes=600_000))


@passes("answer_wait_s", 1, 429)
async def _answer_wait(harness: ServiceHarness) -> httpx.Response:
    service = harness.application._edge.service
    assert service is not None
    service.dispatcher.response_budget.add_usage("alice", file_bytes=1 << 30)
    answer = await batch(harness, bash("l", "true", output_limit_bytes=100_000))
    assert answer.json()["limit"] == "answer_file_bytes"
    assert answer.headers["retry-after"]
    return answer


SILENT = {"answer_stall_s"}
"""Past it a connection is closed: its caller does not read, so nothing can be told to it."""


@pytest.mark.parametrize("name", [name for name in LIMITS if name not in SILENT])
async def test_a_limit_has_its_own_clear_error(name: str, tmp_path: Path) -> None:
    value, status, ask = PASSED[name]
    async with open_service_harness(tmp_path / "state", limits=Limits(**{name: value})) as harness:
        answer = await ask(harness)

        assert answer.status_code == status, answer.text
        assert f"`limits.{name}`" in answer.text
        assert str(value) in answer.text
        assert (await harness.http.get("/healthz")).status_code == 200


def test_every_limit_says_what_it_counts() -> None:
    assert set(PASSED) == set(LIMITS) - SILENT
    assert all(text_of(name) for name in LIMITS)
