"""What words of a command line stand for, where typer cannot know: ids and names that can be asked for, and seconds."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Annotated

import typer

from env_client.cli.failures import Failure

#: How long a lease of the command line holds if nobody says otherwise, in seconds: nothing renews it while a person thinks.
DEFAULT_TTL_S = 3600.0
_OTHER_BYTES = "it travels as text; other bytes travel in files: `sandbox cp`"
_LEASES = "`sandbox leases` lists those you hold, `sandbox acquire` takes a new one"


def _reader(what: str, code: str, next_step: str) -> Callable[[str], str]:
    """Reads an id that becomes one part of the path of a request."""

    def read(text: str) -> str:
        if not text:
            raise Failure(f"the {what} is empty", f"is the variable set that it comes from? {next_step}")
        if "/" in text or text in (".", ".."):
            raise Failure(f"{text!r} cannot name a {what}", next_step, code)
        return text

    return read


def read_count(text: str | int) -> int:
    """A number of slots; the service says how many there can be."""
    text = str(text)  # a default comes as what it is
    if not text.isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"{text!r} is not a number of slots.")
    return int(text)


def read_seconds(text: str | float) -> float:
    """A number of seconds; the service says which it takes."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise typer.BadParameter(f"{text!r} is not a number of seconds.")
    return value


def check_text(what: str, text: str, next_step: str = _OTHER_BYTES) -> None:
    """Refuse what is not UTF-8, which no request can say.

    Raises:
        Failure: naming it.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Failure(f"{what} is not text in UTF-8", next_step) from None


def shown_bytes(text: str) -> str:
    """A word of the command line that may be no text, to be read."""
    return os.fsencode(text).decode("utf-8", "backslashreplace")


read_lease = _reader("lease", "lease_not_found", _LEASES)
read_pool = _reader("pool", "pool_not_found", "`sandbox pools` lists them; a name is of a-z, 0-9, `.`, `_` and `-`, with a letter or digit at both ends")
read_sandbox = _reader("sandbox", "sandbox_not_found", "`sandbox sandboxes` lists them")

LeaseArgument = Annotated[str, typer.Argument(metavar="LEASE", hidden=True, parser=read_lease)]
LeasesArgument = Annotated[list[str], typer.Argument(metavar="LEASE...", hidden=True, parser=read_lease)]
PoolArgument = Annotated[str, typer.Argument(metavar="NAME", hidden=True, parser=read_pool)]
TenantOption = Annotated[
    str | None, typer.Option("--tenant", metavar="TENANT", help="Whose pool, for admins.  [default: your own of that name, else the shared one]")
]
TenantsOption = Annotated[
    str | None, typer.Option("--tenant", metavar="TENANT", help="Whose pools, for admins; '*': all.  [default: yours and the shared ones]")
]
PoolOption = Annotated[str | None, typer.Option("--pool", "-p", metavar="NAME", parser=read_pool, help="Of which pool.  [default: the service's default pool]")]
RunOption = Annotated[str | None, typer.Option("--run-id", metavar="RUN", help="The run that the leases belong to.")]
TtlOption = Annotated[
    float,
    typer.Option(
        "--ttl", metavar="SECONDS", parser=read_seconds, show_default=False, help=f"How long it holds from now on.  [default: {DEFAULT_TTL_S:g}, an hour]"
    ),
]
WaitOption = Annotated[
    float | None,
    typer.Option("--wait", metavar="SECONDS", parser=read_seconds, help="How long to queue for a slot.  [default: the pool's acquire_timeout_s]"),
]
CommandArgument = Annotated[list[str], typer.Argument(metavar="-- CMD", hidden=True)]
CwdOption = Annotated[str | None, typer.Option("--cwd", "-w", metavar="FOLDER", help="Where in the slot.  [default: its workspace]")]
EnvOption = Annotated[list[str] | None, typer.Option("--env", "-e", metavar="NAME=VALUE", help="A variable for the command; NAME alone passes on one of here.")]
TimeoutOption = Annotated[
    float | None,
    typer.Option("--timeout", "-t", metavar="SECONDS", parser=read_seconds, help="Kill the command and all it started after so long.  [default: the pool's]"),
]
SilenceOption = Annotated[
    float | None, typer.Option("--no-output-timeout", metavar="SECONDS", parser=read_seconds, help="Kill it once it is silent for so long.")
]
NoStdinFlag = Annotated[bool, typer.Option("--no-stdin", "-n", help="Do not read standard input, also where it is no terminal.")]
NoNetworkFlag = Annotated[bool, typer.Option("--no-network", help="Without network.")]
