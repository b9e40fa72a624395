"""The crash harness from the command line."""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
import tempfile
from pathlib import Path

from tests.faults.crash_harness import CrashHarness, Report, Size
from tests.faults.history import about
from tests.support import tables

DETAILED_VIOLATIONS = 5
"""How many violations are printed with their events; the others are printed in one line each."""
EVENTS_PER_VIOLATION = 60
SECTION = "crashes"


def main() -> int:
    """Run the crash harness and print the report.

    Returns:
        0, or 1 when a promise was broken.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults", description="The real service under load, killed again and again; what its clients saw is checked."
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="how long the load and the faults last (default %(default)g)")
    parser.add_argument("--seed", type=int, default=None, help="decides what the clients do and what fails when; default a new one, which is printed")
    parser.add_argument("--clients", type=int, default=50, help="how many clients (default %(default)s)")
    parser.add_argument("--transport", choices=("unix", "tls", "stdio"), default="unix", help="how the service reaches its agents (default %(default)s)")
    parser.add_argument("--write", action="store_true", help="put the figures of a run without violations into the README")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else secrets.randbelow(1_000_000)
    print(f"seed {seed}, {options.clients} clients, {options.seconds:g} s", flush=True)
    report = asyncio.run(CrashHarness(seed, options.seconds, Size(clients=options.clients), options.transport).run())
    for name, count in report.figures.items():
        print(f"{name:56} {count:8,}")
    for what in report.left_out:
        print(f"NOT DONE {what}")
    if not report.violations:
        if options.write:
            tables.write(SECTION, in_words(report, options.clients))
        return 0
    print_violations(report)
    print(f"again: python -m tests.faults --seed {seed} --seconds {options.seconds:g} --clients {options.clients} --transport {options.transport}")
    return 1


def in_words(report: Report, clients: int) -> str:
    """Return the section of the README about a run."""
    head = f"One run of {report.seconds / 60:g} minutes with {clients} clients (seed {report.seed}):\n\n"
    left_out = "".join(f"\nNot done here: {what}.\n" for what in report.left_out)
    return head + tables.render(("figure", "count"), [(name, f"{count:,}") for name, count in report.figures.items()]) + left_out


def print_violations(report: Report) -> None:
    """Print the violations, the first ones with their events, and write the history and the log to files."""
    folder = Path(tempfile.mkdtemp(prefix=f"sandbox-pool-faults-{report.seed}-"))
    report.history.write(folder / "history")
    (folder / "log").write_text(report.log, encoding="utf-8")
    for number, violation in enumerate(report.violations):
        print(f"\n{violation.rule}: {violation.detail}")
        if number < DETAILED_VIOLATIONS and violation.names:
            lease = [str(event) for event in about(report.history.events, violation.names)]
            print("\n".join(f"    {line[:600]}" for line in lease[:EVENTS_PER_VIOLATION]))
    print(f"\nseed {report.seed}; the whole history and the service's log: {folder}")


if __name__ == "__main__":
    sys.exit(main())
