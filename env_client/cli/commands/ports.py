"""`sandbox port`."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from env_client.cli.arguments import LeaseArgument
from env_client.cli.connection import connect_to_service
from env_client.cli.printer import JsonFlag, Printer
from env_client.discovery import ROOT_STATE_DIR, local_service
from env_client.messages.ports import MAX_PORT


def port(
    lease: LeaseArgument,
    number: Annotated[int, typer.Argument(metavar="PORT", hidden=True, min=1, max=MAX_PORT)],
    as_json: JsonFlag = False,
) -> None:
    """Print the URL of a program that listens on a port of a slot, and how to send it a request.

    The slot must have a network of its own: acquire it with --no-network. Requests need the token of the service, which does not reach the slot.
    """
    printer = Printer(as_json)
    with connect_to_service() as client:
        client.lease_info(lease)  # says what is wrong with the lease, if anything
        address = client.port(lease, number)
    if as_json:
        printer.print_json({"port": address.port, "url": address.url, "ws_url": address.ws_url})
        return
    printer.print_line(address.url)
    if not address.headers:
        printer.print_note(f"next: curl {shlex.quote(address.url)}")
        return
    printer.print_note(f'next: curl -H "Authorization: Bearer {_shell_token()}" {shlex.quote(address.url)}')


def _shell_token() -> str:
    """Return how a shell command refers to the token that this command has used, without showing it."""
    found = None if os.environ.get("SANDBOX_TOKEN", "").strip() else local_service(os.environ, uid=os.getuid(), root_dir=ROOT_STATE_DIR)
    return "$SANDBOX_TOKEN" if found is None else f"$(cat {shlex.quote(str(Path(found.source).with_name('token')))})"
