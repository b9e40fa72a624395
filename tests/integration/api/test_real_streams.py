"""Streams of real calls in real slots: output as it comes, the whole of it afterwards, and the memory that takes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from tests.support.service import Service

EVENTS = {"Accept": "text/event-stream"}
MAY_GROW_BYTES = 48 << 20
BIG_BYTES = 4 * MAY_GROW_BYTES + (8 << 20)
"""More than four times what the memory of the service may grow by."""
UPLOAD_BYTES = 5 * MAY_GROW_BYTES + (16 << 20)
"""More than five times as much, because some of an upload is in the buffers of the kernel."""
LOOK_EVERY = 32
"""A look at the memory after so many chunks of at most 64 KiB: they are far less than what it may grow by."""


@pytest.fixture
def http(service: Service) -> Iterator[httpx.Client]:
    with service.http() as client:
        yield client


@pytest.fixture
def lease_id(http: httpx.Client) -> Iterator[str]:
    held: str = http.post("/v1/acquire", json={}).json()["leases"][0]["lease_id"]
    yield held
    http.post("/v1/release", json={"lease_ids": [held]})


def events(answer: httpx.Response) -> Iterator[tuple[str, dict[str, Any], str | None]]:
    fields: dict[str, str] = {}
    for line in answer.iter_lines():
        if not line and fields:
            yield fields["event"], json.loads(fields["data"]), fields.get("id")
            fields = {}
        elif line and not line.startswith(":"):
            name, _, value = line.partition(": ")
            fields[name] = value


def test_output_comes_as_it_is_written(http: httpx.Client, lease_id: str) -> None:
    call = {"command": "echo first; until test -e go; do sleep 0.02; done; echo second; exit 9", "call_id": "c"}
    with http.stream("POST", f"/v1/leases/{lease_id}/exec", json=call, headers=EVENTS) as answer:
        found = events(answer)
        first = next(found)
        http.put(f"/v1/leases/{lease_id}/files", params={"path": "go"}, content=b"").raise_for_status()
        rest = list(found)

    assert first == ("output", {"data": "first\n"}, "6")
    assert rest[0] == ("output", {"data": "second\n"}, "13")
    assert (rest[1][0], rest[1][1]["exit_code"], rest[1][1]["output"]) == ("result", 9, "first\nsecond\n")
    with http.stream("GET", f"/v1/leases/{lease_id}/calls/c/events", headers={"Last-Event-ID": "6"}) as again:
        assert list(events(again)) == rest


def test_a_call_is_waited_for(http: httpx.Client, lease_id: str) -> None:
    url, command = f"/v1/leases/{lease_id}/calls/c", "echo a; until test -e go; do sleep 0.02; done; echo b"
    with http.stream("POST", f"/v1/leases/{lease_id}/exec", json={"command": command, "call_id": "c"}, headers=EVENTS) as answer:
        assert next(events(answer))[0] == "output"
    running = http.get(url).json()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(http.get, url, params={"wait_s": 30})
        with pytest.raises(TimeoutError):
            waiting.result(0.1)
        http.put(f"/v1/leases/{lease_id}/files", params={"path": "go"}, content=b"").raise_for_status()
        done = waiting.result(30).json()

    assert (running["state"], running["output_bytes"]) == ("running", 2)
    assert running["started_at"] == pytest.approx(time.time(), abs=30)
    assert (done["state"], done["result"]["output"]) == ("done", "a\nb\n")


def test_the_whole_of_a_large_output_costs_the_service_no_memory(service: Service, http: httpx.Client, lease_id: str) -> None:
    process = psutil.Process(service.process.pid)
    before = process.memory_info().rss
    call = {"command": f"head -c {BIG_BYTES} /dev/zero", "call_id": "c", "output_limit_bytes": 1000}
    result = http.post(f"/v1/leases/{lease_id}/exec", json=call).json()
    seen_bytes, most = 0, 0
    with http.stream("GET", f"/v1/leases/{lease_id}/calls/c/output") as answer:
        for number, chunk in enumerate(answer.iter_raw()):
            seen_bytes += len(chunk)
            if number % LOOK_EVERY == 0:
                most = max(most, process.memory_info().rss)

    assert (result["truncated"], result["output_bytes"], seen_bytes) == (True, BIG_BYTES, BIG_BYTES)
    assert most - before < MAY_GROW_BYTES


def test_figures_are_those_of_the_slots(http: httpx.Client, lease_id: str) -> None:
    http.post(f"/v1/leases/{lease_id}/exec", json={"command": "true"})
    lines = http.get("/metrics").text.splitlines()

    told = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}
    assert told['sandbox_slots{pool="default",state="leased"}'] >= 1
    assert told['sandbox_exec_total{fault="none",pool="default",reason="exit",tool="bash"}'] >= 1
    assert told["sandbox_exec_overhead_seconds_count"] >= 1


def test_much_goes_in_and_comes_out_and_the_services_memory_stays_flat(service: Service, http: httpx.Client, lease_id: str) -> None:
    process = psutil.Process(service.process.pid)
    before = most = process.memory_info().rss
    piece = bytes(1 << 20)

    def content() -> Iterator[bytes]:
        nonlocal most
        for _ in range(UPLOAD_BYTES // len(piece)):
            most = max(most, process.memory_info().rss)
            yield piece

    url = f"/v1/leases/{lease_id}/files"
    http.put(url, params={"path": "big"}, content=content()).raise_for_status()
    measured = http.post(f"/v1/leases/{lease_id}/exec", json={"command": f"stat -c %s big; truncate -s {BIG_BYTES} big"}).json()
    seen_bytes = 0
    with http.stream("GET", url, params={"path": "big"}) as answer:
        for number, chunk in enumerate(answer.iter_raw()):
            seen_bytes += len(chunk)
            if number % LOOK_EVERY == 0:
                most = max(most, process.memory_info().rss)

    assert measured["output"] == f"{UPLOAD_BYTES}\n"
    assert seen_bytes == BIG_BYTES
    assert most - before < MAY_GROW_BYTES
