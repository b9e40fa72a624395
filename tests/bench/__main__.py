"""Measure the service, the floor and the peer in turns, print the table, and with --write put it into the README."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys

from tests.bench.floor import Floor
from tests.bench.peer import Peer, running_peer
from tests.bench.report import render_table
from tests.bench.rounds import COLD_STARTS, Measurements, measure_churn_rounds, measure_cold_start, measure_rounds
from tests.support import tables
from tests.support.users import ROOT

BUILD = ROOT / "build" / "bench"


def print_progress(text: str) -> None:
    """Print a line of progress on stderr."""
    print(f"bench: {text}", file=sys.stderr, flush=True)


def start_peer(stack: contextlib.ExitStack) -> Peer | None:
    """Start SWE-ReX until the stack closes. Returns None, with a line of progress that says why, where it cannot be installed or started."""
    try:
        return stack.enter_context(running_peer(BUILD))
    except (subprocess.CalledProcessError, OSError) as error:
        print_progress(f"SWE-ReX could not be measured: {error}")
        return None


def measure_all(floor: Floor) -> Measurements:
    """Measure everything."""
    with contextlib.ExitStack() as stack:
        isolation, rounds = measure_rounds(floor, start_peer(stack), print_progress)
    cold_starts = []
    for number in range(COLD_STARTS):
        print_progress(f"cold start {number + 1} of {COLD_STARTS}")
        cold_starts.append(measure_cold_start(print_progress))
    _, churn_rounds = measure_churn_rounds(floor, print_progress)
    return Measurements(isolation=isolation, rounds=rounds, cold_starts=cold_starts, churn_rounds=churn_rounds)


def measure_fresh_slots(floor: Floor) -> Measurements:
    """Measure only what many clients get that use fresh slots."""
    isolation, churn_rounds = measure_churn_rounds(floor, print_progress)
    return Measurements(isolation=isolation, rounds=[], cold_starts=[], churn_rounds=churn_rounds)


def main() -> int:
    """Run the benchmark.

    Returns:
        0 if every bar is met, else 1.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the table into the README")
    parser.add_argument("--fresh", action="store_true", help="measure only fresh slots under load; this cannot be combined with --write")
    options = parser.parse_args()
    if options.write and options.fresh:
        parser.error("--write needs the whole table, and --fresh measures a part of it: leave one of them out")
    BUILD.mkdir(parents=True, exist_ok=True)
    floor = Floor.compile(BUILD)
    measured = measure_fresh_slots(floor) if options.fresh else measure_all(floor)
    (BUILD / "bench.json").write_text(json.dumps({**measured.as_document(), "cpu_count": os.cpu_count()}, indent=1), encoding="utf-8")
    text, met = render_table(measured)
    print(text)
    if options.write:
        tables.write("speed", text)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
