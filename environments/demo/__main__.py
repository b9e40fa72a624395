"""A demonstration of reinforcement learning on this machine: `python -m environments.demo`.

It starts an embedded service and a model server that plays written trajectories, and rolls out one group of `swe_smith_oracle_env` on a small repository
with a real bug: once with chat completions, and once with the tokens of vLLM. One trajectory fixes the bug, one only looks, one breaks the project, and
the sandbox of the last one is killed while it runs.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import environments
from env_client import AsyncSandboxClient, EmbeddedService, SandboxError, embedded
from environments.demo.model_server import ScriptedModelServer
from environments.demo.repository import DemoRepository, RepositoryFailed, make_repository
from environments.demo.rollouts_seen import SeenRollout, add_rewards, find_problems, see_rollouts
from environments.demo.tokenizer import make_tokenizer
from environments.demo.trajectories import WAIT_FOR_KILL_S, TrajectoryName, make_script
from environments.run_progress import is_progress

ENVIRONMENT = Path(environments.__file__).parent / "swe_smith_oracle_env.py"
GROUP_SIZE = len(TrajectoryName)
#: How long the service may take until it listens, in seconds.
START_TIMEOUT_S = 90.0
#: How long one phase may take, in seconds.
PHASE_TIMEOUT_S = 600.0
_POLL_INTERVAL_S = 0.1
#: How many lines of the environment's output are shown when it fails.
_SHOWN_LINES = 30
#: The longest line of the environment's output that is read, in bytes.
_LONGEST_LINE_BYTES = 16 << 20


class PhaseFailed(Exception):
    """The environment failed. The message shows its output."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One way to ask the model.

    Args:
        name: what the table calls it.
        server_type: the type of the model server, as atroposlib calls it.
        has_logprobs: whether the environment gets the log probabilities of the tokens.
        usual_s: about how long it takes on two processor cores, in seconds.
    """

    name: str
    server_type: str
    has_logprobs: bool
    usual_s: float = 30.0


PHASES = (Phase("chat completions", "openai", has_logprobs=False), Phase("tokens of vLLM", "vllm", has_logprobs=True))


@dataclass(frozen=True, slots=True)
class PhaseResult:
    """What a phase came to.

    Args:
        phase: the phase.
        rollouts: its rollouts.
        problems: what is not as it must be.
        duration_s: how long it took, in seconds.
    """

    phase: Phase
    rollouts: Sequence[SeenRollout]
    problems: Sequence[str]
    duration_s: float


def build_command(phase: Phase, model_url: str, tokenizer: Path, repository: DemoRepository, groups: Path) -> list[str]:
    """Return the command that rolls out one group.

    Args:
        phase: the phase.
        model_url: the address of the model server.
        tokenizer: the folder of the tokenizer.
        repository: the repository.
        groups: the file to which the environment writes the group.
    """
    settings: dict[str, Any] = {
        "env.use_wandb": "false",
        "env.total_steps": 1,
        "env.group_size": GROUP_SIZE,
        "env.max_items": 1,
        "env.dataset_name": repository.dataset,
        "env.repo_base_url": repository.base_url,
        "env.tokenizer_name": tokenizer,
        "env.data_path_to_save_groups": groups,
        "env.tool_timeout_s": WAIT_FOR_KILL_S + 30,
        "env.slots_per_container": GROUP_SIZE,
        "openai.server_type": phase.server_type,
        "openai.base_url": model_url,
        "openai.model_name": "scripted",
        "openai.tokenizer_name": tokenizer,
        "openai.api_key": "none",
    }
    return [sys.executable, str(ENVIRONMENT), "process", *(word for name, value in settings.items() for word in (f"--{name}", str(value)))]


async def kill_sandbox_of_last_rollout(client: AsyncSandboxClient, server: ScriptedModelServer) -> float:
    """Wait until the other rollouts have given back their slots, then end the sandbox of the one that is left. Returns when, as `time.monotonic()`."""
    await server.wait_for_request(lambda request: request.trajectory == TrajectoryName.KILLED)
    while len(leases := (await client.leases()).leases) != 1:  # noqa: ASYNC110  # leases end in the service, not in this event loop
        await asyncio.sleep(_POLL_INTERVAL_S)
    await client.pool_delete(leases[0].pool, force=True)  # the service ends the sandboxes of the pool at once, and the environment makes it again
    return time.monotonic()


async def run_environment(command: Sequence[str], service: EmbeddedService, folder: Path, report: Callable[[str], None] = print) -> None:
    """Run the environment to its end.

    Args:
        command: the command line of the environment.
        service: the service of its slots.
        folder: its working folder.
        report: gets each line about its progress.

    Raises:
        PhaseFailed: it failed, or took too long.
    """
    environ = os.environ | {"SANDBOX_URL": service.url, "SANDBOX_TOKEN": service.token, "HF_HUB_OFFLINE": "1"}
    process = await asyncio.create_subprocess_exec(
        *command, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, limit=_LONGEST_LINE_BYTES
    )
    lines: list[str] = []
    try:
        async with asyncio.timeout(PHASE_TIMEOUT_S):
            assert process.stdout is not None
            async for line in process.stdout:
                lines.append(line.decode(errors="replace").rstrip())
                if is_progress(lines[-1]):
                    report(lines[-1])
            await process.wait()
    except TimeoutError as error:
        raise PhaseFailed(f"The environment did not end within {PHASE_TIMEOUT_S:.0f} s.") from error
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode != 0:
        raise PhaseFailed(f"The environment ended with exit code {process.returncode}:\n" + "\n".join(lines[-_SHOWN_LINES:]))


async def run_phase(
    phase: Phase, service: EmbeddedService, tokenizer: Path, repository: DemoRepository, folder: Path, report: Callable[[str], None]
) -> PhaseResult:
    """Roll out one group.

    Raises:
        PhaseFailed: the environment failed, or wrote no group.
    """
    began_s = time.monotonic()
    groups = folder / f"{phase.server_type}.jsonl"
    async with ScriptedModelServer(make_script(), tokenizer=tokenizer) as server, service.async_client() as client:
        killing = asyncio.create_task(kill_sandbox_of_last_rollout(client, server))
        try:
            await run_environment(build_command(phase, server.base_url, tokenizer, repository, groups), service, folder, report)
        finally:
            killing.cancel()
            await asyncio.wait({killing})
        killed_at_s = None if killing.cancelled() else killing.result()
        lines = groups.read_text().splitlines() if groups.exists() else []
        if len(lines) != 1:
            raise PhaseFailed(f"The environment wrote {len(lines)} groups, and not one.")
        group = json.loads(lines[0])
        rollouts = add_rewards(server.script, see_rollouts(server.script, server.requests, killed_at_s), group)
    problems = find_problems(rollouts, group, has_logprobs=phase.has_logprobs)
    return PhaseResult(phase, rollouts, problems, time.monotonic() - began_s)


def build_table(results: Sequence[PhaseResult]) -> Table:
    """Return the rollouts as a table, with a line for each phase above its rollouts."""
    table = Table("rollout", "reward", "turns", "calls", "tokens", "time", "outcome", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for result in results:
        table.add_section()
        table.add_row(f"[bold]{result.phase.name}[/]")
        for one in result.rollouts:
            reward = "–" if one.reward is None else f"{one.reward:.2f}"
            colour = "green" if one.as_expected else "red"
            tokens = str(one.trained_tokens) if one.trained_tokens else "–"
            table.add_row(one.trajectory, f"[{colour}]{reward}[/]", str(one.turns), str(one.tool_calls), tokens, f"{one.duration_s:.1f} s", one.outcome)
    return table


async def run_demo(console: Console) -> bool:
    """Run the whole demonstration; return whether everything happened as expected."""
    with tempfile.TemporaryDirectory(prefix="demo-rl-") as name, embedded(start_s=START_TIMEOUT_S) as service:
        folder = Path(name)
        repository, tokenizer = make_repository(folder / "repositories"), make_tokenizer(folder / "tokenizer")
        console.print(f"service     {service.url}")
        console.print(f"repository  {repository.folder.relative_to(folder)}, bug at {repository.base_commit[:12]}")
        results = []
        for phase in PHASES:
            console.print(
                f"rolling out a group of {GROUP_SIZE} with {phase.name}: the slots are set up with the repository, the scripted model works in them, one "
                f"sandbox is killed and its rollout repeated, and the tests of the project score each rollout; this takes about {phase.usual_s:.0f} s"
            )
            results.append(
                await run_phase(phase, service, tokenizer, repository, folder, lambda line: console.print(f"  {line}", markup=False, soft_wrap=True))
            )
            console.print(f"  done after {results[-1].duration_s:.0f} s")
    console.print(build_table(results))
    problems = [f"{result.phase.name}: {problem}" for result in results for problem in result.problems]
    for problem in problems:
        console.print(f"[red]{problem}[/]")
    return not problems


def main() -> int:
    """Run the demonstration; return 0 if every reward is what it must be, else 1."""
    console = Console(highlight=False)
    try:
        success = asyncio.run(run_demo(console))
    except (PhaseFailed, RepositoryFailed, SandboxError) as error:
        console.print(str(error), style="red", markup=False)
        return 1
    console.print("[green]every reward is what it must be[/]" if success else "[red]not every reward is what it must be[/]")
    return 0 if success else 1


if __name__ == "__main__":
    raise SystemExit(main())
