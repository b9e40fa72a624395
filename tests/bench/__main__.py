"""Measure the service, the floor and the peer in turns, print the table, and with --write put it into the README."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

from tests.bench.floor import Floor
from tests.bench.peer import Peer, running_peer
from tests.bench.report import render_table
from tests.bench.rounds import (
    COLD_STARTS,
    Measurements,
    measure_churn_rounds,
    measure_cold_start,
    measure_file_rounds,
    measure_interactive_rounds,
    measure_rounds,
    measure_run_batch_rounds,
)
from tests.support import tables
from tests.support.users import ROOT

BUILD = ROOT / "build" / "bench"
PARTS = ("calls", "files", "starts", "fresh", "programs", "interactive")


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


def measure(parts: Sequence[str], floor: Floor) -> Measurements:
    """Measure some parts, or all of them."""
    measured = Measurements()
    if "calls" in parts:
        with contextlib.ExitStack() as stack:
            measured = replace(measured, rounds=measure_rounds(floor, start_peer(stack), print_progress))
    if "files" in parts:
        measured = replace(measured, file_rounds=measure_file_rounds(print_progress))
    if "starts" in parts:
        cold_starts = []
        for number in range(COLD_STARTS):
            print_progress(f"cold start {number + 1} of {COLD_STARTS}")
            cold_starts.append(measure_cold_start(floor, print_progress))
        measured = replace(measured, cold_starts=cold_starts)
    if "fresh" in parts:
        measured = replace(measured, churn_rounds=measure_churn_rounds(floor, print_progress))
    if "programs" in parts:
        measured = replace(measured, run_batch_rounds=measure_run_batch_rounds(print_progress))
    if "interactive" in parts:
        measured = replace(measured, interactive_rounds=measure_interactive_rounds(floor, print_progress))
    return measured


def main() -> int:
    """Run the benchmark.

    Returns:
        0 if every bar is met, else 1.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the table into the README")
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], metavar="PART", help=f"measure only these parts: {', '.join(PARTS)}")
    options = parser.parse_args()
    if options.write and options.parts:
        parser.error("--write needs the whole table: leave out the parts, or --write")
    BUILD.mkdir(parents=True, exist_ok=True)
    measured = measure(options.parts or PARTS, Floor.compile(BUILD))
    (BUILD / "bench.json").write_text(json.dumps({**measured.as_document(), "cpu_count": os.cpu_count()}, indent=1), encoding="utf-8")
    text, met = render_table(measured)
    print(text)
    if options.write:
        tables.write("speed", text)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
