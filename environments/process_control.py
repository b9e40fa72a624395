"""The command line of an environment as a process: errors in one sentence, SIGINT and SIGTERM that release everything."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import yaml
from pydantic import ValidationError

from environments.dataset_rows import DatasetError
from environments.env_settings import describe_validation_error
from environments.rollouts.collector import RunFailed
from environments.rollouts.pool_spec import SettingsError
from environments.rollouts.service import PoolUnavailable
from environments.toolsets import ToolsetError

#: What a person can repair.
_EXPLAINED = (DatasetError, PoolUnavailable, RunFailed, SettingsError, ToolsetError)
_NEGATIVE_NUMBER = re.compile(r"-\d.*")
#: What a YAML file of settings has at its top.
_CONFIG_SECTIONS = ("env", "openai", "slurm", "testing")
#: The names of the threads of reward functions begin with this.
SCORING_THREAD_PREFIX = "scoring"
#: How long the process waits for reward functions that still run at its end, in seconds.
_THREADS_END_S = 2.0
_FAILED, _INTERRUPTED, _TERMINATED = 1, 128 + signal.SIGINT, 128 + signal.SIGTERM


def run_cli(cli: Callable[[], None], name: str) -> NoReturn:
    """Run atroposlib's command line, and end the process with an exit code.

    Args:
        cli: the command line.
        name: the name of the environment.
    """
    warnings.filterwarnings("ignore", message="You are using a local Base URL|Trainer requested to ignore max length")  # both are always so in `process`
    try:
        check_arguments(sys.argv[1:])
        sys.argv += wandb_argument(sys.argv[1:])
        cli()
    except _EXPLAINED as error:
        _end(f"{name}: {error}", _FAILED)
    except ValidationError as error:
        _end(f"{name}: {describe_validation_error(error)}", _FAILED)
    except KeyboardInterrupt as error:  # the first SIGINT cancels the run, and `asyncio.run` raises this at its end; the second one raises it at once
        _end("; ".join([f"{name}: interrupted", *getattr(error.__context__, "__notes__", ())]), _INTERRUPTED)
    except asyncio.CancelledError as error:  # by SIGTERM
        _end("; ".join([f"{name}: terminated", *getattr(error, "__notes__", ())]), _TERMINATED)
    _exit(0)


def check_arguments(arguments: Sequence[str]) -> None:
    """Check what atroposlib's command line does not explain.

    Raises:
        SettingsError: there is no command, a negative value is not written as the parser reads it, or the YAML file of the settings cannot be used.
    """
    if not arguments:
        raise SettingsError("name a command: serve, process or evaluate; --help describes them")
    for option, value in itertools.pairwise(arguments):
        if option.startswith("--") and "=" not in option and _NEGATIVE_NUMBER.fullmatch(value):  # the parser would take the option for a switch
            raise SettingsError(f"write a negative value with an equals sign: {option}={value}")
    path = config_path(arguments)
    if path is None:
        return
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"--config: the file {path} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise SettingsError(f"--config: the file {path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(settings, dict):
        raise SettingsError(f"--config: the file {path} must have settings under the names env and openai")
    unknown = sorted(str(name) for name in settings if name not in _CONFIG_SECTIONS)
    if unknown:
        raise SettingsError(f"--config: the file {path} has the unknown name {unknown[0]!r}; there are {', '.join(_CONFIG_SECTIONS)}")


def config_path(arguments: Sequence[str]) -> Path | None:
    """Return the YAML file of the settings that a command line names, or None."""
    for index, argument in enumerate(arguments):
        if argument.startswith("--config="):
            return Path(argument.partition("=")[2])
        if argument == "--config" and index + 1 < len(arguments):
            return Path(arguments[index + 1])
    return None


def wandb_argument(arguments: Sequence[str]) -> list[str]:
    """Return the argument that switches Weights & Biases off, unless the command line or its YAML file decides about it. atroposlib switches it on."""
    if not arguments or arguments[0] not in ("process", "evaluate") or any(argument.startswith("--env.use_wandb") for argument in arguments):
        return []
    path = config_path(arguments)
    with suppress(OSError):  # `check_arguments` reports a file that cannot be read
        if path is not None and "use_wandb" in path.read_text(encoding="utf-8"):
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
    _exit(exit_code)


def _exit(exit_code: int) -> NoReturn:
    """End the process. The interpreter would wait for reward functions that still run, and nothing can end a function that never returns."""
    deadline_s = time.monotonic() + _THREADS_END_S
    threads = [thread for thread in threading.enumerate() if thread.name.startswith(SCORING_THREAD_PREFIX)]
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    sys.exit(exit_code)
