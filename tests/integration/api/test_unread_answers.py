"""Answers that nobody reads, bodies that nobody ends: memory stays what it is, another tenant goes on, what was answered is told again the same."""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPResponse
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from tests.support.service import SMALL_POOL, Service, running_service

TENANTS = [{"name": "hog", "token": "token-of-hog"}, {"name": "other", "token": "token-of-other"}]
LIMITS = {
    "answer_wait_s": 1, "answer_stall_s": 2, "answer_file_bytes": 240 << 20, "answer_memory_bytes": 16 << 20,
    "body_memory_bytes": 64 << 20, "body_wait_s": 1, "body_stall_s": 2,
}  # fmt: skip
LARGE = 6 << 20
CALLS, BATCHES = 6, 8
"""The answers of all batches have 288 MiB: more than four times what the service's memory may grow by, and more than twice what the tenant may have."""


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with running_service({"pools": {"default": {**SMALL_POOL, "max_sandboxes": 1}}, "tenants": TENANTS, "limits": LIMITS}) as running:
        yield running


def client(service: Service, tenant: str) -> httpx.Client:
    return httpx.Client(base_url=service.url, headers={"Authorization": f"Bearer token-of-{tenant}"}, timeout=60.0, trust_env=False, verify=False)


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
        until = time.monotonic() + 2.5
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


def unread_get(service: Service, path: str) -> socket.socket:
    """A request of the hog's for something that it does not read."""
    address = urlsplit(service.url)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((address.hostname, address.port))
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer token-of-hog\r\n\r\n".encode())
    return connection


def test_looking_at_large_results_without_reading_them_takes_a_share_of_memory_and_no_files(service: Service) -> None:
    process, outputs = psutil.Process(service.process.pid), service.state_dir / "outputs"
    with client(service, "hog") as hog, client(service, "other") as other, contextlib.ExitStack() as connections:
        leases = [lease["lease_id"] for lease in hog.post("/v1/acquire", json={"count": 2}).raise_for_status().json()["leases"]]
        mine = other.post("/v1/acquire", json={}).raise_for_status().json()["leases"][0]["lease_id"]
        hog.post("/v1/exec-batch", json={"calls": [nuls(leases[0], call_id="done")]}).raise_for_status()
        files_before, before = len(list(outputs.iterdir())), process.memory_info().rss
        slow = nuls(leases[1], call_id="slow", args={"command": f"sleep 1; head -c {LARGE} /dev/zero"})
        connections.enter_context(unread(service, [slow]))
        while hog.get(f"/v1/leases/{leases[1]}/calls/slow").status_code != httpx.codes.OK:
            pass
        for _ in range(15):
            connections.enter_context(contextlib.closing(unread_get(service, f"/v1/leases/{leases[1]}/calls/slow?wait_s=20")))
            connections.enter_context(contextlib.closing(unread_get(service, f"/v1/leases/{leases[0]}/calls/done/events?offset={LARGE}")))
        looking = [connections.enter_context(contextlib.closing(unread_get(service, f"/v1/leases/{leases[0]}/calls/done"))) for _ in range(400)]
        deadline = time.monotonic() + 30.0
        while hog.get(f"/v1/leases/{leases[1]}/calls/slow", params={"wait_s": 1}).status_code == httpx.codes.OK:
            assert time.monotonic() < deadline, "nothing is refused"

        assert process.memory_info().rss - before < 80 << 20
        assert len(list(outputs.iterdir())) - files_before == 1
        assert other.post(f"/v1/leases/{mine}/exec", json={"command": "true"}).raise_for_status().json()["success"]
        looking[-1].settimeout(30.0)
        assert looking[-1].recv(12) == b"HTTP/1.1 429"
        connections.close()
        for tenant, held in ((hog, leases), (other, [mine])):
            tenant.post("/v1/release", json={"lease_ids": held}).raise_for_status()


BODY = 8 << 20


def unfinished(service: Service) -> socket.socket:
    """A request of the hog's of which the last byte of the body is not sent; as much of the others as is taken."""
    address = urlsplit(service.url)
    connection = socket.create_connection((address.hostname, address.port))
    connection.settimeout(0.2)
    with contextlib.suppress(OSError):
        connection.sendall(f"POST /v1/exec-batch HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer token-of-hog\r\nContent-Length: {BODY}\r\n\r\n".encode())
        connection.sendall(b" " * (BODY - 1))
    return connection


def read_answer(connection: socket.socket) -> bytes:
    """The body of a response, after which the service keeps the connection for 5 s; empty if it reset the connection, as after the refusal of a body
    that is still being sent."""
    connection.settimeout(30.0)
    with contextlib.suppress(ConnectionResetError), contextlib.closing(HTTPResponse(connection)) as response:
        response.begin()
        return response.read()
    return b""


def test_a_flood_of_unfinished_bodies_costs_others_nothing(service: Service) -> None:
    process = psutil.Process(service.process.pid)
    with client(service, "hog") as hog, client(service, "other") as other, contextlib.ExitStack() as connections:
        before = process.memory_info().rss
        with ThreadPoolExecutor(24) as threads:
            held = [connections.enter_context(contextlib.closing(made)) for made in threads.map(unfinished, [service] * 24)]

        assert process.memory_info().rss - before < 100 << 20
        assert other.post("/v1/release", json={"lease_ids": [], "run_id": "x" * 100_000}).status_code != httpx.codes.TOO_MANY_REQUESTS
        large = {"calls": [{"lease_id": "l", "tool": "bash", "args": {"command": "x" * (4 << 20)}}]}
        assert other.post("/v1/exec-batch", json=large).raise_for_status().json()["results"][0]["reason"] == "lease_lost"
        # What is never ended is cut off, and what it held is free again.
        assert any(b"body_stall_s" in read_answer(connection) for connection in held)
        deadline = time.monotonic() + 30.0
        while (answer := hog.post("/v1/exec-batch", json=large)).status_code == httpx.codes.TOO_MANY_REQUESTS:
            assert answer.json()["limit"] == "body_memory_bytes"
            assert time.monotonic() < deadline
        assert answer.raise_for_status().json()["results"][0]["reason"] == "lease_lost"


def test_calls_hold_the_room_of_their_body_until_they_have_their_results(service: Service) -> None:
    with client(service, "hog") as hog, contextlib.ExitStack() as connections:
        (lease,) = hog.post("/v1/acquire", json={}).raise_for_status().json()["leases"]
        padded = {"lease_id": lease["lease_id"], "tool": "bash", "args": {"command": "sleep 60 #" + "x" * (900 << 10)}}
        call = {"lease_id": lease["lease_id"], "tool": "bash", "args": {"command": "true #" + "x" * (900 << 10)}}
        for _ in range(2):  # of the 32 MiB of a tenant
            connections.enter_context(unread(service, [padded] * 15))
        answer = hog.post("/v1/exec-batch", json={"calls": [call] * 10})
        deadline = time.monotonic() + 30.0
        while answer.status_code == httpx.codes.OK:
            assert time.monotonic() < deadline
            answer = hog.post("/v1/exec-batch", json={"calls": [call] * 10})

        assert (answer.status_code, answer.json()["limit"]) == (429, "body_memory_bytes")
        hog.post("/v1/release", json={"lease_ids": [lease["lease_id"]]}).raise_for_status()
        while hog.post("/v1/exec-batch", json={"calls": [call] * 10}).status_code == httpx.codes.TOO_MANY_REQUESTS:
            assert time.monotonic() < deadline


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
