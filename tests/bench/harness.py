"""The service under measurement: a real process, spoken to over one kept-alive HTTP connection, as any program could."""

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

CALL_ROUNDS, CALL_LAPS = 4, 100
BATCH_CALLS, BATCH_LEASES, BATCH_LAPS = 256, 64, 4
ACQUIRE_LAPS, ACQUIRE_ROUNDS = 48, 4
RELEASE_LAPS = 60
TRUE = {"tool": "bash", "args": {"command": "true"}}


class Wire:
    """One connection to the service."""

    def __init__(self, service: Service) -> None:
        address = urlsplit(service.url)
        self._connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
        self._headers = {**service.headers, "Content-Type": "application/json"}

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return its answer; anything but 200 raises."""
        return self._ask("POST", path, json.dumps(body))

    def get(self, path: str) -> dict[str, Any]:
        """Ask for a value."""
        return self._ask("GET", path, None)

    def _ask(self, method: str, path: str, body: str | None) -> dict[str, Any]:
        self._connection.request(method, path, body, self._headers)
        response = self._connection.getresponse()
        raw = response.read()
        if response.status != http.client.OK:
            raise RuntimeError(f"{method} {path}: {response.status} {raw!r}")
        value: dict[str, Any] = json.loads(raw)
        return value

    def acquire(self, count: int = 1, pool: str = "default") -> list[str]:
        """Lease ids of so many slots."""
        return [lease["lease_id"] for lease in self.post("/v1/acquire", {"pool": pool, "count": count, "ttl_s": 600})["leases"]]

    def release(self, lease_ids: list[str]) -> None:
        """Give slots back."""
        self.post("/v1/release", {"lease_ids": lease_ids})

    def batch(self, lease_ids: list[str]) -> None:
        """`bash -c true` once for each id given, in one request; raises if one does not succeed."""
        results = self.post("/v1/exec-batch", {"calls": [{"lease_id": lease_id, **TRUE} for lease_id in lease_ids]})["results"]
        wrong = [result for result in results if not result["success"]]
        if wrong:
            raise RuntimeError(f"{len(wrong)} calls did not succeed, the first: {wrong[0]}")

    def settle(self, pool: str = "default") -> None:
        """Wait until every slot of a pool that is not leased is ready."""
        while (view := self.get(f"/v1/pools/{pool}"))["slots"]["resetting"] or view["sandboxes"]["starting"]:
            time.sleep(0.05)


def lap_s(call: Callable[[], object]) -> float:
    """How long a call takes."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def p50_s(call: Callable[[], object], laps: int) -> float:
    """The median of so many calls, after a few that do not count."""
    for _ in range(max(3, laps // 20)):
        call()
    return statistics.median(lap_s(call) for _ in range(laps))


def one_call_s(wire: Wire, between: Callable[[], None]) -> float:
    """One call at a time, plain HTTP, in rounds; `between` is called before each, so that what is compared met the same machine."""
    lease_ids = wire.acquire()
    rounds = []
    for _ in range(CALL_ROUNDS):
        between()
        rounds.append(p50_s(lambda: wire.batch(lease_ids), CALL_LAPS))
    wire.release(lease_ids)
    return statistics.median(rounds)


def one_client_call_s(service: Service) -> float:
    """One call at a time, through the client library."""
    with SandboxClient(service.url, token=service.token) as client, client.lease() as lease:
        return p50_s(lambda: lease.bash("true"), CALL_ROUNDS * CALL_LAPS)


def batch_rate(wire: Wire, between: Callable[[], None]) -> float:
    """Calls a second of one exec-batch over many slots; `between` as above."""
    lease_ids = wire.acquire(BATCH_LEASES)
    each = lease_ids * (BATCH_CALLS // BATCH_LEASES)
    rounds = []
    for _ in range(CALL_ROUNDS):
        between()
        rounds.append(p50_s(lambda: wire.batch(each), BATCH_LAPS))
    wire.release(lease_ids)
    wire.settle()
    return BATCH_CALLS / statistics.median(rounds)


def acquire_s(wire: Wire) -> float:
    """Acquire of a slot that is ready."""
    laps: list[float] = []
    held: list[str] = []
    for _ in range(ACQUIRE_ROUNDS):
        laps += [lap_s(lambda: held.extend(wire.acquire())) for _ in range(ACQUIRE_LAPS)]
        wire.release(held)
        held.clear()
        wire.settle()
    return statistics.median(laps)


def again_s(wire: Wire, pool: str, slots: int) -> float:
    """From release until the only free slot of a pool is leased again, used in between."""
    others, held = wire.acquire(slots - 1, pool), wire.acquire(1, pool)

    def lap() -> float:
        wire.batch(held)
        return lap_s(lambda: (wire.release(held), held.__setitem__(slice(None), wire.acquire(1, pool))))

    laps = [lap() for _ in range(RELEASE_LAPS)]
    wire.release([*others, *held])
    return statistics.median(laps)


def idle_bytes(service: Service, slots: int) -> tuple[float, float]:
    """What each idle slot costs, and each agent: the proportional share (PSS) of all processes that the agents started, and of the agents.

    Raises:
        psutil.AccessDenied: An ordinary user may not look at the init of a slot; root may.
    """
    agents = psutil.Process(service.process.pid).children()
    of_slots = [process for agent in agents for process in agent.children(recursive=True)]
    return sum(process.memory_full_info().pss for process in of_slots) / slots, sum(process.memory_full_info().pss for process in agents) / len(agents)
