"""The commands of `sandbox`, and the one edge at which what goes wrong becomes a sentence and an exit code."""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
import typer.core

from env_client._version import __version__
from env_client.cli import OWN_FAILURE, commands_files, commands_leases, commands_pools
from env_client.cli.commands_doctor import doctor
from env_client.cli.failures import Failure, Interrupted, document_of, failure_of
from env_client.cli.screen import Screen
from env_client.errors import SandboxError

#: What is wrong with the words of a command line, whichever library typer takes it from.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]
_EPILOG = (
    "Exit codes: those of the command that was run; 124 it timed out; 125 sandbox could not do its part; 130 Ctrl-C; 137 out of memory; "
    "141 nobody reads its output; 1 doctor or verify found something. "
    "The service: SANDBOX_URL and SANDBOX_TOKEN, else the one of this machine."
)


def _add(to: typer.Typer, name: str, function: Callable[..., None], usage: str, summary: str, *, options_first: bool = False) -> None:
    """Add a command.

    Args:
        to: the group that it is of.
        name: as it is typed.
        function: what does it; its docstring is the help.
        usage: the words it takes.
        summary: for the list of commands.
        options_first: whether its options end where a command to run begins.
    """

    class Command(typer.core.TyperCommand):
        def collect_usage_pieces(self, ctx: Any) -> list[str]:
            return [usage]

    to.command(name, cls=Command, short_help=summary, context_settings={"allow_interspersed_args": False} if options_first else None)(_ending(function))


def _ending(function: Callable[..., None]) -> Callable[..., None]:
    """A command whose interruptions are exit codes before typer makes its own of them."""

    @functools.wraps(function)
    def run_it(*args: Any, **options: Any) -> None:
        try:
            function(*args, **options)
        except Interrupted as interrupted:
            raise typer.Exit(128 + interrupted.signal_number) from None
        except KeyboardInterrupt:
            raise typer.Exit(128 + signal.SIGINT) from None
        except BrokenPipeError:
            raise typer.Exit(_nobody_reads()) from None

    return run_it


def _nobody_reads() -> int:
    # The interpreter would complain about it once more when it flushes at its end.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return 128 + signal.SIGPIPE


app = typer.Typer(
    name="sandbox",
    help="Slots of a sandbox pool: take one, run commands in it, copy files, give it back.",
    epilog=_EPILOG,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # the same text on a terminal and in a file
)


def _version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"sandbox {__version__}\n")
        raise typer.Exit


@app.callback()
def sandbox(version: Annotated[bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)] = False) -> None:
    """Take what goes before the command."""


_add(app, "run", commands_leases.run, "[OPTIONS] -- CMD...", "Run a command in a fresh slot, and give it back.", options_first=True)
_add(app, "acquire", commands_leases.acquire, "[OPTIONS]", "Take a slot; prints its lease.")
_add(app, "exec", commands_leases.exec_, "[OPTIONS] LEASE -- CMD...", "Run a command in a slot.", options_first=True)
_add(app, "cp", commands_files.cp, "[OPTIONS] SOURCE TARGET", "Copy files and folders in and out.")
_add(app, "ls", commands_files.ls, "[OPTIONS] LEASE[:FOLDER]", "List a folder of a slot.")
_add(app, "leases", commands_leases.leases, "[OPTIONS]", "List the leases you hold.")
_add(app, "renew", commands_leases.renew, "[OPTIONS] LEASE...", "Keep leases for longer.")
_add(app, "narrow", commands_leases.narrow, "[OPTIONS] LEASE", "Take network or cache away from a slot.")
_add(app, "release", commands_leases.release, "[OPTIONS] [LEASE...]", "Give slots back.")
_add(app, "pools", commands_pools.pools, "[OPTIONS] [NAME]", "List the pools.")
_add(app, "sandboxes", commands_pools.sandboxes, "[OPTIONS]", "List the sandboxes.")
_add(app, "drain", commands_pools.drain, "[OPTIONS] SANDBOX", "Give no new leases in a sandbox.")
_add(app, "doctor", doctor, "[OPTIONS]", "Say what this machine can do, and how to get the rest.")
pool_commands = typer.Typer(no_args_is_help=True, help="Make, change, remove and verify pools.", rich_markup_mode=None)
_add(pool_commands, "apply", commands_pools.pool_apply, "[OPTIONS] NAME [FILE]", "Make a pool, or change it.")
_add(pool_commands, "delete", commands_pools.pool_delete, "[OPTIONS] NAME", "Remove a pool.")
_add(pool_commands, "verify", commands_pools.pool_verify, "[OPTIONS] NAME", "Test that its slots come back clean.")
app.add_typer(pool_commands, name="pool")


def run(argv: Sequence[str]) -> int:
    """Run a command line.

    Args:
        argv: without the program's own name.

    Returns:
        The exit code.
    """
    try:
        returned = app(list(argv), prog_name="sandbox", standalone_mode=False)
        sys.stdout.flush()
        return returned if isinstance(returned, int) else 0
    except SandboxError as error:
        return _fail(failure_of(error), argv, error)
    except Failure as failure:
        return _fail(failure, argv)
    except _UsageError as error:
        return _misused(error, argv)
    except BrokenPipeError:
        return _nobody_reads()
    except OSError as error:
        return _fail(Failure(f"{error.filename}: {error.strerror}" if error.filename else str(error), "mend that, and try again", "os_error"), argv)
    except (KeyboardInterrupt, typer.Abort):
        return 128 + signal.SIGINT


def _fail(failure: Failure, argv: Sequence[str], error: SandboxError | None = None) -> int:
    options = argv[: argv.index("--")] if "--" in argv else argv
    screen = Screen("--json" in options)
    if screen.as_json:
        screen.document(document_of(failure, error))
    screen.failure(failure)
    return OWN_FAILURE


def _misused(error: Exception, argv: Sequence[str]) -> int:
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "sandbox"
    message = getattr(error, "format_message", lambda: str(error))()
    if type(error).__name__ == "NoArgsIsHelpError":
        sys.stdout.write(message + "\n")
        return OWN_FAILURE
    return _fail(Failure(message.strip().rstrip("."), f"`{path} --help` says what is taken"), argv)
