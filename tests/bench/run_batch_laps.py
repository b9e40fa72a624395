"""Many short Python programs by one run-batch, each in a fresh slot, beside the same programs in a bare pool of four processes."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from env_client import Program, SandboxClient
from tests.bench.service_laps import lap_s
from tests.support.service import Service

PROGRAM_COUNT = 1000
ROUNDS = 3
BARE_PARALLEL = 4
MAX_PARALLEL = 8
WARM_UP_PROGRAMS = 50
SOURCE = "print(6*7)"
OUTPUT = "42\n"


@dataclass(frozen=True, kw_only=True)
class RunBatchRound:
    """What one round measured, in programs per second.

    Args:
        bare_rate: of the bare pool, which writes the programs into files.
        command_rate: of the run-batch, with the program in the command.
        file_rate: of the run-batch, with the program in a file of the item.
    """

    bare_rate: float
    command_rate: float
    file_rate: float


def _programs(with_file: bool, count: int) -> list[Program]:
    if with_file:
        return [Program(command="python3 main.py", files={"main.py": SOURCE}) for _ in range(count)]
    return [Program(command=f"python3 -c '{SOURCE}'") for _ in range(count)]


def _run_bare(folder: Path, count: int) -> None:
    def run(number: int) -> str:
        path = folder / f"{number}.py"
        path.write_text(SOURCE, encoding="utf-8")
        return subprocess.run(["python3", str(path)], check=True, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"}).stdout

    with ThreadPoolExecutor(BARE_PARALLEL) as pool:
        outputs = list(pool.map(run, range(count)))
    if outputs != [OUTPUT] * count:
        raise RuntimeError("a program of the bare pool has written something else")


def _run_batch(client: SandboxClient, with_file: bool, count: int) -> None:
    results = list(client.run_many(_programs(with_file, count), max_parallel=MAX_PARALLEL))
    failed = [result for result in results if not result.success or result.output != OUTPUT]
    if failed or len(results) != count:
        raise RuntimeError(f"{len(failed)} of {len(results)} programs did not succeed, the first: {failed[:1]}")


def measure_run_batch(service: Service, report: Callable[[str], None]) -> list[RunBatchRound]:
    """Measure the bare pool and both kinds of run-batches in turns.

    Args:
        service: a running service with the pool `default`.
        report: called with a line of progress.
    """
    rounds = []
    with SandboxClient(service.url, token=service.token) as client, tempfile.TemporaryDirectory() as folder:
        _run_batch(client, True, WARM_UP_PROGRAMS)
        for number in range(ROUNDS):
            report(f"run-batch, round {number + 1} of {ROUNDS}")
            bare_s = lap_s(lambda: _run_bare(Path(folder), PROGRAM_COUNT))
            command_s = lap_s(lambda: _run_batch(client, False, PROGRAM_COUNT))
            file_s = lap_s(lambda: _run_batch(client, True, PROGRAM_COUNT))
            rounds.append(RunBatchRound(bare_rate=PROGRAM_COUNT / bare_s, command_rate=PROGRAM_COUNT / command_s, file_rate=PROGRAM_COUNT / file_s))
    return rounds
