"""The processor time of acquire, one command and release, by the part of the system that uses it: where each millisecond goes.

`python -m tests.bench.cycle_budget`, as root on a machine whose cgroup v1 controller `cpuacct` can be written. Each part runs in a control group of its own,
which counts its processor time exactly, whatever else runs on the machine; a busy machine makes each part slower all the same.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.bench.service_laps import ServiceConnection
from tests.support.service import running_service

HIERARCHY = Path("/sys/fs/cgroup/cpuacct")
SLOTS = 10
POOL = {"backend": "local", "require_sandbox": True, "on_shutdown": "destroy", "slots_per_sandbox": SLOTS, "min_sandboxes": 1, "max_sandboxes": 1}
WARM_UP_CYCLES = 20
#: The processes of each part, and that of threads of the kernel, which no control group contains.
PARTS = ("client", "service", "agent", "slots")
KERNEL = "kernel"
PF_KTHREAD = 0x200000


class PartGroups:
    """The control groups of the parts.

    Args:
        folder: the folder of the groups.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add_process(self, part: str, pid: int) -> None:
        """Move a process to the group of a part. What it starts from now on belongs to the same group."""
        (self._folder / part / "cgroup.procs").write_text(str(pid), encoding="ascii")

    def read_used_ms(self) -> dict[str, float]:
        """Return the processor time of each part so far, in milliseconds."""
        used = {part: int((self._folder / part / "cpuacct.usage").read_text(encoding="ascii")) / 1e6 for part in PARTS}
        return {**used, KERNEL: sum(map(_kernel_thread_ms, Path("/proc").glob("[0-9]*")))}


def _kernel_thread_ms(process: Path) -> float:
    """Return how long a thread of the kernel has run, in milliseconds; 0 for any other process."""
    try:
        flags = int((process / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[6])
        return int((process / "schedstat").read_text(encoding="ascii").split()[0]) / 1e6 if flags & PF_KTHREAD else 0.0
    except OSError:
        return 0.0  # it has ended


@contextmanager
def part_groups() -> Iterator[PartGroups]:
    """Create the control groups, and remove them at the end."""
    folder = HIERARCHY / f"cycle-budget-{os.getpid()}"
    for path in (folder, *(folder / part for part in PARTS)):
        path.mkdir()
    groups = PartGroups(folder)
    groups.add_process("service", os.getpid())  # The service is started by this process, which then moves on.
    try:
        yield groups
    finally:
        (HIERARCHY / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
        for part in PARTS:
            for pid in (folder / part / "cgroup.procs").read_text(encoding="ascii").split():
                (HIERARCHY / "cgroup.procs").write_text(pid, encoding="ascii")  # the process from which the tests fork services
            (folder / part).rmdir()
        folder.rmdir()


def sort_processes(groups: PartGroups, service_pid: int) -> None:
    """Move this process, the agents, and the templates and first processes of slots to the groups of their parts."""
    groups.add_process("client", os.getpid())
    for agent in psutil.Process(service_pid).children():
        groups.add_process("agent", agent.pid)
        for child in agent.children(recursive=True):
            groups.add_process("slots", child.pid)


def measure_cycles(groups: PartGroups, connection: ServiceConnection, cycle: Callable[[ServiceConnection], None], count: int) -> Mapping[str, float]:
    """Return the processor time of each part in one cycle, in milliseconds, with the resets that the cycles cause."""
    before = groups.read_used_ms()
    for _ in range(count):
        cycle(connection)
    connection.wait_until_ready(SLOTS)
    return {part: (used - before[part]) / count for part, used in groups.read_used_ms().items()}


def acquire_and_release(connection: ServiceConnection) -> None:
    """Acquire a slot, and give it back unused."""
    connection.release(connection.acquire())


def run_in_fresh_slot(connection: ServiceConnection) -> None:
    """Acquire a slot, run `bash -c true` in it, and give it back."""
    lease_ids = connection.acquire()
    connection.exec_batch(lease_ids)
    connection.release(lease_ids)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=300, help="how many cycles of each kind")
    count = parser.parse_args().cycles
    if not os.access(HIERARCHY, os.W_OK):
        sys.exit(f"{HIERARCHY} cannot be written: this needs root, and the cgroup v1 controller cpuacct")
    print(f"{'processor time of a cycle, ms':36}" + "".join(f"{part:>9}" for part in (*PARTS, KERNEL, "sum")))
    with part_groups() as groups, running_service({"pools": {"default": POOL}}) as service:
        connection = ServiceConnection(service)
        connection.wait_until_ready(SLOTS)
        sort_processes(groups, service.process.pid)
        for _ in range(WARM_UP_CYCLES):
            run_in_fresh_slot(connection)
        for name, cycle in (("acquire + release", acquire_and_release), ("acquire + bash -c true + release", run_in_fresh_slot)):
            connection.wait_until_ready(SLOTS)
            time.sleep(0.2)  # what the agent deletes in the background belongs to the cycles before
            used = measure_cycles(groups, connection, cycle, count)
            print(f"{name:36}" + "".join(f"{value:9.2f}" for value in (*used.values(), sum(used.values()))))


if __name__ == "__main__":
    main()
