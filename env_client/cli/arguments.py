"""The arguments and options of the commands, and the parsers for values that typer does not know: ids, names, counts and seconds."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Annotated

import typer

from env_client.cli.failures import Failure

#: The default time to live of a lease that the command line acquires, in seconds. It is long because nothing renews such a lease.
COMMAND_TTL_S = 3600.0
_COPY_OTHER_BYTES = "it is sent as text; send other bytes in a file: `sandbox cp`"
_LEASES_HELP = "`sandbox leases` lists those you hold, `sandbox acquire` acquires a new one"


def _path_segment_parser(what: str, code: str, next_step: str) -> Callable[[str], str]:
    """Return a parser for an id that becomes one segment of a request's path.

    Args:
        what: what the id identifies, such as `lease`.
        code: the error code for an id that cannot exist.
        next_step: what to do about a wrong id.
    """

    def read(text: str) -> str:
        if not text:
            raise Failure(f"the {what} is empty", f"check that the variable it comes from is set; {next_step}")
        if "/" in text or text in (".", ".."):
            raise Failure(f"{text!r} cannot name a {what}", next_step, code)
        return text

    return read


def read_count(text: str | int) -> int:
    """Parse a number of slots, at least 1; the service knows the maximum."""
    text = str(text)  # typer passes a default as an int
    if not text.isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"{text!r} is not a number of slots.")
    return int(text)


def read_seconds(text: str | float) -> float:
    """Parse a finite number of seconds; the service knows the limits."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise typer.BadParameter(f"{text!r} is not a number of seconds.")
    return value


def check_text(what: str, text: str, next_step: str = _COPY_OTHER_BYTES) -> None:
    """Check that an argument can be encoded in UTF-8, as every request must be.

    Args:
        what: the name of the argument, for the message.
        text: the argument.
        next_step: what to do if it cannot be encoded.

    Raises:
        Failure: it cannot be encoded.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Failure(f"{what} is not text in UTF-8", next_step) from None


def escape_invalid_bytes(text: str) -> str:
    """Return an argument for display, with the bytes that are not UTF-8 escaped."""
    return os.fsencode(text).decode("utf-8", "backslashreplace")


read_lease = _path_segment_parser("lease", "lease_not_found", _LEASES_HELP)
read_pool = _path_segment_parser(
    "pool", "pool_not_found", "`sandbox pools` lists them; a name consists of a-z, 0-9, `.`, `_` and `-`, with a letter or digit at both ends"
)
read_sandbox = _path_segment_parser("sandbox", "sandbox_not_found", "`sandbox sandboxes` lists them")

LeaseArgument = Annotated[str, typer.Argument(metavar="LEASE", hidden=True, parser=read_lease)]
LeasesArgument = Annotated[list[str], typer.Argument(metavar="LEASE...", hidden=True, parser=read_lease)]
PoolArgument = Annotated[str, typer.Argument(metavar="NAME", hidden=True, parser=read_pool)]
TenantOption = Annotated[
    str | None,
    typer.Option("--tenant", metavar="TENANT", help="The owner of the pool, for admins.  [default: your own pool, else the shared one]"),
]
TenantsOption = Annotated[
    str | None,
    typer.Option("--tenant", metavar="TENANT", help="The owner of the pools, for admins; '*' for all.  [default: your own and shared ones]"),
]
PoolOption = Annotated[str | None, typer.Option("--pool", "-p", metavar="NAME", parser=read_pool, help="The pool.  [default: the service's default pool]")]
RunOption = Annotated[str | None, typer.Option("--run-id", metavar="RUN", help="The run that the leases belong to.")]
TtlOption = Annotated[
    float,
    typer.Option(
        "--ttl",
        metavar="SECONDS",
        parser=read_seconds,
        show_default=False,
        help=f"How long the lease lasts from now.  [default: {COMMAND_TTL_S:g}, an hour]",
    ),
]
WaitOption = Annotated[
    float | None,
    typer.Option("--wait", metavar="SECONDS", parser=read_seconds, help="How long to wait for a slot.  [default: the pool's acquire_timeout_s]"),
]
CommandArgument = Annotated[list[str], typer.Argument(metavar="-- CMD", hidden=True)]
CwdOption = Annotated[str | None, typer.Option("--cwd", "-w", metavar="FOLDER", help="The working folder in the slot.  [default: the workspace]")]
EnvOption = Annotated[list[str] | None, typer.Option("--env", "-e", metavar="NAME=VALUE", help="A variable for the command; NAME alone passes the local one.")]
TimeoutOption = Annotated[
    float | None,
    typer.Option("--timeout", "-t", metavar="SECONDS", parser=read_seconds, help="Kill the command and its processes after this time.  [default: the pool's]"),
]
SilenceOption = Annotated[
    float | None, typer.Option("--no-output-timeout", metavar="SECONDS", parser=read_seconds, help="Kill the command if it writes nothing for this time.")
]
NoStdinFlag = Annotated[bool, typer.Option("--no-stdin", "-n", help="Do not read standard input, even if it is not a terminal.")]
NoNetworkFlag = Annotated[bool, typer.Option("--no-network", help="Run without network.")]
