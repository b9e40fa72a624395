"""Answers that nobody reads: the service's memory stays what it is, another tenant goes on, and what was answered is told again the same."""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from tests.support.service import SMALL_POOL, Service, running_service

TENANTS = [{"name": "hog", "token": "token-of-hog"}, {"name": "other", "token": "token-of-other"}]
LIMITS = {"answer_wait_s": 1, "answer_stall_s": 3, "answer_file_bytes": 400 << 20}
LARGE = 10 << 20
CALLS, BATCHES = 6, 8


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with running_service({"pools": {"default": {**SMALL_POOL, "max_sandboxes": 1}}, "tenants": TENANTS, "limits": LIMITS}) as running:
        yield running


def client(service: Service, tenant: str) -> httpx.Client:
    return httpx.Client(base_url=service.url, headers={"Authorization": f"Bearer token-of-{tenant}"}, timeout=60.0, trust_env=False)


def nuls(lease_id: str, **fields: Any) -> dict[str, Any]:
    return {"lease_id": lease_id, "tool": "bash", "args": {"command": f"head -c {LARGE} /dev/zero"}, "output_limit_bytes": LARGE, **fields}


@contextlib.contextmanager
def unread(service: Service, calls: list[dict[str, Any]]) -> Iterator[socket.socket]:
    """A request of the hog's whose answer is not read."""
    address, body = urlsplit(service.url), json.dumps({"calls": calls}).encode()
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(
            f"POST /v1/exec-batch HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer token-of-hog\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        )
        connection.settimeout(60.0)
        yield connection


def test_a_flood_of_unread_answers_costs_others_nothing(service: Service) -> None:
    process = psutil.Process(service.process.pid)
    with client(service, "hog") as hog, client(service, "other") as other, contextlib.ExitStack() as connections:
        leases = [lease["lease_id"] for lease in hog.post("/v1/acquire", json={"count": 3}).raise_for_status().json()["leases"]]
        mine = other.post("/v1/acquire", json={}).raise_for_status().json()["leases"][0]["lease_id"]
        other.post(f"/v1/leases/{mine}/exec", json={"command": "true"}).raise_for_status()
        before = peak = process.memory_info().rss
        calls = [nuls(leases[n % 3]) for n in range(CALLS)]
        sockets = [connections.enter_context(unread(service, calls)) for _ in range(BATCHES)]
        laps = []
        until = time.monotonic() + 4.0
        while time.monotonic() < until:
            began = time.monotonic()
            assert other.post(f"/v1/leases/{mine}/exec", json={"command": "true"}).raise_for_status().json()["success"]
            laps.append(time.monotonic() - began)
            peak = max(peak, process.memory_info().rss)

        assert peak - before < 64 << 20
        assert sorted(laps)[len(laps) * 9 // 10] < 1.0
        heads = [connection.recv(12) for connection in sockets]
        assert {bytes(head) for head in heads} == {b"HTTP/1.1 200", b"HTTP/1.1 429"}
        assert heads.count(b"HTTP/1.1 200") >= 3
        # Nobody reads them: they are cut off, and what they held is free again.
        answer = hog.post("/v1/exec-batch", json={"calls": [nuls(leases[0])] * 3})
        while answer.status_code == httpx.codes.TOO_MANY_REQUESTS:
            assert time.monotonic() < until + 60.0
            assert answer.json()["limit"] == "answer_file_bytes"
            answer = hog.post("/v1/exec-batch", json={"calls": [nuls(leases[0])] * 3})
        assert [len(result["output"]) for result in answer.json()["results"]] == [LARGE] * 3
        hog.post("/v1/release", json={"lease_ids": leases}).raise_for_status()


def test_a_large_result_is_told_again_the_same_every_way(service: Service) -> None:
    command = "seq 1 300000; head -c 300000 /dev/zero; printf '\\xff\\xc3'"
    with client(service, "hog") as http:
        (lease,) = http.post("/v1/acquire", json={}).raise_for_status().json()["leases"]
        call = {"lease_id": lease["lease_id"], "tool": "bash", "args": {"command": command}, "call_id": "c", "output_limit_bytes": LARGE}
        path = f"/v1/leases/{lease['lease_id']}"
        (first,) = http.post("/v1/exec-batch", json={"calls": [call]}).raise_for_status().json()["results"]
        lines = http.post("/v1/exec-batch", json={"calls": [call]}, headers={"Accept": "application/x-ndjson"}).raise_for_status()
        again = [
            json.loads(lines.text.strip()),
            http.post(f"{path}/exec", json={name: value for name, value in call.items() if name != "lease_id"}).raise_for_status().json(),
            http.get(f"{path}/calls/c").raise_for_status().json()["result"],
            http.post("/v1/cancel", json={"lease_id": lease["lease_id"], "call_id": "c"}).raise_for_status().json(),
        ]

        events = http.get(f"{path}/calls/c/events").raise_for_status().text
        again.append(json.loads(events.rpartition("data: ")[2]))
        whole = http.get(f"{path}/calls/c/output").raise_for_status().content
        assert first["output"].encode() == whole[:-2] + "\ufffd\ufffd".encode()
        assert hashlib.sha256(whole).hexdigest() == hashlib.sha256(b"".join(b"%d\n" % n for n in range(1, 300_001)) + b"\0" * 300_000 + b"\xff\xc3").hexdigest()
        assert again == [first] * len(again)
        assert len(list((service.state_dir / "outputs").iterdir())) == 1
        http.post("/v1/release", json={"lease_ids": [lease["lease_id"]]}).raise_for_status()
        deadline = time.monotonic() + 20.0
        while list((service.state_dir / "outputs").iterdir()):
            assert time.monotonic() < deadline, "the file of a lease that is over is still there"
            time.sleep(0.02)
