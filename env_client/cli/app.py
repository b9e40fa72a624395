"""The commands of `sandbox`, and the function that runs a command line and returns its exit code."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
import typer.core

from env_client._version import __version__
from env_client.cli.commands import files, leases, pools
from env_client.cli.commands.doctor import doctor
from env_client.cli.commands.ports import port
from env_client.cli.commands.run_many import run_many
from env_client.cli.commands.terminals import attach, shell
from env_client.cli.exit_codes import OWN_FAILURE
from env_client.cli.exit_handling import exit_code_for_broken_pipe, report_failure, with_exit_codes
from env_client.cli.failures import Failure
from env_client.cli.printer import Printer

#: The base class of the errors for wrong arguments. It belongs to click, or to the copy of click inside newer versions of typer.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]
_EPILOG = (
    "Exit codes: that of the command that was run, 128+n if signal n ended it; 124 the command timed out; 125 sandbox itself failed; "
    "126 the command cannot be started; 127 there is no such program; 130 Ctrl-C; 137 out of memory; 141 the reader of the output has gone; 143 SIGTERM; "
    "1 doctor or verify found a problem, or a program of run-many did not succeed. "
    "The service is the one in SANDBOX_URL and SANDBOX_TOKEN, else the service of this machine."
)


def _add_command(group: typer.Typer, name: str, function: Callable[..., None], usage: str, summary: str, *, options_first: bool = False) -> None:
    """Add a command to a group.

    Args:
        group: the group.
        name: the name of the command.
        function: the function that runs it; its docstring is the help text.
        usage: the arguments, as the help text shows them.
        summary: one line for the list of commands.
        options_first: whether options end where the arguments begin, because the arguments are a command with options of its own.
    """

    class Command(typer.core.TyperCommand):
        def collect_usage_pieces(self, ctx: Any) -> list[str]:
            return [usage]

    group.command(name, cls=Command, short_help=summary, context_settings={"allow_interspersed_args": False} if options_first else None)(
        with_exit_codes(function)
    )


app = typer.Typer(
    name="sandbox",
    help="Work with the slots of a sandbox pool: acquire one, run commands in it, copy files, release it.",
    epilog=_EPILOG,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # without markup, the help text is the same on a terminal and in a file
    context_settings={"help_option_names": ["--help", "-h"]},
)


def _print_version(requested: bool) -> None:
    if requested:
        sys.stdout.write(f"sandbox {__version__}\n")
        raise typer.Exit


@app.callback()
def sandbox(version: Annotated[bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)] = False) -> None:
    """Accept the options before the command."""


_add_command(app, "run", leases.run, "[OPTIONS] -- CMD...", "Run a command in a fresh slot, and release the slot.", options_first=True)
_add_command(app, "run-many", run_many, "[OPTIONS] FILE.jsonl", "Run many programs, each in a fresh slot of its own.")
_add_command(app, "acquire", leases.acquire, "[OPTIONS]", "Acquire slots; print their leases.")
_add_command(app, "exec", leases.exec_, "[OPTIONS] LEASE -- CMD...", "Run a command in a slot.", options_first=True)
_add_command(app, "shell", shell, "[OPTIONS] LEASE", "Work in an interactive shell in a slot.")
_add_command(app, "attach", attach, "[OPTIONS] LEASE", "Watch a terminal of a slot.")
_add_command(app, "cp", files.cp, "[OPTIONS] SOURCE TARGET", "Copy files and folders into a slot or out of one.")
_add_command(app, "ls", files.ls, "[OPTIONS] LEASE[:FOLDER]", "List a folder of a slot.")
_add_command(app, "port", port, "[OPTIONS] LEASE PORT", "Print the URL of a program that listens in a slot.")
_add_command(app, "recording", files.recording, "[OPTIONS] LEASE [FILE]", "Copy the recording of a terminal into a file.")
_add_command(app, "leases", leases.leases, "[OPTIONS]", "List the leases you hold.")
_add_command(app, "renew", leases.renew, "[OPTIONS] LEASE...", "Renew leases.")
_add_command(app, "narrow", leases.narrow, "[OPTIONS] LEASE...", "Take rights away from slots: network, cache, changing entries.")
_add_command(app, "release", leases.release, "[OPTIONS] [LEASE...]", "Release leases.")
_add_command(app, "pools", pools.pools, "[OPTIONS] [NAME]", "List the pools.")
_add_command(app, "sandboxes", pools.sandboxes, "[OPTIONS]", "List the sandboxes.")
_add_command(app, "drain", pools.drain, "[OPTIONS] SANDBOX", "Drain a sandbox: it gives no new leases.")
_add_command(app, "doctor", doctor, "[OPTIONS]", "Check what this machine can do, and how to get what is missing.")
pool_commands = typer.Typer(no_args_is_help=True, help="Create, change, delete and verify pools.", rich_markup_mode=None)
_add_command(pool_commands, "apply", pools.pool_apply, "[OPTIONS] NAME [FILE]", "Create a pool, or change it.")
_add_command(pool_commands, "delete", pools.pool_delete, "[OPTIONS] NAME", "Delete a pool.")
_add_command(pool_commands, "verify", pools.pool_verify, "[OPTIONS] NAME", "Test that the reset leaves its slots clean.")
app.add_typer(pool_commands, name="pool")


def run(argv: Sequence[str]) -> int:
    """Run a command line.

    Args:
        argv: the arguments without the program's name.

    Returns:
        The exit code.
    """
    try:
        return _run_app(argv)
    except (BrokenPipeError, SystemExit):  # typer turns a broken pipe into SystemExit when it prints a help text
        return exit_code_for_broken_pipe()
    except (KeyboardInterrupt, typer.Abort):
        return 128 + signal.SIGINT


def _run_app(argv: Sequence[str]) -> int:
    try:
        returned = app(list(argv), prog_name="sandbox", standalone_mode=False)
        sys.stdout.flush()
        return returned if isinstance(returned, int) else 0
    except Failure as failure:
        return report_failure(failure, _printer_for(argv))
    except _UsageError as error:
        return _report_usage_error(error, argv)


def _printer_for(argv: Sequence[str]) -> Printer:
    """Create the printer for errors in the arguments, which occur before the options are parsed."""
    return Printer("--json" in (argv[: argv.index("--")] if "--" in argv else argv))


def _report_usage_error(error: Exception, argv: Sequence[str]) -> int:
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else " ".join(("sandbox", *(word for word in argv[:1] if not word.startswith("-"))))
    message = getattr(error, "format_message", lambda: str(error))()
    if type(error).__name__ == "NoArgsIsHelpError":
        sys.stdout.write(message + "\n")
        return OWN_FAILURE
    before_command = path == "sandbox" and len(argv) > 1 and argv[0].startswith("-")
    command_options = "options go after the command: `sandbox COMMAND --help` lists its own"
    next_step = command_options if before_command else f"`{path} --help` lists the arguments and options"
    return report_failure(Failure(message.strip().rstrip("."), next_step), _printer_for(argv))
