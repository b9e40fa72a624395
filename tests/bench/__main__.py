"""Measure the service, the floor and the peer in one run, print the table, and with --write put it into the README."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from tests.bench.floor import Floor
from tests.bench.harness import Wire, acquire_s, again_s, batch_rate, idle_bytes, one_call_s, one_client_call_s
from tests.bench.peer import Peer, measure_peer
from tests.bench.report import rendered
from tests.support import tables
from tests.support.service import running_service
from tests.support.users import ROOT

BUILD = ROOT / "build" / "bench"
COLD_SLOTS = 100
POOL = {"backend": "local", "require_sandbox": True, "on_shutdown": "destroy", "max_lifetime_s": 86400}
WARM = {
    "default": {**POOL, "slots_per_sandbox": 10, "min_sandboxes": 7, "max_sandboxes": 7},
    "ten": {**POOL, "slots_per_sandbox": 10, "min_sandboxes": 1, "max_sandboxes": 1},
}
COLD = {"default": {**POOL, "slots_per_sandbox": 10, "min_sandboxes": COLD_SLOTS // 10, "max_sandboxes": COLD_SLOTS // 10}}


def say(text: str) -> None:
    """Progress, on stderr."""
    print(f"bench: {text}", file=sys.stderr, flush=True)


def measure_warm(floor: Floor) -> dict[str, Any]:
    """What a running service does."""
    with running_service({"pools": WARM}) as service:
        wire = Wire(service)
        found: dict[str, Any] = {"isolation": wire.get("/v1/pools/default")["isolation"]}
        say("one call at a time")
        found["one_call_s"] = one_call_s(wire, floor.measure_one)
        found["one_client_call_s"] = one_client_call_s(service)
        say("256 calls over 64 slots")
        found["batch_rate"] = batch_rate(wire, floor.measure_rate)
        say("acquire and release")
        found["acquire_s"] = acquire_s(wire)
        found["again_s"] = again_s(wire, "ten", 10)
    return found


def measure_cold() -> dict[str, Any]:
    """From nothing to a hundred slots, and what they cost while idle."""
    begin = time.perf_counter()
    with running_service({"pools": COLD}) as service:
        wire = Wire(service)
        while wire.get("/v1/pools/default")["slots"]["ready"] < COLD_SLOTS:
            time.sleep(0.02)
        took = time.perf_counter() - begin
        try:
            slot_bytes, agent_bytes = idle_bytes(service, COLD_SLOTS)
        except psutil.AccessDenied:
            say("the memory of a slot can be measured by root only")
            return {"cold_start_s": took}
    return {"cold_start_s": took, "idle_slot_bytes": slot_bytes, "agent_bytes": agent_bytes}


def measure_all(folder: Path) -> tuple[Mapping[str, Any], Floor, Peer | None]:
    """Everything; the floor is taken between the rounds of what is held against it."""
    floor = Floor.built(folder)
    found = measure_warm(floor)
    say("100 slots from a cold start")
    found |= measure_cold()
    say("SWE-ReX")
    try:
        peer = measure_peer(folder)
    except (subprocess.CalledProcessError, OSError) as error:
        say(f"SWE-ReX could not be measured: {error}")
        peer = None
    return found, floor, peer


def main() -> int:
    """Run the benchmark; the exit code says whether every bar is met."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the table into the README")
    options = parser.parse_args()
    BUILD.mkdir(parents=True, exist_ok=True)
    found, floor, peer = measure_all(BUILD)
    (BUILD / "bench.json").write_text(
        json.dumps(
            {**found, "floor_p50_s": floor.p50s_s, "floor_rate": floor.rates, "peer": vars(peer) if peer else None, "cpu_count": os.cpu_count()}, indent=1
        ),
        encoding="utf-8",
    )
    text, met = rendered(found, floor, peer)
    print(text)
    if options.write:
        tables.write("speed", text)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
