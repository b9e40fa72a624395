"""The commands of `sandbox`, and the one edge at which what goes wrong becomes a sentence and an exit code."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
import typer.core

from env_client._version import __version__
from env_client.cli import OWN_FAILURE
from env_client.cli.commands import files, leases, pools
from env_client.cli.commands.doctor import doctor
from env_client.cli.exit_handling import ending, fail, nobody_reads
from env_client.cli.failures import Failure
from env_client.cli.printer import Printer

#: What is wrong with the words of a command line, whichever library typer takes it from.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]
_EPILOG = (
    "Exit codes: those of the command that was run, 128+n after signal n; 124 it timed out; 125 sandbox could not do its part; 126 it cannot be started; "
    "127 there is no such program; 130 Ctrl-C; 137 out of memory; 141 nobody reads its output; 143 SIGTERM; 1 doctor or verify found something. "
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

    to.command(name, cls=Command, short_help=summary, context_settings={"allow_interspersed_args": False} if options_first else None)(ending(function))


app = typer.Typer(
    name="sandbox",
    help="Slots of a sandbox pool: take one, run commands in it, copy files, give it back.",
    epilog=_EPILOG,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # the same text on a terminal and in a file
    context_settings={"help_option_names": ["--help", "-h"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"sandbox {__version__}\n")
        raise typer.Exit


@app.callback()
def sandbox(version: Annotated[bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)] = False) -> None:
    """Take what goes before the command."""


_add(app, "run", leases.run, "[OPTIONS] -- CMD...", "Run a command in a fresh slot, and give it back.", options_first=True)
_add(app, "acquire", leases.acquire, "[OPTIONS]", "Take a slot; prints its lease.")
_add(app, "exec", leases.exec_, "[OPTIONS] LEASE -- CMD...", "Run a command in a slot.", options_first=True)
_add(app, "cp", files.cp, "[OPTIONS] SOURCE TARGET", "Copy files and folders in and out.")
_add(app, "ls", files.ls, "[OPTIONS] LEASE[:FOLDER]", "List a folder of a slot.")
_add(app, "leases", leases.leases, "[OPTIONS]", "List the leases you hold.")
_add(app, "renew", leases.renew, "[OPTIONS] LEASE...", "Keep leases for longer.")
_add(app, "narrow", leases.narrow, "[OPTIONS] LEASE...", "Take network or cache away from slots.")
_add(app, "release", leases.release, "[OPTIONS] [LEASE...]", "Give slots back.")
_add(app, "pools", pools.pools, "[OPTIONS] [NAME]", "List the pools.")
_add(app, "sandboxes", pools.sandboxes, "[OPTIONS]", "List the sandboxes.")
_add(app, "drain", pools.drain, "[OPTIONS] SANDBOX", "Give no new leases in a sandbox.")
_add(app, "doctor", doctor, "[OPTIONS]", "Say what this machine can do, and how to get the rest.")
pool_commands = typer.Typer(no_args_is_help=True, help="Make, change, remove and verify pools.", rich_markup_mode=None)
_add(pool_commands, "apply", pools.pool_apply, "[OPTIONS] NAME [FILE]", "Make a pool, or change it.")
_add(pool_commands, "delete", pools.pool_delete, "[OPTIONS] NAME", "Remove a pool.")
_add(pool_commands, "verify", pools.pool_verify, "[OPTIONS] NAME", "Test that its slots come back clean.")
app.add_typer(pool_commands, name="pool")


def run(argv: Sequence[str]) -> int:
    """Run a command line.

    Args:
        argv: without the program's own name.

    Returns:
        The exit code.
    """
    try:
        return _run(argv)
    except (BrokenPipeError, SystemExit):  # the latter is what typer makes of it where it prints a help
        return nobody_reads()
    except (KeyboardInterrupt, typer.Abort):
        return 128 + signal.SIGINT


def _run(argv: Sequence[str]) -> int:
    try:
        returned = app(list(argv), prog_name="sandbox", standalone_mode=False)
        sys.stdout.flush()
        return returned if isinstance(returned, int) else 0
    except Failure as failure:
        return fail(failure, _printer_for(argv))
    except _UsageError as error:
        return _misused(error, argv)


def _printer_for(argv: Sequence[str]) -> Printer:
    """For what is wrong with the words themselves, before any option is known."""
    return Printer("--json" in (argv[: argv.index("--")] if "--" in argv else argv))


def _misused(error: Exception, argv: Sequence[str]) -> int:
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else " ".join(("sandbox", *(word for word in argv[:1] if not word.startswith("-"))))
    message = getattr(error, "format_message", lambda: str(error))()
    if type(error).__name__ == "NoArgsIsHelpError":
        sys.stdout.write(message + "\n")
        return OWN_FAILURE
    is_early = path == "sandbox" and len(argv) > 1 and argv[0].startswith("-")
    next_step = "options go after the command: `sandbox COMMAND --help` lists its own" if is_early else f"`{path} --help` says what is taken"
    return fail(Failure(message.strip().rstrip("."), next_step), _printer_for(argv))
