"""Many cycles of acquire, exec and release on one service, and whether all that the service and its agent hold stays where it is.

`python -m tests.bench.soak --cycles 10000 --isolation bwrap-user`; ends with 1 where the memory of a process grows more than its bound a cycle, or where more
descriptors, processes, control groups, mounts or files are held at the end than at the beginning. The first 6,000 cycles are for warming up.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import psutil

from sandbox_server.pool.dependencies import new_lease_id
from sandbox_server.pool.events import KEPT
from sandbox_server.pool.leasing.ended_leases import MAX_IN_MEMORY
from tests.bench.held_resources import ResourceCounter
from tests.support.service import SMALL_POOL, Service, running_service
from tests.support.users import ME, ordinary_user

SAMPLES = 40
EVENTS_A_CYCLE = 2
# Then the events and the ended leases that the service holds are as many as they will ever be; and a thousand more for SQLite's page caches.
WARM_UP_CYCLES = max(KEPT // EVENTS_A_CYCLE, MAX_IN_MEMORY) + 1000
MEASURED_CYCLES = 4000  # So many it takes at least to tell growth from noise.
FIRST_CYCLES = 200  # Then all that is opened once is open.
CLIENTS = 4
SLOTS = 8
ISOLATIONS = ("bwrap-root", "bwrap-user", "uid-root")
# Of an ended lease the service holds its id and when it ended, for an hour, at most `MAX_REMEMBERED` times.
ENDED_LEASE_BYTES = sys.getsizeof((0.0, "")) + sys.getsizeof(0.0) + sys.getsizeof(new_lease_id()) + 8  # and its place in the order
# Memory comes in pages, and an allocator does not use them evenly: so much may come and go.
NOISE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What the processes held after so many cycles."""

    cycles: int
    service_bytes: int
    agent_bytes: int


def slope(points: list[tuple[int, int]]) -> float:
    """The growth of the second coordinate by the first, by least squares."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)


class Soak:
    """One run.

    Args:
        service: with one sandbox.
        agent: its agent.
        cycles: how many in all.
        mode: the isolation mode that its slots must be in.
    """

    def __init__(self, service: Service, agent: psutil.Process, cycles: int, mode: str) -> None:
        self._service = service
        self._cycles = cycles
        self._mode = mode
        self._begun = 0
        self._lock = threading.Lock()
        self._agent = agent
        self._own = psutil.Process(service.process.pid)

    def _next(self) -> bool:
        with self._lock:
            self._begun += 1
            return self._begun <= self._cycles

    def sample(self, cycles: int) -> Sample:
        return Sample(cycles=cycles, service_bytes=self._own.memory_info().rss, agent_bytes=self._agent.memory_info().rss)

    def _client(self) -> None:
        with self._service.http() as http:
            while self._next():
                (lease,) = http.post("/v1/acquire", json={"ttl_s": 60}).raise_for_status().json()["leases"]
                if lease["isolation"] != self._mode:
                    raise RuntimeError(f"the slots are in the mode {lease['isolation']}, not {self._mode}")
                call = {"lease_id": lease["lease_id"], "tool": "bash", "args": {"command": "echo $((6 * 7))"}, "timeout_s": 30}
                (result,) = http.post("/v1/exec-batch", json={"calls": [call]}).raise_for_status().json()["results"]
                if result["output"] != "42\n":
                    raise RuntimeError(f"a call came to {result}")
                http.post("/v1/release", json={"lease_ids": [lease["lease_id"]]}).raise_for_status()

    def run(self) -> list[Sample]:
        """Do all cycles, with a look at the processes every so many."""
        step = max(1, self._cycles // SAMPLES)
        samples: list[Sample] = []
        with ThreadPoolExecutor(CLIENTS) as threads:
            running = [threads.submit(self._client) for _ in range(CLIENTS)]
            try:
                while not all(client.done() for client in running):
                    if self._begun >= (len(samples) + 1) * step:
                        samples.append(self.sample(self._begun))
                        print(
                            f"{samples[-1].cycles:7d} cycles  service {samples[-1].service_bytes >> 10:8d} KiB  agent {samples[-1].agent_bytes >> 10:8d} KiB",
                            flush=True,
                        )
                    time.sleep(0.05)
            finally:
                self._cycles = 0  # where this is interrupted, the clients end as well
            for client in running:
                client.result()
        return samples


def wait_until_all_free(service: Service) -> None:
    """Wait until no slot is leased or being reset."""
    with service.http() as http:
        while http.get("/v1/pools/default").raise_for_status().json()["slots"]["ready"] < SLOTS:
            time.sleep(0.05)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=20_000)
    parser.add_argument("--isolation", choices=ISOLATIONS, default="bwrap-root", help="the isolation mode, and the user that the service runs as")
    arguments = parser.parse_args()
    cycles = arguments.cycles
    if cycles < WARM_UP_CYCLES + MEASURED_CYCLES:
        parser.error(f"it takes at least {WARM_UP_CYCLES + MEASURED_CYCLES} cycles to tell growth from warming up")
    mode, user = arguments.isolation.split("-")
    pool = {**SMALL_POOL, "slots_per_sandbox": SLOTS, "max_sandboxes": 1, "require_sandbox": True}
    with tempfile.TemporaryDirectory() as empty:
        # As on a machine without bubblewrap.
        environ = {"PATH": empty} if mode == "uid" else {}
        with running_service({"pools": {"default": pool}}, env=environ, runner=ME if user == ME.name else ordinary_user()) as service:
            counter = ResourceCounter(service)
            Soak(service, counter.agent, FIRST_CYCLES, mode).run()
            wait_until_all_free(service)
            before = counter.count_resources()
            samples = [sample for sample in Soak(service, counter.agent, cycles, mode).run() if sample.cycles >= WARM_UP_CYCLES]
            wait_until_all_free(service)
            after = counter.wait_for_no_growth(before)
    print(f"before: {before}\nafter:  {after}")
    growth = after.describe_growth(before)
    agent = slope([(sample.cycles, sample.agent_bytes) for sample in samples])
    own = slope([(sample.cycles, sample.service_bytes) for sample in samples])
    agent_bound = NOISE_BYTES / (cycles - WARM_UP_CYCLES)
    own_bound = ENDED_LEASE_BYTES + agent_bound
    print(f"a cycle: service {own:+.0f} bytes (at most {own_bound:.0f}), agent {agent:+.0f} bytes (at most {agent_bound:.0f})")
    return 0 if agent <= agent_bound and own <= own_bound and not growth else 1


if __name__ == "__main__":
    sys.exit(main())
