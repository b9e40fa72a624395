"""A run-batch whose client reads slowly: items wait, and the memory of the service stays bounded."""

from __future__ import annotations

import json
import socket
from urllib.parse import urlsplit

import httpx
import psutil

from tests.integration.run_batch.requests import NDJSON, leases_of, lines, program, wait_for
from tests.support.service import Service

LARGE = 1 << 20
COUNT = 40
COMMAND = f"head -c {LARGE} /dev/zero | tr '\\0' x"


def test_items_wait_for_a_client_that_reads_nothing(service: Service, http: httpx.Client) -> None:
    process, address = psutil.Process(service.process.pid), urlsplit(service.url)
    with lines(http, [program(COMMAND, output_limit_bytes=LARGE)] * 2) as results:  # what the first of them loads is not counted
        assert len(list(results)) == 2
    before = process.memory_info().rss
    items = [program(COMMAND, output_limit_bytes=LARGE) for _ in range(COUNT)]
    body = "".join(json.dumps(line) + "\n" for line in ({"run_id": "unread"}, *items)).encode()
    head = f"POST /v1/run-batch HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {service.token}\r\nContent-Length: {len(body)}\r\n"
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(f"{head}Content-Type: {NDJSON}\r\nAccept: {NDJSON}\r\nConnection: close\r\n\r\n".encode() + body)
        wait_for(lambda: bool(leases_of(http, "unread")), "items run")
        idle_count = 0

        def is_paused() -> bool:
            nonlocal idle_count
            idle_count = 0 if leases_of(http, "unread") else idle_count + 1
            return idle_count == 5

        wait_for(is_paused, "no item runs any more")
        growth = process.memory_info().rss - before
        received_bytes = lines_received = 0
        while chunk := connection.recv(1 << 20):
            received_bytes += len(chunk)
            lines_received += chunk.count(b'{"index":')
            growth = max(growth, process.memory_info().rss - before)

    assert received_bytes > COUNT * LARGE
    assert lines_received == COUNT
    assert growth < 24 << 20
