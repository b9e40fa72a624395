"""`sandbox shell` and `sandbox attach`."""

from __future__ import annotations

import asyncio
import os
from contextlib import nullcontext
from typing import Annotated

import typer

from env_client.cli.arguments import LeaseArgument
from env_client.cli.connection import find_endpoint
from env_client.cli.failures import Failure
from env_client.cli.printer import Printer

_SESSION_HELP = "The name of the terminal: 1 to 64 letters, digits or any of . _ : -"
_INPUT, _OUTPUT = 0, 1


def shell(
    lease: LeaseArgument,
    session: Annotated[
        str | None, typer.Option("--session", metavar="NAME", help=f"{_SESSION_HELP}; it is opened if there is none.  [default: a new terminal]")
    ] = None,
) -> None:
    """Work in an interactive shell in a slot. The exit code of the shell becomes the exit code of `sandbox`.

    `~.` at the beginning of a line leaves the shell, which runs on: `--session NAME` returns to it. Nothing renews the lease meanwhile; `sandbox renew` does.
    A lost connection is established again; Ctrl-C leaves meanwhile, too.
    If somebody else opens the same terminal to type, this command only watches from then on.
    """
    if not os.isatty(_INPUT):
        raise Failure("standard input is not a terminal", "run commands with: sandbox exec LEASE -- bash -c '…'")
    raise typer.Exit(_show_terminal(lease, session, watches=False) or 0)


def attach(
    lease: LeaseArgument,
    session: Annotated[str | None, typer.Option("--session", metavar="NAME", help=f"{_SESSION_HELP}.  [default: the one that was last typed in]")] = None,
) -> None:
    """Watch a terminal of a slot, without typing in it. Ctrl-C leaves it; it ends when its shell ends."""
    _show_terminal(lease, session, watches=True)


def _show_terminal(lease_id: str, session: str | None, *, watches: bool) -> int | None:
    """Show a terminal until its shell ends or the person leaves. Returns the exit code of the shell; None if it runs on."""
    # These need websockets, which no other command does.
    from env_client.cli.terminals.connection import TerminalOptions
    from env_client.cli.terminals.keys import Left
    from env_client.cli.terminals.local_terminal import raw_terminal, write_output
    from env_client.cli.terminals.session import TerminalSession

    printer = Printer(False)
    endpoint = find_endpoint()
    keys_fd = _INPUT if os.isatty(_INPUT) else -1

    def note(text: str) -> None:
        os.write(2, f"\r\nsandbox: {text}\r\n".encode())

    async def follow() -> tuple[int | None, str | None, bool]:
        shown = TerminalSession(endpoint, TerminalOptions(lease_id=lease_id, session=session, watches=watches), keys_fd, _OUTPUT, note)
        try:
            return await shown.follow(), shown.session, False
        except Left:
            return None, shown.session, True
        finally:
            if os.isatty(_OUTPUT):
                await write_output(_OUTPUT, shown.modes.undo())

    with raw_terminal(keys_fd) if keys_fd >= 0 else nullcontext():
        exit_code, name, has_left = asyncio.run(follow())
    if has_left and not watches and name is not None:  # it has no name before it is open
        printer.print_note(f"the shell runs on; return with: sandbox shell {lease_id} --session {name}")
    elif watches and not has_left:
        printer.print_note(f"the shell has ended with exit code {exit_code}")
    return exit_code
