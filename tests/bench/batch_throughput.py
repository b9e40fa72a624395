"""How much the batch runner adds to what slots alone cost: `python -m tests.bench.batch_throughput`.

Runs a file of prompts with a scripted model on an embedded service, and notes the memory of the runner on the way. Before and after it, the plain client
does the same acquires, calls and releases with the same concurrency, on an embedded service with the same pool. All processes share the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from env_client import AsyncSandboxClient, embedded

#: The calls of each trajectory, one in each turn.
CALLS: Sequence[tuple[str, dict[str, Any]]] = (
    ("write_file", {"path": "answer.py", "content": "print(6 * 7)\n"}),
    ("terminal", {"command": "python3 answer.py"}),
    ("read_file", {"path": "answer.py"}),
)
#: The trajectories at the beginning that are not measured: the first slots are still being made.
WARM_UP = 50
MEMORY_AT = (250, 1000)
POLL_S = 0.1
#: How long the service may take to start on a machine that is busy, in seconds.
START_S = 120.0


def pool_spec(workers: int) -> dict[str, Any]:
    """The spec of the pool that the runner makes for so many workers."""
    slots_per_sandbox = min(workers, 10)
    return {"slots_per_sandbox": slots_per_sandbox, "min_sandboxes": 1, "max_sandboxes": -(-workers // slots_per_sandbox), "acquire_timeout_s": 600.0}


async def measure_slots(client: AsyncSandboxClient, count: int, workers: int) -> float:
    """Return how many trajectories a second the slots give without a model and without a runner."""
    numbers = iter(range(count))
    finished_s: list[float] = []

    async def work() -> None:
        for _ in numbers:
            async with client.lease(wait_s=600, ttl_s=60) as lease:
                for tool, args in CALLS:
                    assert (await lease.exec(tool, args)).success
                finished_s.append(time.time())

    await asyncio.gather(*(work() for _ in range(workers)))
    return rate(finished_s)


def rate(finished_s: Sequence[float]) -> float:
    """Trajectories per second after the warm-up."""
    ordered = sorted(finished_s)
    first = min(WARM_UP, len(ordered) // 4)
    return (len(ordered) - 1 - first) / (ordered[-1] - ordered[first])


def run_slots(count: int, workers: int) -> float:
    """Measure the slots alone on an embedded service of their own."""

    async def run(url: str, token: str) -> float:
        async with AsyncSandboxClient(url, token) as client:
            return await measure_slots(client, count, workers)

    with embedded({"default": pool_spec(workers)}, start_s=START_S) as service:
        began_s = time.process_time()
        result = asyncio.run(run(service.url, service.token))
        print(json.dumps({"client_processor_ms": 1000 * (time.process_time() - began_s) / count}), flush=True)
        return result


def write_files(folder: Path, count: int) -> None:
    """Write the prompts and the script of the model."""
    with (folder / "prompts.jsonl").open("w") as file:
        for number in range(count):
            file.write(json.dumps({"prompt": f"Write a program that prints 6 times 7, and run it. ({number})"}) + "\n")
    turns: list[dict[str, Any]] = [{"text": "Next.", "calls": [{"tool": tool, "arguments": args}]} for tool, args in CALLS]
    script = {"prompts": [{"trajectories": [{"turns": [*turns, {"text": "It printed 42."}]}]}]}
    (folder / "script.json").write_text(json.dumps(script))


def private_bytes(pid: int) -> int:
    """The memory that a process shares with no other, in bytes."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(("Private_Clean:", "Private_Dirty:")))


def processor_s(pid: int) -> float:
    """The processor time of a process, without that of its children, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run_batch(folder: Path, name: str, base_url: str, workers: int, profile: bool) -> tuple[float, dict[int, int], float]:
    """Run the batch runner. Returns its rate, its memory after so many prompts in bytes, and its processor time in seconds a prompt."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith("SANDBOX_")}
    options = ["--dataset_file", "prompts.jsonl", "--batch_size", "10", "--run_name", name, "--num_workers", str(workers), "--model", "scripted"]
    profiler = ["-m", "cProfile", "-o", str(folder / f"{name}.prof")] if profile else []
    command = [sys.executable, *profiler, "-m", "environments.batch", *options, "--base_url", base_url]
    rows = folder / "data" / name / "trajectories.jsonl"
    memory: dict[int, int] = {}
    used_s = 0.0
    with subprocess.Popen(command, cwd=folder, env=environ, stdout=subprocess.DEVNULL) as runner:
        position = count = 0
        while runner.poll() is None:
            time.sleep(POLL_S)
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, IndexError):  # it ends between two looks
                used_s = processor_s(runner.pid) or used_s
            if rows.exists():
                with rows.open("rb") as file:
                    file.seek(position)
                    data = file.read()
                position, count = position + len(data), count + data.count(b"\n")
            for mark in MEMORY_AT:
                if count >= mark - workers and mark not in memory and runner.poll() is None:
                    memory[mark] = private_bytes(runner.pid)
        assert runner.returncode == 0, runner.returncode
    with rows.open() as file:
        finished_s = [json.loads(line)["metadata"]["finished_at"] for line in file]
    return rate(finished_s), memory, used_s / len(finished_s)


def main() -> None:
    """Measure and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--profile", metavar="FOLDER", type=Path, help="write a profile of the runner to this folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = options.profile or Path(name)
        folder.mkdir(exist_ok=True)
        write_files(folder, options.prompts)
        ratios = []
        for number in range(options.rounds):
            server = [sys.executable, "-m", "environments.demo.model_server", "--script", str(folder / "script.json"), "--port", "0"]
            before = run_slots(options.prompts // 2, options.workers)
            with subprocess.Popen(server, stdout=subprocess.PIPE, text=True) as model:
                assert model.stdout is not None
                base_url = next(word for word in model.stdout.readline().split() if word.startswith("http"))
                batch, memory, runner_s = run_batch(folder, f"run-{os.getpid()}-{number}", base_url, options.workers, options.profile is not None)
                model_s = processor_s(model.pid) / options.prompts
                model.terminate()
            figures = {"batch_per_s": batch, "memory_bytes": memory, "runner_processor_ms": 1000 * runner_s, "model_server_processor_ms": 1000 * model_s}
            print(json.dumps(figures), flush=True)
            after = run_slots(options.prompts // 2, options.workers)
            ratios.append(batch / statistics.mean((before, after)))
            print(json.dumps({"slots_per_s": [before, after], "ratio": ratios[-1]}), flush=True)
        print(json.dumps({"ratio_median": statistics.median(ratios)}))


if __name__ == "__main__":
    main()
