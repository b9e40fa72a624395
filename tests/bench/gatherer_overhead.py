"""How much processor time of the trainer one tool call costs with the gatherer: `python -m tests.bench.gatherer_overhead`.

Each trajectory has a real slot of its own. The service runs in another process, so the processor time of this process is that of client, gatherer and
dispatch. Without the gatherer, each call is a request of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from env_client import AsyncLease, AsyncSandboxClient, CallGatherer, SlotTools
from tests.support.service import running_service

ROUNDS = 7
TURNS = 5
SLOTS_PER_SANDBOX = 50
COMMAND = {"command": "true"}


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """What one round measured: processor time of this process per call, and calls per second."""

    processor_s: float
    rate: float


async def measure_round(turn: Callable[[AsyncLease], Awaitable[object]], leases: Sequence[AsyncLease]) -> Overhead:
    """Let every trajectory take its turns, all of them at once."""

    async def trajectory(lease: AsyncLease) -> None:
        for _ in range(TURNS):
            await turn(lease)

    began_s, processor_began_s = time.perf_counter(), time.process_time()
    await asyncio.gather(*(trajectory(lease) for lease in leases))
    call_count = len(leases) * TURNS
    return Overhead(processor_s=(time.process_time() - processor_began_s) / call_count, rate=call_count / (time.perf_counter() - began_s))


async def measure(url: str, token: str, trajectory_count: int) -> dict[str, float]:
    """Return the medians over the rounds, which alternate between calls with and without the gatherer."""
    async with AsyncSandboxClient(url, token) as client, client.gang(trajectory_count, wait_s=60) as leases, CallGatherer(client) as gatherer:
        tools = {lease.lease_id: SlotTools(lease, gatherer, timeout_s=60) for lease in leases}
        gathered, single = [], []
        for _ in range(ROUNDS):
            gathered.append(await measure_round(lambda lease: tools[lease.lease_id].call_tool("terminal", COMMAND), leases))
            single.append(await measure_round(lambda lease: lease.exec("terminal", COMMAND), leases))
        done = gatherer.statistics
    return {
        "gathered_processor_ms_p50": 1000 * statistics.median(one.processor_s for one in gathered),
        "single_processor_ms_p50": 1000 * statistics.median(one.processor_s for one in single),
        "gathered_calls_per_s": statistics.median(one.rate for one in gathered),
        "single_calls_per_s": statistics.median(one.rate for one in single),
        "calls_per_request": done.call_count / done.request_count,
        "waited_ms_mean": 1000 * done.waited_s / done.call_count,
    }


def main() -> None:
    """Measure and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trajectories", type=int, default=200)
    count: int = parser.parse_args().trajectories
    sandboxes = -(-count // SLOTS_PER_SANDBOX)
    spec = {"backend": "local", "slots_per_sandbox": SLOTS_PER_SANDBOX, "min_sandboxes": sandboxes, "max_sandboxes": sandboxes}
    with running_service({"pools": {"default": spec}}) as service:
        print(json.dumps(asyncio.run(measure(service.url, service.token, count)), indent=2))


if __name__ == "__main__":
    main()
