"""Fresh slots in bulk: many clients that each acquire a slot, run one command in it and release it, again and again.

The clients are tasks of one process of their own, so that what they measure contains no more of the load than the service does: `python -m
tests.bench.churn_laps` is that process, and prints what it measured as JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from tests.bench.floor import Floor
from tests.bench.service_laps import ServiceConnection, lap_s
from tests.support.service import Service

TRUE_COMMAND, PYTHON_COMMAND = "true", "python3 -c 'print(6*7)'"
#: Clients come and go for so long before anything is measured, and for so long while it is measured, in seconds.
WARM_UP_S, MEASURED_S = 0.5, 1.5
NEIGHBOUR_CLIENTS, CROWD_CLIENTS, RATE_CLIENTS, HELD_SLOTS = 100, 200, 16, 4
CYCLE_LAPS = 40
SETTLE_S = 0.1
END_TIMEOUT_S = 60.0
_CPUACCT = Path("/sys/fs/cgroup/cpuacct")
_KTHREADD = 2  # The process id of the parent of all threads of the kernel.
_BUSY_FIELDS = (0, 1, 2, 5, 6, 7)  # Of the first line of /proc/stat: user, nice, system, irq, softirq, steal.


@dataclass(frozen=True, kw_only=True)
class ChurnRound:
    """What one round measured. Times are in seconds, rates in cycles or commands per second.

    Args:
        floor_call_s: the median time of one bare command.
        floor_rate: the rate of bare commands, four at a time.
        neighbour_call_s: the median time of a command in a held slot, while 100 clients use fresh slots.
        crowd_call_s: the median time of the own commands of 200 clients that use fresh slots.
        cycle_rate: the cycles of acquire, command and release of 16 clients.
        cycle_cpu_s: the processor time of the whole machine for acquire, release and reset, one cycle after the other.
        python_fresh_rate: `PYTHON_COMMAND` by 16 clients, each time in a fresh slot.
        python_held_rate: the same in four slots that are held.
    """

    floor_call_s: float
    floor_rate: float
    neighbour_call_s: float
    crowd_call_s: float
    cycle_rate: float
    cycle_cpu_s: float
    python_fresh_rate: float
    python_held_rate: float


@dataclass(frozen=True, kw_only=True)
class LoadResult:
    """What the clients of one load measured.

    Args:
        rate: how many of their commands ended per second.
        acquire_s: the median time of an acquire, in seconds; 0 where the slots were held.
        command_s: the median time of a command, in seconds.
        command_p95_s: the time that 95 % of the commands took at most, in seconds.
    """

    rate: float
    acquire_s: float
    command_s: float
    command_p95_s: float


@dataclass(frozen=True, kw_only=True)
class _Load:
    """One load: so many clients with one command, each time in a fresh slot or always in the one that they hold."""

    clients: int
    command: str
    is_fresh: bool = True
    pool: str = "default"
    warm_up_s: float = WARM_UP_S
    measured_s: float = MEASURED_S


# The processes of the load.


@contextlib.contextmanager
def _running_load(service: Service, load: _Load) -> Iterator[subprocess.Popen[str]]:
    """Start the clients of a load, and wait until their warm-up is over. They end by themselves and release their slots."""
    settings = json.dumps({"url": service.url, "token": service.token, **asdict(load)})
    with subprocess.Popen([sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(settings + "\n")
        process.stdin.flush()
        if process.stdout.readline() != "measuring\n":
            raise RuntimeError(f"the clients of {load} did not start")
        yield process


def measure_load(service: Service, load: _Load) -> LoadResult:
    """Run a load to its end, and return what its clients measured."""
    with _running_load(service, load) as process:
        return _result_of(process)


def _result_of(process: subprocess.Popen[str]) -> LoadResult:
    output, _ = process.communicate(timeout=END_TIMEOUT_S)
    if process.returncode != 0:
        raise RuntimeError(f"the clients of a load ended with {process.returncode}")
    return LoadResult(**json.loads(output))


# What a round measures.


def neighbour_call_s(service: Service, connection: ServiceConnection, clients: int = NEIGHBOUR_CLIENTS) -> float:
    """Return the median time of a command in a held slot, in seconds, while clients use fresh slots."""
    lease_ids = connection.acquire()
    laps_s = []
    with _running_load(service, _Load(clients=clients, command=TRUE_COMMAND)) as process:
        until = time.monotonic() + MEASURED_S
        while time.monotonic() < until:
            laps_s.append(lap_s(lambda: connection.exec_batch(lease_ids)))
        _result_of(process)
    connection.release(lease_ids)
    return statistics.median(laps_s)


class ProcessorTime:
    """The processor time that the machine spends on a service: on all processes that it starts, and in the threads of the kernel.

    While this is open, this process and its children are in a control group that counts their time. Where there can be no such group, the time of the whole
    machine counts, and what the machine uses in the same time without any request is subtracted.
    """

    def __init__(self) -> None:
        self._group = _CPUACCT / f"bench-{os.getpid()}"

    def __enter__(self) -> ProcessorTime:
        try:
            self._group.mkdir()
        except OSError:
            return self
        own = psutil.Process()
        for process in (own, *own.children(recursive=True)):
            (self._group / "cgroup.procs").write_text(str(process.pid))
        return self

    def __exit__(self, *_: object) -> None:
        if not self._group.exists():
            return
        for pid in (self._group / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):  # it ends at this moment
                (_CPUACCT / "cgroup.procs").write_text(pid)
        self._group.rmdir()

    def measure_s(self, work: Callable[[], None]) -> float:
        """Return the processor time of some work, in seconds."""
        began_s, began_cpu_s = time.monotonic(), self._read_s()
        work()
        took_s, used_s = time.monotonic() - began_s, self._read_s() - began_cpu_s
        if self._group.exists():
            return used_s
        began_cpu_s = self._read_s()
        time.sleep(took_s)
        return used_s - (self._read_s() - began_cpu_s)

    def _read_s(self) -> float:
        if self._group.exists():
            return int((self._group / "cpuacct.usage").read_text()) / 1e9 + _kernel_threads_s()
        ticks = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        return sum(int(ticks[number]) for number in _BUSY_FIELDS) / os.sysconf("SC_CLK_TCK")


def _kernel_threads_s() -> float:
    """Return how long the threads of the kernel have run so far, in seconds."""
    used_ns = 0
    for thread in psutil.Process(_KTHREADD).children():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            used_ns += int(Path(f"/proc/{thread.pid}/schedstat").read_text().split()[0])
    return used_ns / 1e9


def cycle_cpu_s(connection: ServiceConnection, processor_time: ProcessorTime, slots: int, pool: str = "default") -> float:
    """Return the processor time of the machine for one acquire and release with the reset that follows, in seconds.

    Args:
        connection: to the service.
        processor_time: counts the time of the service.
        slots: how many slots of the pool are ready at the beginning and at the end.
        pool: its name.
    """

    def run_cycles() -> None:
        for _ in range(CYCLE_LAPS):
            connection.release(connection.acquire(pool=pool))
        connection.wait_until_ready(slots, pool)
        time.sleep(SETTLE_S)  # folders and namespaces are deleted in the background

    return processor_time.measure_s(run_cycles) / CYCLE_LAPS


def measure_churn_round(floor: Floor, service: Service, connection: ServiceConnection, processor_time: ProcessorTime, slots: int) -> ChurnRound:
    """Measure the floor and the service in turns.

    Args:
        floor: the bare machine.
        service: the running service.
        connection: to it.
        processor_time: counts the time of the service.
        slots: how many slots its pool has. All are ready, at the beginning and at the end.
    """

    def measured(load: _Load) -> LoadResult:
        result = measure_load(service, load)
        connection.wait_until_ready(slots)
        return result

    neighbour_s = neighbour_call_s(service, connection)
    connection.wait_until_ready(slots)
    return ChurnRound(
        floor_call_s=floor.measure_one_call_s(),
        neighbour_call_s=neighbour_s,
        crowd_call_s=measured(_Load(clients=CROWD_CLIENTS, command=TRUE_COMMAND)).command_s,
        cycle_cpu_s=cycle_cpu_s(connection, processor_time, slots),
        floor_rate=floor.measure_rate(),
        cycle_rate=measured(_Load(clients=RATE_CLIENTS, command=TRUE_COMMAND)).rate,
        python_fresh_rate=measured(_Load(clients=RATE_CLIENTS, command=PYTHON_COMMAND)).rate,
        python_held_rate=measured(_Load(clients=HELD_SLOTS, command=PYTHON_COMMAND, is_fresh=False)).rate,
    )


# The clients, in the process of the load.


class _Connection:
    """A kept-alive HTTP connection that costs little: the processor time of the clients is that of the machine that they measure."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: str) -> None:
        self._reader = reader
        self._writer = writer
        self._head = head

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send a POST request and return the body of the response.

        Raises:
            RuntimeError: the status is not 200.
        """
        data = json.dumps(body)
        self._writer.write(f"POST {path} HTTP/1.1\r\n{self._head}content-length: {len(data)}\r\n\r\n{data}".encode())
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.partition(b"content-length:")[2].split(b"\r\n", 1)[0])
        answer = await self._reader.readexactly(length)
        if not head.startswith(b"http/1.1 200 "):
            raise RuntimeError(f"POST {path}: {head!r} {answer!r}")
        value: dict[str, Any] = json.loads(answer)
        return value


@dataclass
class _Laps:
    """When and how long: what the clients measured after the warm-up."""

    begin: float
    end: float
    acquires_s: list[float] = field(default_factory=list)
    commands_s: list[float] = field(default_factory=list)

    def is_over(self) -> bool:
        """Whether no client begins a further cycle."""
        return time.monotonic() >= self.end

    def add_command(self, acquired_s: float | None, took_s: float) -> None:
        """Add a command that has just ended, if it ended while the clients were measured."""
        if self.begin <= time.monotonic() < self.end:
            self.commands_s.append(took_s)
            if acquired_s is not None:
                self.acquires_s.append(acquired_s)

    def result(self) -> LoadResult:
        """Return what was measured."""
        ordered = sorted(self.commands_s)
        return LoadResult(
            rate=len(ordered) / (self.end - self.begin),
            acquire_s=statistics.median(self.acquires_s) if self.acquires_s else 0.0,
            command_s=statistics.median(ordered),
            command_p95_s=ordered[int(0.95 * len(ordered))],
        )


async def _run_command(connection: _Connection, lease_id: str, command: str) -> float:
    """Run a command in a slot. Returns how long that took, in seconds."""
    began = time.monotonic()
    call = {"lease_id": lease_id, "tool": "bash", "args": {"command": command}}
    (result,) = (await connection.post("/v1/exec-batch", {"calls": [call]}))["results"]
    if not result["success"]:
        raise RuntimeError(f"a command did not succeed: {result}")
    return time.monotonic() - began


async def _acquire(connection: _Connection, pool: str) -> str:
    lease_id: str = (await connection.post("/v1/acquire", {"pool": pool, "ttl_s": 600}))["leases"][0]["lease_id"]
    return lease_id


async def _use_fresh_slots(connection: _Connection, load: _Load, laps: _Laps) -> None:
    while not laps.is_over():
        began = time.monotonic()
        lease_id = await _acquire(connection, load.pool)
        acquired_s = time.monotonic() - began
        laps.add_command(acquired_s, await _run_command(connection, lease_id, load.command))
        await connection.post("/v1/release", {"lease_ids": [lease_id]})


async def _use_held_slot(connection: _Connection, load: _Load, laps: _Laps) -> None:
    lease_id = await _acquire(connection, load.pool)
    while not laps.is_over():
        laps.add_command(None, await _run_command(connection, lease_id, load.command))
    await connection.post("/v1/release", {"lease_ids": [lease_id]})


async def _run_load(load: _Load, url: str, token: str) -> LoadResult:
    address = urlsplit(url)
    head = f"host: {address.netloc}\r\nauthorization: Bearer {token}\r\ncontent-type: application/json\r\n"
    pairs = [await asyncio.open_connection(address.hostname, address.port) for _ in range(load.clients)]
    begin = time.monotonic() + load.warm_up_s
    laps = _Laps(begin, begin + load.measured_s)
    asyncio.get_running_loop().call_at(begin, lambda: print("measuring", flush=True))
    use_slots = _use_fresh_slots if load.is_fresh else _use_held_slot
    async with asyncio.TaskGroup() as group:
        for reader, writer in pairs:
            group.create_task(use_slots(_Connection(reader, writer, head), load, laps))
    for _, writer in pairs:
        writer.close()
    return laps.result()


def main() -> None:
    """Be the clients of one load, which is described by a line of JSON on standard input."""
    settings = json.loads(sys.stdin.readline())
    url, token = settings.pop("url"), settings.pop("token")
    print(json.dumps(asdict(asyncio.run(_run_load(_Load(**settings), url, token)))))


if __name__ == "__main__":
    main()
