"""How a command ends, whatever it ends with: one exit code, one sentence with a next step, and with `--json` one document."""

from __future__ import annotations

import functools
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import typer

from env_client.cli import OWN_FAILURE
from env_client.cli.failures import Failure, Interrupted, document_of, failure_of, interruption
from env_client.cli.printer import Printer
from env_client.errors import SandboxError

#: Whoever comes a second time with one of these does not want to wait for what is being given back. A second SIGHUP is the same terminal closing.
_AT_ONCE = frozenset({signal.SIGINT, signal.SIGTERM})
_left_behind: list[str] = []


def ending(function: Callable[..., None]) -> Callable[..., None]:
    """A command whose failures and interruptions are exit codes before typer makes its own of them."""

    @functools.wraps(function)
    def run_it(*args: Any, **options: Any) -> None:
        printer = Printer(bool(options.get("as_json")))
        try:
            with ending_by_signal(printer.as_json):
                function(*args, **options)
        except Interrupted as interrupted:
            if printer.as_json:
                printer.document(interrupted.document or interruption(interrupted))
            raise typer.Exit(128 + interrupted.signal_number) from None
        except BrokenPipeError:
            raise typer.Exit(nobody_reads()) from None
        except SandboxError as error:
            raise typer.Exit(fail(failure_of(error), printer, error)) from None
        except Failure as failure:
            raise typer.Exit(fail(failure, printer)) from None
        except OSError as error:
            raise typer.Exit(fail(_failure_of_system(error), printer)) from None

    return run_it


def fail(failure: Failure, printer: Printer, error: SandboxError | None = None) -> int:
    """Say what does not work; returns the exit code for it."""
    if printer.as_json:
        try:
            printer.document(document_of(failure, error))
        except OSError as why:  # standard output is what does not work; who reads it finds nothing, and the exit code
            _give_up_output()
            printer.failure(_failure_of_system(why))
            return OWN_FAILURE
    printer.failure(failure)
    return OWN_FAILURE


def nobody_reads() -> int:
    """The exit code of a command whose reader has left, as that of a process that the kernel ended for it."""
    _give_up_output()
    return 128 + signal.SIGPIPE


def _give_up_output() -> None:
    # The interpreter would complain about it once more when it flushes at its end.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _failure_of_system(error: OSError) -> Failure:
    where = f"{error.filename}: " if error.filename else ""
    return Failure(f"{where}{error.strerror or error}", "mend that, and try again", "os_error")


@contextmanager
def leaving(sentence: str) -> Iterator[None]:
    """Say what is left behind, where a second signal ends the process within the block."""
    _left_behind.append(sentence)
    try:
        yield
    finally:
        _left_behind.remove(sentence)


@contextmanager
def ending_by_signal(as_json: bool) -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as Ctrl-C does, so that what was taken is given back; a second one ends the process where it is.

    Args:
        as_json: whether the process owes a document.
    """
    has_come = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal has_come
        if not has_come:
            has_come = True
            raise Interrupted(number)
        if number in _AT_ONCE:
            if as_json:
                os.write(1, json.dumps(interruption(Interrupted(number))).encode() + b"\n")
            else:
                os.write(2, "".join(f"sandbox: {sentence}\n" for sentence in _left_behind).encode())
            os._exit(128 + number)

    before: dict[signal.Signals, Callable[[int, FrameType | None], Any] | int | None] = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
