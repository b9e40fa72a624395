"""Every error code of the contract that this version can answer with, provoked over HTTP."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from sandbox_server.api.limits import Limits
from sandbox_server.api.problems import STATUS_OF
from sandbox_server.backends.base import CreateFailed
from sandbox_server.core.errors import StorageUnavailable
from sandbox_server.store.memory import MemoryStore
from sandbox_server.testing import settle
from tests.contract.contract import CONTRACT
from tests.support.service_harness import BOB, POOL, ServiceHarness, bash, bearer, open_service_harness

Provoke = Callable[[ServiceHarness], Awaitable[httpx.Response]]
PROVOKED: dict[str, Provoke] = {}
ELSEWHERE = {
    "internal": "test_a_bug_shows_a_request_id_and_no_insides",
    "backend_unavailable": "test_a_pool_that_cannot_make_sandboxes_says_why",
    "draining": "test_a_pool_that_is_going_gives_no_leases",
    "storage_unavailable": "test_a_disk_that_is_full_stops_new_leases",
}
"""Codes that need a harness of their own, and the test below that provokes them."""


def provokes(code: str) -> Callable[[Provoke], Provoke]:
    def register(provoke: Provoke) -> Provoke:
        PROVOKED[code] = provoke
        return provoke

    return register


@provokes("unauthorized")
async def _no_token(harness: ServiceHarness) -> httpx.Response:
    return await harness.http.get("/v1/pools", headers={"Authorization": "Bearer somebody-elses"})


@provokes("not_found")
async def _no_route(harness: ServiceHarness) -> httpx.Response:
    return await harness.http.get("/v1/nowhere")


@provokes("forbidden")
async def _no_admin(harness: ServiceHarness) -> httpx.Response:
    return await harness.http.delete("/v1/pools/default", headers=bearer(BOB))


@provokes("sandbox_not_found")
async def _no_sandbox(harness: ServiceHarness) -> httpx.Response:
    return await harness.http.post("/v1/sandboxes/nobodys/drain")


@provokes("pool_conflict")
async def _pool_of_the_file(harness: ServiceHarness) -> httpx.Response:
    return await harness.http.put("/v1/pools/default", json={"max_sandboxes": 2})


@provokes("pool_not_found")
async def _no_pool(harness: ServiceHarness) -> httpx.Response:
    return await harness.http.post("/v1/acquire", json={"pool": "nowhere"})


@provokes("lease_not_found")
async def _no_lease(harness: ServiceHarness) -> httpx.Response:
    return await harness.http.post("/v1/leases/nobodys/exec", json={"command": "true"})


@provokes("file_not_found")
async def _no_file(harness: ServiceHarness) -> httpx.Response:
    (lease_id,) = await harness.acquire()
    return await harness.http.get(f"/v1/leases/{lease_id}/files", params={"path": "missing"})


@provokes("call_not_found")
async def _no_call(harness: ServiceHarness) -> httpx.Response:
    (lease_id,) = await harness.acquire()
    return await harness.http.post("/v1/cancel", json={"lease_id": lease_id, "call_id": "missing"})


@provokes("method_not_allowed")
async def _wrong_method(harness: ServiceHarness) -> httpx.Response:
    return await harness.http.delete("/v1/acquire")


@provokes("call_conflict")
async def _key_used(harness: ServiceHarness) -> httpx.Response:
    await harness.acquire(1, request_key="k")
    return await harness.http.post("/v1/acquire", json={"count": 2, "request_key": "k"})


@provokes("file_error")
async def _fifo(harness: ServiceHarness) -> httpx.Response:
    (lease_id,) = await harness.acquire()
    return await harness.http.get(f"/v1/leases/{lease_id}/files", params={"path": "fifo"})


@provokes("lease_lost")
async def _released(harness: ServiceHarness) -> httpx.Response:
    (lease_id,) = await harness.acquire()
    await harness.http.post("/v1/release", json={"lease_ids": [lease_id]})
    return await harness.http.get(f"/v1/leases/{lease_id}")


@provokes("sandbox_lost")
async def _sandbox_died(harness: ServiceHarness) -> httpx.Response:
    (lease_id,) = await harness.acquire()
    harness.backend.kill(harness.agent.sandbox_id)
    await harness.batch(bash(lease_id, "true"))
    return await harness.http.post(f"/v1/leases/{lease_id}/exec", json={"command": "true", "call_id": "another"})


@provokes("payload_too_large")
async def _too_large(harness: ServiceHarness) -> httpx.Response:
    return await harness.http.post("/v1/acquire", content=b" " * (harness.settings.limits.body_bytes + 1))


@provokes("invalid_request")
async def _no_json(harness: ServiceHarness) -> httpx.Response:
    return await harness.http.post("/v1/acquire", content=b"{")


@provokes("quota_exceeded")
async def _too_many_calls(harness: ServiceHarness) -> httpx.Response:
    (lease_id,) = await harness.acquire()
    calls = [bash(lease_id, "true") for _ in range(harness.settings.limits.calls_in_flight + 1)]
    return await harness.http.post("/v1/exec-batch", json={"calls": calls})


@provokes("port_closed")
async def _nobody_listens(harness: ServiceHarness) -> httpx.Response:
    (lease_id,) = await harness.acquire()
    return await harness.http.get(f"/v1/leases/{lease_id}/ports/1/")


@provokes("not_implemented")
async def _not_built(harness: ServiceHarness) -> httpx.Response:
    return await harness.http.get("/")


@provokes("no_capacity")
async def _full(harness: ServiceHarness) -> httpx.Response:
    await harness.acquire(4)
    return await harness.http.post("/v1/acquire", json={"wait_s": 0})


@pytest.mark.parametrize("code", sorted(PROVOKED))
async def test_the_code_comes_as_a_problem_document(code: str, tmp_path: Path) -> None:
    async with open_service_harness(tmp_path / "state", limits=Limits(calls_in_flight=50, body_bytes=100_000)) as harness:
        answer = await PROVOKED[code](harness)

    check_problem(answer, code)


def check_problem(answer: httpx.Response, code: str) -> dict[str, Any]:
    """That an answer is the problem document of a code, in every point of the contract."""
    document: dict[str, Any] = answer.json()
    assert (answer.status_code, document["code"]) == (STATUS_OF[code], code)
    assert answer.headers["content-type"] == "application/problem+json"
    assert document["status"] == answer.status_code
    assert document["type"].endswith(code)
    assert document["title"]
    assert len(document["detail"]) > 10
    assert document["request_id"] == answer.headers["x-request-id"]
    assert ("retry-after" in answer.headers) == (answer.status_code in (429, 503))
    return document


def test_every_code_is_provoked() -> None:
    assert {**dict.fromkeys(PROVOKED), **ELSEWHERE}.keys() == CONTRACT["errors"].keys() == STATUS_OF.keys()
    assert not set(PROVOKED) & set(ELSEWHERE)
    assert set(ELSEWHERE.values()) <= set(globals())


async def test_no_capacity_says_where_in_the_queue_and_how_long(harness: ServiceHarness) -> None:
    await harness.acquire(4)

    document = (await harness.http.post("/v1/acquire", json={"wait_s": 0})).json()

    assert document["queue_position"] >= 1
    assert document["waited_s"] >= 0


async def test_a_refused_method_hears_what_is_allowed(harness: ServiceHarness) -> None:
    answer = await harness.http.patch("/v1/leases/l-1/files")

    assert answer.headers["allow"] == "GET, PUT"


async def test_a_file_error_names_the_errno(harness: ServiceHarness) -> None:
    assert (await _fifo(harness)).json()["errno"] == "EINVAL"


async def test_an_invalid_request_names_the_field(harness: ServiceHarness) -> None:
    assert (await harness.http.post("/v1/acquire", json={"count": 0})).json()["field"] == "count"


async def test_a_bug_shows_a_request_id_and_no_insides(harness: ServiceHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("the secret of the harness")

    await settle()
    monkeypatch.setattr(harness.agent.__class__, "hello", broken)
    service = harness.application._edge.service
    assert service is not None
    monkeypatch.setattr(service.pools, "views", broken)

    answer = await harness.http.get("/v1/pools", headers={"X-Request-ID": "find-me"})

    document = check_problem(answer, "internal")
    assert document["request_id"] == "find-me"
    assert "secret" not in answer.text
    assert "ZeroDivision" not in answer.text


async def test_a_pool_that_cannot_make_sandboxes_says_why(tmp_path: Path) -> None:
    async with open_service_harness(tmp_path / "state", pools={"default": replace(POOL, min_sandboxes=0)}) as harness:

        async def permanent(sandbox_id: str) -> None:
            raise CreateFailed("the image does not exist", permanent=True)

        harness.backend.before_agent = permanent  # type: ignore[method-assign]
        answer = await harness.http.post("/v1/acquire", json={})

        document = check_problem(answer, "backend_unavailable")
        assert "the image does not exist" in document["detail"]


async def test_a_pool_that_is_going_gives_no_leases(harness: ServiceHarness) -> None:
    assert (await harness.http.put("/v1/pools/mine", json={"slots_per_sandbox": 1, "max_sandboxes": 1})).status_code == 201
    await harness.acquire(pool="mine")
    assert (await harness.http.delete("/v1/pools/mine")).status_code == 202

    check_problem(await harness.http.post("/v1/acquire", json={"pool": "mine"}), "draining")


class FullDisk(MemoryStore):
    """A store whose disk is full as soon as it is told so."""

    is_full = False

    async def flush(self) -> None:
        if self.is_full:
            raise StorageUnavailable("the state cannot be written: no space left on device")


async def test_a_disk_that_is_full_stops_new_leases(tmp_path: Path) -> None:
    store = FullDisk()
    async with open_service_harness(tmp_path / "state", store=store) as harness:
        (lease_id,) = await harness.acquire()
        store.is_full = True
        acquired = await harness.http.post("/v1/acquire", json={})
        renewed = await harness.http.post("/v1/renew", json={"lease_ids": [lease_id]})
        released = await harness.http.post("/v1/release", json={"lease_ids": [lease_id]})
        store.is_full = False

    check_problem(acquired, "storage_unavailable")
    check_problem(renewed, "storage_unavailable")
    assert released.json() == {"released": [lease_id], "unknown": []}
