"""The main job, for real, on this machine: `python -m env_client.demo`.

Starts a service of its own, takes eight slots at once, unpacks in each a small project with a failing test, runs the tests, edits the
file that is wrong, runs the tests again, gives the slots back, and looks at what the next holder finds in them.
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
    """What is known of one slot so far."""

    slot_id: str
    cells: list[str] = field(default_factory=list)
    worked_s: float = 0.0
    as_hoped: bool = True


def packed_project() -> bytes:
    """The project as a gzipped tar."""
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as zipped, tarfile.open(fileobj=zipped, mode="w") as tar:
        for path in sorted(PROJECT.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                tar.add(path, arcname=str(path.relative_to(PROJECT)), recursive=False)
    return buffer.getvalue()


def steps(lease: Lease) -> list[Call]:
    """What is done in every slot, in this order."""
    return [
        lease.call("bash", {"command": RUN_TESTS}),
        lease.call("edit_file", {"path": WRONG_FILE, "old": WRONG, "new": RIGHT}),
        lease.call("bash", {"command": RUN_TESTS}),
    ]


def cell(step: int, result: Result) -> tuple[str, bool]:
    """How a result is shown, and whether it is what the demo hopes for."""
    last_line = (result.output.strip().splitlines() or [""])[-1]
    if result.reason != "exit":
        return f"[red]{result.reason}[/]: {result.error}", False
    if step == 0:
        return f"[yellow]{last_line}[/]", result.exit_code == 1 and "FAILED (failures=1)" in last_line
    if step == 1:
        return "[green]edited[/]", result.success
    return (f"[green]{last_line}[/]" if result.success else f"[red]{last_line}[/]"), result.success


def slot_number(lease: Lease) -> int:
    """Which slot of its sandbox it is."""
    return int(lease.info.slot_id.rpartition("/")[2])


def table(rows: Sequence[Row]) -> Table:
    """The rows as a table."""
    it = Table("slot", "tests before", "edit", "tests after", "time", title=f"{len(rows)} slots, the same bug in each, mended in {WRONG_FILE}")
    for row in rows:
        it.add_row(row.slot_id, *[*row.cells, *[""] * (3 - len(row.cells))], f"{row.worked_s * 1000:.0f} ms")
    return it


def work(client: SandboxClient, leases: Sequence[Lease], console: Console) -> bool:
    """Run every step in every slot and show each result as it comes; returns whether all were as hoped."""
    calls = [call for lease in leases for call in steps(lease)]
    rows = [Row(slot_id=str(slot_number(lease))) for lease in leases]
    each = len(calls) // len(leases)
    with Live(table(rows), console=console, auto_refresh=False) as live:
        for index, result in client.exec_stream(calls):
            row, (text, as_hoped) = rows[index // each], cell(index % each, result)
            row.cells.append(text)
            row.worked_s += result.duration_s or 0.0
            row.as_hoped = row.as_hoped and as_hoped
            live.update(table(rows), refresh=True)
    console.print()
    return all(row.as_hoped and len(row.cells) == each for row in rows)


def litter(client: SandboxClient, leases: Sequence[Lease]) -> None:
    """Leave a file and a running process in every slot, as careless code does."""
    client.exec_batch([lease.call("bash", {"command": LITTER}) for lease in leases])


def left_behind(client: SandboxClient, leases: Sequence[Lease]) -> list[str]:
    """What the holders before left in these slots: files and processes."""
    results = client.exec_batch([lease.call("bash", {"command": LOOK_FOR_LITTER}) for lease in leases])
    return [line for result in results for line in (result.error, *result.output.splitlines()) if line]


def demo(console: Console) -> bool:
    """The whole of it; returns whether everything was as it should be."""
    started = time.monotonic()
    with embedded(pools={"default": POOL}) as service, service.client() as client:
        console.print(f"service   {service.url}, ready after {time.monotonic() - started:.1f} s")
        with client.gang(SLOT_COUNT, run_id=RUN_ID) as taken:
            leases = tuple(sorted(taken, key=slot_number))  # they come in the order in which their slots were ready
            isolation = sorted({lease.info.isolation for lease in leases})
            console.print(f"acquired  {len(leases)} slots at once, isolation {', '.join(isolation)}")
            project, before = packed_project(), time.monotonic()
            for lease in leases:
                lease.put_archive(".", project)
            console.print(f"unpacked  {PROJECT.name} in each, {(time.monotonic() - before) * 1000:.0f} ms in all")
            well = work(client, leases, console)
            litter(client, leases)
        console.print("released  all of them, with a file and a running process left in each")
        with client.gang(SLOT_COUNT, run_id=RUN_ID) as leases:
            found = left_behind(client, leases)
        console.print(f"acquired  the same {SLOT_COUNT} slots again: " + (f"[red]found {found}[/]" if found else "[green]no file, no process: clean[/]"))
    return well and not found


def main() -> int:
    """Run the demo; the exit code says whether everything was as it should be."""
    console = Console(highlight=False)
    well = demo(console)
    console.print("[green]everything was as it should be[/]" if well else "[red]something was not as it should be[/]")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
