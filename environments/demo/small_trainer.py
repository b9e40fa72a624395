"""A GRPO trainer of a few lines for a model of a few hundred parameters, which learns to choose the right command for each task of `terminal_test_env`.

It serves the model over `/generate`, takes batches from atroposlib's `run-api`, and changes the weights that the model server uses. With `--api-url`,
the API and the environment run elsewhere; without it, this program starts both::

    python -m environments.demo.small_trainer
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import httpx

import environments
from environments.demo.model_server import LocalServer
from environments.demo.small_model.grpo import ScoredChoice, clipped_loss, group_advantages
from environments.demo.small_model.policy import CommandPolicy, describe_message, find_user_message
from environments.demo.small_model.rollout_api import RolloutApi
from environments.demo.small_model.server import PolicyApplication
from environments.demo.tokenizer import TextTokenizer, make_tokenizer

V = TypeVar("V")

#: What the model can do: one command that is right for each task of `terminal_test_env`, and one that never is.
COMMANDS = (
    "echo 'Hello from the sandbox' > greeting.txt",
    "wc -l < numbers.txt > count.txt",
    "awk -F, '{ sum += $2 } END { print sum }' orders.csv > total.txt",
    "mkdir archive && mv *.log archive/",
    "ls -la",
)
ENVIRONMENT = Path(environments.__file__).parent / "terminal_test_env.py"
#: The mask of a token that the model has not written.
_NOT_TRAINED = -100
#: How many lines of the output of a failed process are shown.
_SHOWN_LINES = 20
#: How long the trainer takes at most for a batch that waits for it, in seconds.
_LAST_BATCH_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerSettings:
    """How the trainer learns.

    Args:
        step_count: how many batches it takes.
        group_size: how many rollouts of each prompt the environment makes.
        groups_per_batch: how many groups a batch has.
        learning_rate: how far each update goes.
        epochs: how many updates a batch gives.
        clip: how far from 1 the ratio of the present to the sampled probability counts.
        max_token_len: rollouts with so many tokens, or more, are left out by the environment.
        seed: the seed of the model's samples.
    """

    step_count: int = 8
    group_size: int = 4
    groups_per_batch: int = 4
    learning_rate: float = 10.0
    epochs: int = 4
    clip: float = 0.5
    max_token_len: int = 8192
    seed: int = 0

    @property
    def batch_size(self) -> int:
        """How many rollouts a batch has."""
        return self.group_size * self.groups_per_batch


@dataclass(frozen=True, slots=True)
class Step:
    """What a step came to.

    Args:
        number: its number, counted from 1.
        mean_reward: the mean reward of the rollouts of the batch.
        loss: the loss before the last update; before the first one it is 0, because the advantages of a group add up to 0.
    """

    number: int
    mean_reward: float
    loss: float


class TrainingFailed(Exception):
    """The training cannot go on. The message says why."""


def read_group(group: Mapping[str, Any], policy: CommandPolicy, tokenizer: TextTokenizer) -> list[ScoredChoice]:
    """Return what GRPO uses of a group: the prompt, the choice, its log probability when it was sampled, and the advantage of each rollout.

    Args:
        group: a group of a batch, with `tokens`, `masks`, `scores` and `inference_logprobs`.
        policy: the policy.
        tokenizer: decodes the prompts.

    Raises:
        TrainingFailed: the group has no log probabilities.
        ValueError: another model has written the tokens.
    """
    if group.get("inference_logprobs") is None:
        raise TrainingFailed("The environment sent no log probabilities. Run it with --openai.server_type vllm.")
    choices = []
    sequences = zip(group["tokens"], group["masks"], group["inference_logprobs"], group_advantages(group["scores"]), strict=True)
    for tokens, masks, logprobs, advantage in sequences:
        trained = [index for index, mask in enumerate(masks) if mask != _NOT_TRAINED]
        # All tokens but those in which the commands differ have the probability 1, so that this sum is the log probability of the command.
        sampled_logprob = sum(logprobs[index] for index in trained)
        choice = policy.find_choice([tokens[index] for index in trained])
        features = describe_message(find_user_message(tokenizer.decode(tokens)))
        choices.append(ScoredChoice(features, choice, sampled_logprob, advantage))
    return choices


def update_policy(policy: CommandPolicy, rollouts: Sequence[ScoredChoice], settings: TrainerSettings) -> float:
    """Change the weights of the policy by the rollouts of a batch, and return the loss before the last update.

    Args:
        policy: the policy.
        rollouts: the rollouts.
        settings: how the trainer learns.
    """
    loss = 0.0
    for _ in range(settings.epochs):
        loss, gradient = clipped_loss(policy, rollouts, settings.clip)
        policy.weights = policy.weights - settings.learning_rate * gradient
    return loss


async def train(api: RolloutApi, policy: CommandPolicy, tokenizer: TextTokenizer, settings: TrainerSettings, report: Callable[[Step], None]) -> list[Step]:
    """Take batches and learn from them.

    Args:
        api: the rollout API, at which the trainer registers.
        policy: the policy, whose weights change.
        tokenizer: the tokenizer of the model.
        settings: how the trainer learns.
        report: called after each step.

    Raises:
        TrainingFailed: the rollouts cannot be used.
        httpx.HTTPError: the API does not answer.
    """
    await api.register(batch_size=settings.batch_size, max_token_len=settings.max_token_len, num_steps=settings.step_count)
    steps = []
    for number in range(1, settings.step_count + 1):
        batch = await api.next_batch()
        rollouts = [rollout for group in batch for rollout in read_group(group, policy, tokenizer)]
        mean_reward = fmean(score for group in batch for score in group["scores"])
        steps.append(Step(number, mean_reward, update_policy(policy, rollouts, settings)))
        report(steps[-1])
    return steps


def environment_command(api_url: str, model_url: str, tokenizer: Path, settings: TrainerSettings) -> list[str]:
    """Return the command of the environment that rolls out for the trainer.

    Args:
        api_url: the address of the rollout API.
        model_url: the address of the model server.
        tokenizer: the folder of the tokenizer.
        settings: how the trainer learns.
    """
    options: dict[str, Any] = {
        "env.rollout_server_url": api_url,
        "env.total_steps": settings.step_count - 1,  # atroposlib ends when more steps than this are done or waiting
        "env.group_size": settings.group_size,
        "env.batch_size": settings.batch_size,
        "env.max_num_workers": 2,  # groups at once
        "env.max_batches_offpolicy": 1,
        "env.ensure_scores_are_not_same": "false",  # otherwise the groups are left out in which every rollout is right
        "env.slots_per_container": 2 * settings.group_size,
        "env.max_containers": 1,
        "env.distribution": "terminal_only",
        "env.tokenizer_name": tokenizer,
        "openai.server_type": "vllm",
        "openai.base_url": model_url,
        "openai.tokenizer_name": tokenizer,
    }
    return [sys.executable, str(ENVIRONMENT), "serve", *(word for name, value in options.items() for word in (f"--{name}", str(value)))]


@asynccontextmanager
async def running(command: Sequence[str], log_path: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a process for the duration of a block, with its output in a file. At the end of the block it is ended with SIGTERM, if it still runs."""
    with log_path.open("wb") as log:
        process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | {"HF_HUB_OFFLINE": "1"})
        try:
            yield process
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.terminate()
            await process.wait()


async def train_here(settings: TrainerSettings, folder: Path, report: Callable[[Step], None]) -> list[Step]:
    """Start the rollout API and the environment on this machine, train, and wait for the end of the environment.

    Args:
        settings: how the trainer learns.
        folder: where the tokenizer and the output of the processes are kept.
        report: called after each step.

    Raises:
        TrainingFailed: a process failed, or the rollouts cannot be used.
    """
    tokenizer_folder = make_tokenizer(folder / "tokenizer")
    tokenizer = TextTokenizer.load(tokenizer_folder)
    policy = CommandPolicy(COMMANDS, tokenizer)
    port = find_free_port()
    api_url = f"http://127.0.0.1:{port}"
    api_log, environment_log = folder / "run-api.log", folder / "environment.log"
    async with (
        LocalServer(PolicyApplication(policy, tokenizer, settings.seed)) as server,
        running([sys.executable, "-m", "atroposlib.cli.run_api", "--host", "127.0.0.1", "--port", str(port)], api_log) as api_process,
        running(environment_command(api_url, server.base_url, tokenizer_folder, settings), environment_log) as environment,
        RolloutApi(api_url) as api,
    ):
        await _unless_ended(api.wait_until_ready(), api_process, api_log)
        steps = await _unless_ended(train(api, policy, tokenizer, settings, report), environment, environment_log)
        if await environment.wait() != 0:
            raise TrainingFailed(_describe_end(environment, environment_log))
    return steps


async def _unless_ended(work: Coroutine[Any, Any, V], process: asyncio.subprocess.Process, log_path: Path) -> V:
    """Return the result of a coroutine.

    Raises:
        TrainingFailed: the process failed before.
    """
    task, end = asyncio.ensure_future(work), asyncio.ensure_future(process.wait())
    try:
        await asyncio.wait({task, end}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done() and process.returncode == 0:
            await asyncio.wait({task}, timeout=_LAST_BATCH_TIMEOUT_S)  # the environment ends when the last batch waits for the trainer
        if not task.done():
            raise TrainingFailed(_describe_end(process, log_path))
        return task.result()
    finally:
        end.cancel()
        task.cancel()
        await asyncio.wait({task})


def _describe_end(process: asyncio.subprocess.Process, log_path: Path) -> str:
    lines = log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-_SHOWN_LINES:]
    return f"{log_path.stem} ended with exit code {process.returncode}:\n" + "\n".join(lines)


def find_free_port() -> int:
    """Return a port of this machine that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


async def train_elsewhere(settings: TrainerSettings, api_url: str, port: int, tokenizer_folder: Path, report: Callable[[Step], None]) -> list[Step]:
    """Serve the model and train with an API and environments that somebody else starts.

    Args:
        settings: how the trainer learns.
        api_url: the address of the rollout API.
        port: the port of the model server.
        tokenizer_folder: where the tokenizer is made, which the environment needs.
        report: called after each step.
    """
    tokenizer = TextTokenizer.load(make_tokenizer(tokenizer_folder))
    policy = CommandPolicy(COMMANDS, tokenizer)
    async with LocalServer(PolicyApplication(policy, tokenizer, settings.seed), port), RolloutApi(api_url) as api:
        await api.wait_until_ready()
        return await train(api, policy, tokenizer, settings, report)


def print_step(step: Step) -> None:
    """Print a step."""
    sys.stdout.write(f"step {step.number}: mean reward {step.mean_reward:.2f}, loss {step.loss:+.3f}\n")
    sys.stdout.flush()


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m environments.demo.small_trainer", description="Train a small model on terminal_test_env with GRPO.")
    parser.add_argument("--steps", type=int, default=TrainerSettings().step_count, help="how many batches the trainer takes")
    parser.add_argument("--api-url", help="the address of a run-api that runs; default: start one, and the environment")
    parser.add_argument("--port", type=int, default=9004, help="with --api-url: the port of the model server")
    parser.add_argument("--tokenizer", type=Path, default=Path("tokenizer"), help="with --api-url: the folder in which the tokenizer is made")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Train the small model. Returns the exit code."""
    options = make_parser().parse_args(arguments)
    settings = TrainerSettings(step_count=options.steps)
    try:
        if options.api_url is not None:
            asyncio.run(train_elsewhere(settings, options.api_url, options.port, options.tokenizer, print_step))
        else:
            with tempfile.TemporaryDirectory(prefix="small-trainer-") as folder:
                asyncio.run(train_here(settings, Path(folder), print_step))
    except httpx.HTTPError as error:
        sys.stderr.write(f"The rollout API does not answer the trainer any more, or refuses its request: {error}\n")
        return 1
    except (TrainingFailed, OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
