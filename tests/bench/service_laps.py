"""Timed requests to the service: a real process, reached over one kept-alive HTTP connection, as any program could reach it."""

from __future__ import annotations

import http.client
import json
import statistics
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import psutil

from env_client import SandboxClient
from tests.support.service import Service

WARM_UP_LAPS = 3
ONE_CALL_LAPS = 40
BATCH_CALLS, BATCH_LEASES, BATCH_LAPS = 256, 64, 2
ACQUIRE_LAPS = 32
RELEASE_LAPS = 8
TRUE = {"tool": "bash", "args": {"command": "true"}}


class ServiceConnection:
    """One connection to the service.

    Args:
        service: the running service.
    """

    def __init__(self, service: Service) -> None:
        address = urlsplit(service.url)
        self._connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
        self._headers = {**service.headers, "Content-Type": "application/json"}

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send a POST request and return the body of the response.

        Raises:
            RuntimeError: the status is not 200.
        """
        return self._request("POST", path, json.dumps(body))

    def get(self, path: str) -> dict[str, Any]:
        """Send a GET request and return the body of the response.

        Raises:
            RuntimeError: the status is not 200.
        """
        return self._request("GET", path, None)

    def _request(self, method: str, path: str, body: str | None) -> dict[str, Any]:
        self._connection.request(method, path, body, self._headers)
        response = self._connection.getresponse()
        raw = response.read()
        if response.status != http.client.OK:
            raise RuntimeError(f"{method} {path}: {response.status} {raw!r}")
        value: dict[str, Any] = json.loads(raw)
        return value

    def acquire(self, count: int = 1, pool: str = "default") -> list[str]:
        """Acquire slots and return the lease ids."""
        return [lease["lease_id"] for lease in self.post("/v1/acquire", {"pool": pool, "count": count, "ttl_s": 600})["leases"]]

    def release(self, lease_ids: list[str]) -> None:
        """Release leases."""
        self.post("/v1/release", {"lease_ids": lease_ids})

    def exec_batch(self, lease_ids: list[str]) -> None:
        """Run `bash -c true` once for each id in the list, in one request.

        Raises:
            RuntimeError: a call did not succeed.
        """
        results = self.post("/v1/exec-batch", {"calls": [{"lease_id": lease_id, **TRUE} for lease_id in lease_ids]})["results"]
        failed = [result for result in results if not result["success"]]
        if failed:
            raise RuntimeError(f"{len(failed)} calls did not succeed, the first: {failed[0]}")

    def wait_until_ready(self, slots: int, pool: str = "default") -> None:
        """Wait until so many slots of a pool are ready."""
        while self.get(f"/v1/pools/{pool}")["slots"]["ready"] < slots:
            time.sleep(0.02)  # the service offers no event for "this many slots are ready"


def lap_s(call: Callable[[], object]) -> float:
    """Return how long one call takes, in seconds."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def p50_s(call: Callable[[], object], laps: int) -> float:
    """Return the median time of a call, in seconds, after a few laps that do not count."""
    for _ in range(WARM_UP_LAPS):
        call()
    return statistics.median(lap_s(call) for _ in range(laps))


def one_call_s(connection: ServiceConnection, lease_ids: list[str]) -> float:
    """Return the median time of one tool call over plain HTTP, in seconds, with one call at a time."""
    return p50_s(lambda: connection.exec_batch(lease_ids[:1]), ONE_CALL_LAPS)


def one_client_call_s(service: Service) -> float:
    """Return the median time of one tool call through the client library, in seconds, with one call at a time."""
    with SandboxClient(service.url, token=service.token) as client, client.lease() as lease:
        return p50_s(lambda: lease.bash("true"), ONE_CALL_LAPS)


def batch_rate(connection: ServiceConnection, lease_ids: list[str]) -> float:
    """Return the number of calls per second of one exec-batch over these leases."""
    calls = lease_ids * (BATCH_CALLS // len(lease_ids))
    return BATCH_CALLS / statistics.median(lap_s(lambda: connection.exec_batch(calls)) for _ in range(BATCH_LAPS))


def acquire_s(connection: ServiceConnection) -> float:
    """Return the median time of an acquire of a slot that is ready, in seconds."""
    lease_ids: list[str] = []
    laps_s = [lap_s(lambda: lease_ids.extend(connection.acquire())) for _ in range(ACQUIRE_LAPS)]
    connection.release(lease_ids)
    return statistics.median(laps_s)


def release_to_acquire_s(connection: ServiceConnection, pool: str, slots: int) -> float:
    """Return the median time from the release of the only free slot of a pool until it is leased again, in seconds. The slot is used in between.

    Args:
        connection: to the service.
        pool: its name; nobody else uses it.
        slots: how many slots the pool has.
    """
    other_leases, lease_ids = connection.acquire(slots - 1, pool), connection.acquire(1, pool)

    def release_and_acquire() -> None:
        nonlocal lease_ids
        connection.release(lease_ids)
        lease_ids = connection.acquire(1, pool)

    laps_s = []
    for _ in range(RELEASE_LAPS):
        connection.exec_batch(lease_ids)
        laps_s.append(lap_s(release_and_acquire))
    connection.release([*other_leases, *lease_ids])
    connection.wait_until_ready(slots, pool)
    return statistics.median(laps_s)


def idle_bytes(service: Service, slots: int) -> tuple[float, float]:
    """Return the memory of one idle slot and of one agent, in bytes.

    Both are proportional shares (PSS): of all processes that the agents started, and of the agents themselves.

    Raises:
        psutil.AccessDenied: an ordinary user may not read the memory of a slot's init; root may.
    """
    agents = psutil.Process(service.process.pid).children()
    slot_processes = [process for agent in agents for process in agent.children(recursive=True)]
    slot_bytes = sum(process.memory_full_info().pss for process in slot_processes) / slots
    return slot_bytes, sum(process.memory_full_info().pss for process in agents) / len(agents)
