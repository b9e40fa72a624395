"""A demonstration of the main use case on this machine: `python -m env_client.demo`.

It starts an embedded service and acquires eight slots at once. In each slot it unpacks a small project with a failing test, runs the tests, edits
the wrong file and runs the tests again. It releases the slots, acquires them again and shows that nothing is left in them.
"""

from __future__ import annotations

import gzip
import io
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from env_client import Call, Lease, Result, SandboxClient, embedded

SLOT_COUNT = 8
RUN_ID = "demo"
POOL = {"backend": "local", "slots_per_sandbox": SLOT_COUNT, "min_sandboxes": 1, "max_sandboxes": 1, "on_shutdown": "destroy", "allow_none": True}
PROJECT = Path(__file__).parent / "demo_project"

RUN_TESTS = "python3 -m unittest 2>&1"
WRONG_FILE = "fairshare/bill.py"
WRONG = """\
        share = self.total_cents // len(self.friends)
        return {friend: share for friend in self.friends}
"""
RIGHT = """\
        share, left_over = divmod(self.total_cents, len(self.friends))
        return {friend: share + (place < left_over) for place, friend in enumerate(self.friends)}
"""
LITTER = "echo rubbish > /tmp/left-behind; sleep 31337 >/dev/null 2>&1 &"
LOOK_FOR_LITTER = "find . /tmp -mindepth 1; grep -lz '3133[7]' /proc/[0-9]*/cmdline; true"


@dataclass
class Row:
    """The row of one slot in the table: what has happened so far."""

    slot_id: str
    cells: list[str] = field(default_factory=list)
    duration_s: float = 0.0
    as_expected: bool = True


def packed_project() -> bytes:
    """Return the project as a gzipped tar."""
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as zipped, tarfile.open(fileobj=zipped, mode="w") as tar:
        for path in sorted(PROJECT.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                tar.add(path, arcname=str(path.relative_to(PROJECT)), recursive=False)
    return buffer.getvalue()


def calls_for(lease: Lease) -> list[Call]:
    """Return the calls that are made in every slot, in this order."""
    return [
        lease.call("bash", {"command": RUN_TESTS}),
        lease.call("edit_file", {"path": WRONG_FILE, "old": WRONG, "new": RIGHT}),
        lease.call("bash", {"command": RUN_TESTS}),
    ]


def describe_result(step: int, result: Result) -> tuple[str, bool]:
    """Return how the result of a step is shown, and whether it is the expected one."""
    last_line = (result.output.strip().splitlines() or [""])[-1]
    if result.reason != "exit":
        return f"[red]{result.reason}[/]: {result.error}", False
    if step == 0:
        return f"[yellow]{last_line}[/]", result.exit_code == 1 and "FAILED (failures=1)" in last_line
    if step == 1:
        return "[green]edited[/]", result.success
    return (f"[green]{last_line}[/]" if result.success else f"[red]{last_line}[/]"), result.success


def slot_number(lease: Lease) -> int:
    """Return the number of the slot within its sandbox."""
    return int(lease.info.slot_id.rpartition("/")[2])


def build_table(rows: Sequence[Row]) -> Table:
    """Return the rows as a table."""
    table = Table("slot", "tests before", "edit", "tests after", "time", title=f"{len(rows)} slots, the same bug in each, mended in {WRONG_FILE}")
    for row in rows:
        table.add_row(row.slot_id, *[*row.cells, *[""] * (3 - len(row.cells))], f"{row.duration_s * 1000:.0f} ms")
    return table


def fix_projects(client: SandboxClient, leases: Sequence[Lease], console: Console) -> bool:
    """Run every step in every slot and show each result when it arrives; return whether all results are the expected ones."""
    calls = [call for lease in leases for call in calls_for(lease)]
    rows = [Row(slot_id=str(slot_number(lease))) for lease in leases]
    calls_per_slot = len(calls) // len(leases)
    with Live(build_table(rows), console=console, auto_refresh=False) as live:
        for index, result in client.exec_stream(calls):
            row, (text, as_expected) = rows[index // calls_per_slot], describe_result(index % calls_per_slot, result)
            row.cells.append(text)
            row.duration_s += result.duration_s or 0.0
            row.as_expected = row.as_expected and as_expected
            live.update(build_table(rows), refresh=True)
    console.print()
    return all(row.as_expected and len(row.cells) == calls_per_slot for row in rows)


def leave_litter(client: SandboxClient, leases: Sequence[Lease]) -> None:
    """Leave a file and a running process in every slot."""
    client.exec_batch([lease.call("bash", {"command": LITTER}) for lease in leases])


def find_litter(client: SandboxClient, leases: Sequence[Lease]) -> list[str]:
    """Return the files and processes that earlier holders left in these slots."""
    results = client.exec_batch([lease.call("bash", {"command": LOOK_FOR_LITTER}) for lease in leases])
    return [line for result in results for line in (result.error, *result.output.splitlines()) if line]


def run_demo(console: Console) -> bool:
    """Run the whole demonstration; return whether everything happened as expected."""
    started = time.monotonic()
    with embedded(pools={"default": POOL}) as service, service.client() as client:
        console.print(f"service   {service.url}, ready after {time.monotonic() - started:.1f} s")
        with client.gang(SLOT_COUNT, run_id=RUN_ID) as taken:
            leases = tuple(sorted(taken, key=slot_number))  # the service lists them in the order in which their slots became ready
            isolation = sorted({lease.info.isolation for lease in leases})
            console.print(f"acquired  {len(leases)} slots at once, isolation {', '.join(isolation)}")
            project, before = packed_project(), time.monotonic()
            for lease in leases:
                lease.put_archive(".", project)
            console.print(f"unpacked  {PROJECT.name} in each, {(time.monotonic() - before) * 1000:.0f} ms in all")
            all_fixed = fix_projects(client, leases, console)
            leave_litter(client, leases)
        console.print("released  all of them, with a file and a running process left in each")
        with client.gang(SLOT_COUNT, run_id=RUN_ID) as leases:
            litter = find_litter(client, leases)
        console.print(f"acquired  the same {SLOT_COUNT} slots again: " + (f"[red]found {litter}[/]" if litter else "[green]no file, no process: clean[/]"))
    return all_fixed and not litter


def main() -> int:
    """Run the demonstration; return 0 if everything happened as expected, else 1."""
    console = Console(highlight=False)
    success = run_demo(console)
    console.print("[green]everything was as it should be[/]" if success else "[red]something was not as it should be[/]")
    return 0 if success else 1


if __name__ == "__main__":
    sys.exit(main())
