"""The command line of the batch runner."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from env_client import SandboxError, ServiceNotFound
from env_client.discovery import Endpoint, find_service
from environments.batch.failures import FINISHED, REFUSED, SOME_FAILED, STOPPED, BatchFailure, RunRefused
from environments.batch.files.prompt_file import DatasetScan, scan_dataset
from environments.batch.files.run_folder import EarlierRows, RunFolder, check_run_name, open_run_folder
from environments.batch.model_client import ModelClient
from environments.batch.progress import ProgressDisplay, make_console, print_distributions, print_scan, print_statistics
from environments.batch.rows.statistics import RunStatistics
from environments.batch.runner import BatchRunner
from environments.batch.settings import BatchSettings, BrokenLines, Duplicates, check_settings
from environments.batch.slots import RunSlots, describe_pool_error, plan_run_pool
from environments.rollouts.service import ConnectionSettings, PoolConnection, PoolUnavailable

#: The base class of the errors for wrong arguments. It belongs to click, or to the copy of click inside newer versions of typer.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]
_EPILOG = (
    "The sandbox service is the one in SANDBOX_URL and SANDBOX_TOKEN; without them, one is started for the run. "
    "Exit codes: 0 every prompt has a trajectory; 1 some prompts failed; 2 the run cannot begin; 3 the run was stopped; 130 Ctrl-C; 143 SIGTERM. "
    "A run that was stopped or killed goes on with --resume."
)

#: How long the end of a run may take after a signal, in seconds. Rows are on the disk or with the kernel by then.
MAX_STOP_S = 15.0

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, context_settings={"help_option_names": ["--help", "-h"]})


def _list_distributions(requested: bool) -> None:
    if requested:
        print_distributions(make_console(stderr=False))
        raise typer.Exit


@app.command(epilog=_EPILOG)
def batch(
    dataset_file: Annotated[Path, typer.Option("--dataset_file", help="The JSON Lines file; each line has a `prompt`, and may name a `pool` or an `image`.")],
    batch_size: Annotated[
        int, typer.Option("--batch_size", min=1, help="After how many rows the files are flushed to the disk and the checkpoint is replaced.")
    ],
    run_name: Annotated[str, typer.Option("--run_name", help="The run is written to data/<run_name>/ in the current folder.")],
    num_workers: Annotated[int, typer.Option("--num_workers", min=1, help="How many prompts run at the same time, each in a slot of its own.")] = 4,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was stopped or killed.")] = False,
    distribution: Annotated[str | None, typer.Option("--distribution", help="The distribution of tool sets; default all tools of the pool.")] = None,
    max_samples: Annotated[int | None, typer.Option("--max_samples", min=1, help="Use only so many prompts of the file.")] = None,
    max_turns: Annotated[int, typer.Option("--max_turns", min=1, help="The most answers of the model for one prompt.")] = 30,
    model: Annotated[str, typer.Option("--model", envvar="ATROPOS_SERVER_MODEL", help="The model, as its server knows it.")] = "",
    base_url: Annotated[
        str, typer.Option("--base_url", envvar=["OPENAI_BASE_URL", "ATROPOS_SERVER_BASE_URL"], help="The address of the model server, with /v1.")
    ] = "",
    api_key: Annotated[str, typer.Option("--api_key", envvar="OPENAI_API_KEY", show_envvar=True, help="The key of the model server.")] = "",
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="The sampling temperature.")] = 1.0,
    max_tokens: Annotated[int | None, typer.Option("--max_tokens", min=1, help="The most tokens of one answer.")] = None,
    max_context_tokens: Annotated[
        int | None, typer.Option("--max_context_tokens", min=1, help="Shorten longer conversations for the model; the trajectories stay whole.")
    ] = None,
    ephemeral_system_prompt: Annotated[
        str | None, typer.Option("--ephemeral_system_prompt", help="A system prompt for the model that is not written to the trajectories.")
    ] = None,
    pool: Annotated[str | None, typer.Option("--pool", help="The pool of the slots; default one that the runner makes.")] = None,
    image_backend: Annotated[str, typer.Option("--image_backend", help="The backend of the pools for rows with an image.")] = "docker",
    duplicates: Annotated[Duplicates, typer.Option("--duplicates", help="Whether lines with the same content each get a trajectory.")] = Duplicates.KEEP,
    broken_lines: Annotated[
        BrokenLines, typer.Option("--broken_lines", help="Whether broken lines are skipped, or the run does not begin.")
    ] = BrokenLines.SKIP,
    tool_timeout_s: Annotated[float, typer.Option("--tool_timeout_s", min=0.1, help="The timeout of a tool call, in seconds.")] = 120.0,
    max_attempts: Annotated[int, typer.Option("--max_attempts", min=1, help="Attempts for a prompt whose slot or model server fails.")] = 3,
    max_failures: Annotated[int, typer.Option("--max_failures", min=1, help="Stop after so many such prompts in a row.")] = 10,
    acquire_timeout_s: Annotated[float, typer.Option("--acquire_timeout_s", min=1.0, help="How long a prompt waits for a slot, in seconds.")] = 600.0,
    lease_ttl_s: Annotated[float, typer.Option("--lease_ttl_s", min=3.0, help="How long slots stay leased if the runner is killed, in seconds.")] = 60.0,
    model_timeout_s: Annotated[float, typer.Option("--model_timeout_s", min=0.1, help="How long one answer of the model may take, in seconds.")] = 600.0,
    model_retries: Annotated[int, typer.Option("--model_retries", min=0, help="How often a request to the model server is repeated.")] = 5,
    list_distributions: Annotated[
        bool, typer.Option("--list_distributions", is_eager=True, callback=_list_distributions, help="List the distributions, and end.")
    ] = False,
) -> int:
    """Run an agent on every prompt of a file, each in a slot of its own, and write the trajectories in ShareGPT form."""
    values = dict(locals())
    resumes = values.pop("resume")
    del values["list_distributions"]
    return run_batch(BatchSettings(**values), resume=resumes)


def main(argv: Sequence[str]) -> int:
    """Run a command line.

    Args:
        argv: the arguments without the program's name.

    Returns:
        The exit code.
    """
    console = make_console(stderr=True)
    try:
        returned = app(list(argv), prog_name="python -m environments.batch", standalone_mode=False)
        return returned if isinstance(returned, int) else FINISHED
    except BatchFailure as failure:
        console.print(f"batch: {failure.sentence}\n  {failure.next_step}", markup=False)
        if failure.exit_code == STOPPED:
            _print_how_to_resume(argv)
        return failure.exit_code
    except _Interrupted as interrupted:
        console.print(f"batch: ended by {signal.Signals(interrupted.number).name}; what was written is complete", markup=False)
        _print_how_to_resume(argv)
        return 128 + interrupted.number
    except KeyboardInterrupt:  # before the run had begun
        return 128 + signal.SIGINT
    except _UsageError as error:
        message = error.format_message() if hasattr(error, "format_message") else str(error)
        console.print(f"batch: {message}\n  `python -m environments.batch --help` lists the options", markup=False)
        return REFUSED


def run_batch(settings: BatchSettings, *, resume: bool) -> int:
    """Run the prompts of a dataset.

    Args:
        settings: the settings of the run.
        resume: whether the run may have begun before.

    Returns:
        The exit code.

    Raises:
        BatchFailure: the run cannot begin, or cannot go on.
    """
    console = make_console(stderr=True)
    check_run_name(settings.run_name)
    check_settings(settings)
    scan = scan_dataset(settings.dataset_file, merge_duplicates=settings.duplicates is Duplicates.MERGE, max_samples=settings.max_samples)
    skips = settings.broken_lines is BrokenLines.SKIP
    if scan.broken_count and not skips:
        print_scan(console, str(settings.dataset_file), scan, skipped=False)
        raise RunRefused(f"{settings.dataset_file}: {scan.broken_lines[0]}", "correct it, or leave out every broken line with --broken_lines skip")
    with open_run_folder(settings, resume=resume) as folder:
        print_scan(console, str(settings.dataset_file), scan, skipped=True)
        statistics = RunStatistics()
        earlier = folder.load_earlier_rows(statistics.add_row)
        if resume:
            text = f"{folder.path}: {statistics.completed_count} of {scan.prompt_count} prompts have a trajectory already" if not folder.is_new else "a new run"
            removed = f"; an incomplete last row of {earlier.removed_bytes} bytes was removed, and its prompt runs again" if earlier.removed_bytes else ""
            console.print(text + removed, markup=False)
        remaining_count = scan.prompt_count - statistics.completed_count
        if remaining_count and not os.environ.get("SANDBOX_URL"):
            console.print("SANDBOX_URL is not set: starting a sandbox service for this run …", markup=False)
        with ProgressDisplay(console, scan.prompt_count, statistics.completed_count, min(settings.num_workers, max(1, remaining_count))) as display:
            try:
                asyncio.run(_run_connected(settings, folder, scan, earlier, statistics, display))
            except PoolUnavailable as error:
                folder.discard()
                next_step = "nothing was run; correct SANDBOX_URL, SANDBOX_TOKEN or --pool, or unset SANDBOX_URL, and the run starts a service of its own"
                raise RunRefused(describe_pool_error(error), next_step) from error
        print_statistics(make_console(stderr=False), folder.read_statistics())
    return SOME_FAILED if statistics.failed_count else FINISHED


def _find_named_service() -> Endpoint | None:
    """Return the service that SANDBOX_URL names, or None.

    Raises:
        PoolUnavailable: SANDBOX_URL is not an address.
    """
    if not os.environ.get("SANDBOX_URL"):
        return None
    try:
        return find_service()
    except ServiceNotFound as error:
        raise PoolUnavailable(f"sandbox_url: {error.detail}") from error


async def _run_connected(
    settings: BatchSettings, folder: RunFolder, scan: DatasetScan, earlier: EarlierRows, statistics: RunStatistics, display: ProgressDisplay
) -> None:
    """Run the prompts with a connection to the service and one to the model server."""
    service = _find_named_service()
    connection_settings = ConnectionSettings(
        sandbox_url=service.url if service else None,
        sandbox_token=service.token if service else None,
        lease_ttl_s=settings.lease_ttl_s,
        run_id=folder.run_id,
    )
    model = ModelClient(
        base_url=settings.base_url,
        api_key=settings.api_key,
        model=settings.model,
        timeout_s=settings.model_timeout_s,
        retries=settings.model_retries,
        max_connections=settings.num_workers,
    )
    runner = BatchRunner(settings, folder, scan, earlier, statistics, display)
    with _cancel_on_signals(display.console):
        try:
            async with model, PoolConnection(plan_run_pool(settings), connection_settings) as connection:
                slots = RunSlots(connection, settings)
                if not folder.is_new:
                    await slots.release_earlier_slots()
                await runner.run(slots, model)
        except SandboxError as error:
            raise BatchFailure(f"the sandbox service failed: {error}", "correct the cause, and start with --resume") from error


class _Interrupted(BaseException):
    """A signal has ended the run.

    Args:
        number: the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@contextmanager
def _cancel_on_signals(console: Console) -> Iterator[None]:
    """Make SIGINT, SIGTERM and SIGHUP cancel the current task, so that it releases its slots. A second signal ends the process at once.

    Args:
        console: where it is said that the run ends.

    Raises:
        _Interrupted: a signal came.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    received: list[int] = []

    def receive(number: int) -> None:
        if received:
            os._exit(128 + number)
        received.append(number)
        console.print(
            f"batch: {signal.Signals(number).name}: ending the rollouts that run and releasing their slots, at most {MAX_STOP_S:.0f} s; "
            "a second signal ends the process at once, and loses no row",
            markup=False,
        )
        loop.call_later(MAX_STOP_S, give_up, number)
        task.cancel()

    def give_up(number: int) -> None:
        console.print("batch: the slots could not be released in time; they end by themselves (--lease_ttl_s), or with --resume", markup=False)
        os._exit(128 + number)

    # nohup(1) ignores SIGHUP for the programs that it starts, and a shell SIGINT for those in the background; both must stay ignored.
    numbers = [number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    for number in numbers:
        loop.add_signal_handler(number, receive, number)
    try:
        yield
    except asyncio.CancelledError:
        if not received:
            raise
        raise _Interrupted(received[0]) from None
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _print_how_to_resume(argv: Sequence[str]) -> None:
    """Print the command that goes on with the run, without the key of the model server."""
    words: list[Any] = []
    skips_next = False
    for word in argv:
        if skips_next or word == "--resume" or word.startswith("--api_key="):
            skips_next = False
            continue
        if word == "--api_key":
            skips_next = True
            continue
        words.append(word)
    command = shlex.join(["python", "-m", "environments.batch", *words, "--resume"])
    sys.stderr.write(f"  go on with it: {command}\n")
