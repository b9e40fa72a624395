"""The command line of an environment as a process: errors in one sentence, SIGINT and SIGTERM that release everything."""

from __future__ import annotations

import asyncio
import signal
import sys
import warnings
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError

from environments.dataset_rows import DatasetError
from environments.env_settings import describe_validation_error
from environments.rollouts.collector import RunFailed
from environments.rollouts.pool_spec import SettingsError
from environments.rollouts.service import PoolUnavailable
from environments.toolsets import ToolsetError

#: What a person can repair.
_EXPLAINED = (DatasetError, PoolUnavailable, RunFailed, SettingsError, ToolsetError)
_FAILED, _INTERRUPTED, _TERMINATED = 1, 128 + signal.SIGINT, 128 + signal.SIGTERM


def run_cli(cli: Callable[[], None], name: str) -> NoReturn:
    """Run atroposlib's command line, and end the process with an exit code.

    Args:
        cli: the command line.
        name: the name of the environment.
    """
    warnings.filterwarnings("ignore", message="You are using a local Base URL|Trainer requested to ignore max length")  # both are always so in `process`
    sys.argv += wandb_argument(sys.argv[1:])
    try:
        cli()
    except _EXPLAINED as error:
        _end(f"{name}: {error}", _FAILED)
    except ValidationError as error:
        _end(f"{name}: {describe_validation_error(error)}", _FAILED)
    except KeyboardInterrupt:
        _end(f"{name}: interrupted; all slots are released", _INTERRUPTED)
    except asyncio.CancelledError:  # by SIGTERM
        _end(f"{name}: terminated; all slots are released", _TERMINATED)
    sys.exit(0)


def wandb_argument(arguments: Sequence[str]) -> list[str]:
    """Return the argument that switches Weights & Biases off, unless the command line or its YAML file decides about it. atroposlib switches it on."""
    if not arguments or arguments[0] not in ("process", "evaluate") or any(argument.startswith("--env.use_wandb") for argument in arguments):
        return []
    for index, argument in enumerate(arguments):
        path = (
            argument.partition("=")[2]
            if argument.startswith("--config=")
            else arguments[index + 1]
            if argument == "--config" and index + 1 < len(arguments)
            else ""
        )
        with suppress(OSError):  # atroposlib reports a file that cannot be read
            if path and "use_wandb" in Path(path).read_text(encoding="utf-8"):
                return []
    return ["--env.use_wandb=false"]


@contextmanager
def terminable() -> Iterator[None]:
    """Cancel the current task at SIGTERM, as `asyncio.run` does at SIGINT."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    try:
        loop.add_signal_handler(signal.SIGTERM, task.cancel)
    except (ValueError, RuntimeError):  # not the main thread: whoever runs the thread ends it
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


async def run_until_failure(work: Coroutine[Any, Any, None], failure: asyncio.Future[None]) -> None:
    """Run a coroutine until it ends, or until `failure` gets an exception, which is raised then."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task, failure}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
    if failure.done():
        failure.result()
    task.result()


def remove_if_empty(path: Path) -> None:
    """Remove a file into which nothing was written: it would only be in the way."""
    if path.is_file() and not path.stat().st_size:
        path.unlink()


def _end(sentence: str, exit_code: int) -> NoReturn:
    sys.stderr.write(sentence + "\n")
    sys.exit(exit_code)
