"""A service's pools in a process of their own, to be killed: takes a lease, has a long command run in it, says so, and waits for its death."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from sandbox_server.backends.local import make_local_backend
from sandbox_server.core.clock import SystemClock
from sandbox_server.core.types import AcquireRequest, PoolSpec
from sandbox_server.pool.service import PoolService
from sandbox_server.store.sqlite.store import SqliteStore

SPEC = PoolSpec(slots_per_sandbox=2, min_sandboxes=1, max_sandboxes=1, allow_none=True)


def make_pools(folder: Path) -> PoolService:
    """Pools on real agents, with a state file."""
    backend = make_local_backend(folder, "me", True)
    return PoolService({"default": SPEC}, {"local": backend}, SqliteStore(folder / "state.db"), SystemClock(), owner="me")


def call(call_id: str, command: str) -> dict[str, object]:
    """What a dispatcher sends for a command."""
    return {
        "call_id": call_id, "tool": "bash", "args": {"command": command}, "timeout_s": 60, "no_output_timeout_s": None,
        "output_limit_bytes": 10_000, "separate_streams": False, "encoding": "base64",
    }  # fmt: skip


async def main(folder: Path, command: str) -> None:
    pools = make_pools(folder)
    await pools.start()
    (lease, gone) = (await pools.acquire(AcquireRequest(tenant="t", pool="default", count=2, ttl_s=5, trajectory_ids=(None, None)))).leases
    pools.release("t", [gone.lease_id])
    await pools.flush()
    location = pools.locate_slot("t", lease.lease_id)
    async with location.agent.link.stream({"op": "calls", "slot": location.slot_id, "epoch": location.epoch}) as stream:
        stream.send_item(call("c", command))
        stream.end()
        status: dict[str, object] = {}
        while not status.get("output_bytes"):
            status = dict(await location.agent.link.request({"op": "call_status", "slot": location.slot_id, "epoch": location.epoch, "call_id": "c"}))
        sys.stdout.write(json.dumps({"lease_id": lease.lease_id, "sandbox_id": lease.sandbox_id}) + "\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
