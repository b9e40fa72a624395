"""Every route of the contract, asked for real: its status, its members, its media type."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import zipfile
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from sandbox_server.core.execution import FAULTS_OF, NOT_RECORDED
from sandbox_server.telemetry import METRICS, TOOLS
from tests.contract.contract import BUILT, CONTRACT, SAMPLE_OF_ANY, WAITING, members, named
from tests.support.scripted_agent import RECORDING
from tests.support.service_harness import ServiceHarness, bash

Ask = Callable[[ServiceHarness], Awaitable[httpx.Response]]
ASKED: dict[str, Ask] = {}
POOL_OF_ONE = {"slots_per_sandbox": 1, "min_sandboxes": 0, "max_sandboxes": 1}


def asks(name: str) -> Callable[[Ask], Ask]:
    def register(ask: Ask) -> Ask:
        ASKED[name] = ask
        return ask

    return register


async def first_event(harness: ServiceHarness, url: str, **options: Any) -> httpx.Response:
    """The start of an event stream, with its first event read."""
    async with harness.http.stream(options.pop("method", "GET"), url, **options) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data:"):
                json.loads(line.removeprefix("data:"))
                break
        return answer


async def a_call(harness: ServiceHarness) -> str:
    (lease_id,) = await harness.acquire()
    await harness.batch(bash(lease_id, "echo hi", call_id="c"))
    return f"/v1/leases/{lease_id}/calls/c"


@asks("POST /v1/acquire")
async def _acquire(harness: ServiceHarness) -> httpx.Response:
    return await harness.http.post("/v1/acquire", json={})


@asks("POST /v1/exec-batch")
async def _batch(harness: ServiceHarness) -> httpx.Response:
    (lease_id,) = await harness.acquire()
    return await harness.http.post("/v1/exec-batch", json={"calls": [bash(lease_id, "true")]})


@asks("POST /v1/run-batch")
async def _run_batch(harness: ServiceHarness) -> httpx.Response:
    return await harness.http.post("/v1/run-batch", json={"items": [{"tool": "bash", "args": {"command": "true"}}]})


@asks("POST /v1/release")
async def _release(harness: ServiceHarness) -> httpx.Response:
    return await harness.http.post("/v1/release", json={"lease_ids": await harness.acquire()})


@asks("POST /v1/renew")
async def _renew(harness: ServiceHarness) -> httpx.Response:
    return await harness.http.post("/v1/renew", json={"lease_ids": await harness.acquire()})


@asks("POST /v1/cancel")
async def _cancel(harness: ServiceHarness) -> httpx.Response:
    (lease_id,) = await harness.acquire()
    await harness.batch(bash(lease_id, "true", call_id="c"))
    return await harness.http.post("/v1/cancel", json={"lease_id": lease_id, "call_id": "c"})


@asks("POST /v1/leases/{}/narrow")
async def _narrow(harness: ServiceHarness) -> httpx.Response:
    (lease_id,) = await harness.acquire()
    answer = await harness.http.post(f"/v1/leases/{lease_id}/narrow", json={"allow_network": False, "cache": "none"})
    assert (answer.json().get("allow_network"), answer.json().get("cache")) == (False, "none"), answer.text
    return answer


@asks("GET /v1/leases")
async def _leases(harness: ServiceHarness) -> httpx.Response:
    await harness.acquire()
    return await harness.http.get("/v1/leases")


@asks("GET /v1/leases/{}")
async def _lease(harness: ServiceHarness) -> httpx.Response:
    return await harness.http.get(f"/v1/leases/{(await harness.acquire())[0]}")


@asks("POST /v1/leases/{}/exec")
async def _exec(harness: ServiceHarness) -> httpx.Response:
    return await harness.http.post(f"/v1/leases/{(await harness.acquire())[0]}/exec", json={"command": "true"})


@asks("GET /v1/leases/{}/calls/{}")
async def _call(harness: ServiceHarness) -> httpx.Response:
    answer = await harness.http.get(await a_call(harness), params={"wait_s": "0.5"})
    assert members("result") <= set(answer.json()["result"])
    return answer


@asks("GET /v1/leases/{}/calls/{}/events")
async def _events_of_call(harness: ServiceHarness) -> httpx.Response:
    return await first_event(harness, f"{await a_call(harness)}/events", params={"offset": "1"})


@asks("GET /v1/leases/{}/calls/{}/output")
async def _output(harness: ServiceHarness) -> httpx.Response:
    answer = await harness.http.get(f"{await a_call(harness)}/output", params={"offset": "1"})
    assert answer.content == b"i\n"
    return answer


@asks("PUT /v1/leases/{}/files")
async def _put_file(harness: ServiceHarness) -> httpx.Response:
    return await harness.http.put(f"/v1/leases/{(await harness.acquire())[0]}/files", params={"path": "a", "mode": "0600"}, content=b"a")


@asks("GET /v1/leases/{}/files")
async def _get_file(harness: ServiceHarness) -> httpx.Response:
    url = str((await _put_file(harness)).request.url.copy_with(query=None))
    return await harness.http.get(url, params={"path": "a"})


@asks("GET /v1/leases/{}/files/list")
async def _list_files(harness: ServiceHarness) -> httpx.Response:
    url = str((await _put_file(harness)).request.url.copy_with(query=None))
    answer = await harness.http.get(f"{url}/list", params={"path": ".", "recursive": "1"})
    assert set(answer.json()["entries"][0]) >= members("entry")
    return answer


def a_tree() -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tree:
        tree.addfile(tarfile.TarInfo("a"))
    return packed.getvalue()


@asks("PUT /v1/leases/{}/archive")
async def _put_archive(harness: ServiceHarness) -> httpx.Response:
    return await harness.http.put(f"/v1/leases/{(await harness.acquire())[0]}/archive", params={"path": "t"}, content=a_tree())


@asks("GET /v1/leases/{}/archive")
async def _get_archive(harness: ServiceHarness) -> httpx.Response:
    url = str((await _put_archive(harness)).request.url.copy_with(query=None))
    answer = await harness.http.get(url, params={"path": "t"})
    assert gzip.decompress(answer.content)
    return answer


def uses_port(method: str) -> Ask:
    async def use_port(harness: ServiceHarness) -> httpx.Response:
        answer = await harness.http.request(method, f"/v1/leases/{(await harness.acquire())[0]}/ports/8000/a/b")
        assert answer.text == "hi\n"
        assert answer.headers["content-security-policy"] == "sandbox"
        return answer

    return use_port


for _method in SAMPLE_OF_ANY:
    asks(f"{_method} /v1/leases/{{}}/ports/{{}}/{{}}")(uses_port(_method))


@asks("GET /v1/leases/{}/recordings/{}")
async def _recording(harness: ServiceHarness) -> httpx.Response:
    url = f"/v1/leases/{(await harness.acquire())[0]}/recordings"
    missing = await harness.http.get(f"{url}/other.cast")
    assert (missing.status_code, missing.json()["code"]) == (404, "file_not_found")
    answer = await harness.http.get(f"{url}/terminal.cast")
    assert (answer.content, answer.headers["content-length"]) == (RECORDING, str(len(RECORDING)))
    return answer


@asks("GET /v1/pools")
async def _pools(harness: ServiceHarness) -> httpx.Response:
    return await harness.http.get("/v1/pools")


@asks("GET /v1/pools/{}")
async def _pool(harness: ServiceHarness) -> httpx.Response:
    answer = await harness.http.get("/v1/pools/default")
    pool = answer.json()
    assert set(pool["spec"]) == set(CONTRACT["bodies"]["spec"])
    assert (set(pool["slots"]), set(pool["sandboxes"])) == (set(CONTRACT["shapes"]["pool_slots"]), set(CONTRACT["shapes"]["pool_sandboxes"]))
    return answer


@asks("PUT /v1/pools/{}")
async def _put_pool(harness: ServiceHarness) -> httpx.Response:
    answer = await harness.http.put("/v1/pools/mine", json=POOL_OF_ONE)
    assert answer.json()["origin"] == "api"
    return answer


@asks("DELETE /v1/pools/{}")
async def _delete_pool(harness: ServiceHarness) -> httpx.Response:
    await _put_pool(harness)
    return await harness.http.delete("/v1/pools/mine", params={"force": "1"})


@asks("POST /v1/pools/{}/verify")
async def _verify(harness: ServiceHarness) -> httpx.Response:
    await harness.acquire(3)
    return await harness.http.post("/v1/pools/default/verify")


@asks("GET /v1/sandboxes")
async def _sandboxes(harness: ServiceHarness) -> httpx.Response:
    await harness.acquire()
    answer = await harness.http.get("/v1/sandboxes")
    assert answer.json()["sandboxes"][0]["pool"] == "default"
    return answer


@asks("POST /v1/sandboxes/{}/drain")
async def _drain(harness: ServiceHarness) -> httpx.Response:
    await harness.acquire()
    sandbox_id = (await harness.http.get("/v1/sandboxes")).json()["sandboxes"][0]["sandbox_id"]
    answer = await harness.http.post(f"/v1/sandboxes/{sandbox_id}/drain")
    assert (answer.json()["sandbox_id"], answer.json()["state"]) == (sandbox_id, "draining")
    return answer


@asks("GET /v1/events")
async def _events(harness: ServiceHarness) -> httpx.Response:
    async with harness.http.stream("GET", "/v1/events") as answer:
        (lease_id,) = await harness.acquire()
        async for line in answer.aiter_lines():
            if line.startswith("data:") and json.loads(line.removeprefix("data:")).get("lease_id") == lease_id:
                break
        return answer


@asks("GET /healthz")
async def _healthz(harness: ServiceHarness) -> httpx.Response:
    return await harness.http.get("/healthz")


@asks("GET /readyz")
async def _readyz(harness: ServiceHarness) -> httpx.Response:
    await harness.acquire()
    return await harness.http.get("/readyz", params={"pool": "default"})


@asks("GET /metrics")
async def _metrics(harness: ServiceHarness) -> httpx.Response:
    await _batch(harness)
    answer = await harness.http.get("/metrics")
    told = {line.split()[2] for line in answer.text.splitlines() if line.startswith("# TYPE")}
    assert told == set(CONTRACT["figures"]) == set(METRICS)
    assert 'sandbox_slots{pool="default",state="leased"} 1.0' in answer.text
    assert 'sandbox_exec_total{fault="none",pool="default",reason="exit",tool="bash"} 1.0' in answer.text
    return answer


@asks("GET /docs")
async def _docs(harness: ServiceHarness) -> httpx.Response:
    answer = await harness.http.get("/docs", headers={"Authorization": ""})
    assert "script-src 'unsafe-inline'" in answer.headers["content-security-policy"]
    assert "http://" not in answer.text.replace("http://www.w3.org", "")
    return answer


@asks("GET /v1/agent.pyz")
async def _agent(harness: ServiceHarness) -> httpx.Response:
    answer = await harness.http.get("/v1/agent.pyz", headers={"Authorization": ""})
    assert "__main__.py" in zipfile.ZipFile(io.BytesIO(answer.content)).namelist()
    return answer


@pytest.mark.parametrize("route", BUILT, ids=named)
async def test_a_route_answers_as_the_contract_says(port: ServiceHarness, route: dict[str, Any]) -> None:
    answer = await ASKED[named(route)](port)

    assert answer.status_code == route["status"]
    assert "x-request-id" in answer.headers
    if "media" in route:
        assert answer.headers["content-type"].split(";")[0] == route["media"]
    if "answer" in route:
        assert answer.headers["content-type"] == "application/json"
        assert members(route["answer"]) <= set(answer.json())
    if route["status"] == 204:
        assert answer.content == b""


def test_every_route_that_does_not_wait_is_asked() -> None:
    assert set(ASKED) == {named(route) for route in BUILT}
    assert {named(route): route["waits"] for route in WAITING} == {"GET /": "the page"}


def test_faults_and_records_are_the_contracts() -> None:
    assert {str(reason): [str(fault) for fault in faults] for reason, faults in FAULTS_OF.items()} == CONTRACT["reasons"]
    assert {str(reason) for reason in NOT_RECORDED} == set(CONTRACT["not_recorded"])


def test_the_tools_are_the_contracts() -> None:
    assert set(CONTRACT["tools"]) == TOOLS
