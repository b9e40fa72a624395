"""How commands end: every error and every signal becomes one exit code, one message with a next step, and one document with `--json`."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from typing import Any

import typer

from env_client.cli.exit_codes import OWN_FAILURE
from env_client.cli.failures import Failure, Interrupted, failure_document, failure_from_error, interruption_document
from env_client.cli.printer import Printer
from env_client.cli.signals import interrupt_on_signals
from env_client.errors import SandboxError


def with_exit_codes(function: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command: its errors and interruptions become `typer.Exit` with an exit code, before typer handles them in its own way."""

    @functools.wraps(function)
    def run_command(*args: Any, **options: Any) -> None:
        printer = Printer(bool(options.get("as_json")))
        try:
            with interrupt_on_signals(printer.as_json):
                function(*args, **options)
        except Interrupted as interrupted:
            if printer.as_json:
                printer.print_json(interrupted.document or interruption_document(interrupted))
            raise typer.Exit(128 + interrupted.signal_number) from None
        except BrokenPipeError:
            raise typer.Exit(exit_code_for_broken_pipe()) from None
        except SandboxError as error:
            raise typer.Exit(report_failure(failure_from_error(error), printer, error)) from None
        except Failure as failure:
            raise typer.Exit(report_failure(failure, printer)) from None
        except OSError as error:
            raise typer.Exit(report_failure(_failure_from_os_error(error), printer)) from None

    return run_command


def report_failure(failure: Failure, printer: Printer, error: SandboxError | None = None) -> int:
    """Print a failure; return the exit code for it.

    Args:
        failure: what failed, and what to do next.
        printer: prints it as text or as JSON.
        error: the error of the client that caused the failure, for the JSON document.
    """
    if printer.as_json:
        try:
            printer.print_json(failure_document(failure, error))
        except OSError as output_error:  # standard output is broken: its reader gets nothing, so standard error names the cause
            _discard_output()
            printer.print_failure(_failure_from_os_error(output_error))
            return OWN_FAILURE
    printer.print_failure(failure)
    return OWN_FAILURE


def exit_code_for_broken_pipe() -> int:
    """Return the exit code of a command whose output has no reader any more: that of a process that SIGPIPE ended."""
    _discard_output()
    return 128 + signal.SIGPIPE


def _discard_output() -> None:
    """Redirect standard output to /dev/null. Otherwise the interpreter would report the broken pipe again when it flushes at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _failure_from_os_error(error: OSError) -> Failure:
    path = f"{error.filename}: " if error.filename else ""
    return Failure(f"{path}{error.strerror or error}", "correct the cause, and try again", "os_error")
