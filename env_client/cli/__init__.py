"""The command line `sandbox`. The packages that it needs beyond the client are in the extra `cli`."""

from __future__ import annotations

import io
import os
import signal
import sys
from types import FrameType

from env_client.cli.exit_codes import OWN_FAILURE

_REQUIRED_PACKAGES = frozenset({"rich", "typer"})


def main() -> None:
    """Run the command line with this process's arguments, and exit."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # otherwise the parent process has chosen to ignore it
        signal.signal(signal.SIGINT, _exit_at_once)
    _prepare_output()
    try:
        from env_client.cli.app import run
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _REQUIRED_PACKAGES:
            raise
        sys.stderr.write(f"sandbox: the command line needs {missing}, which is not installed\n  in a clone of the repository: pip install '.[cli]'\n")
        sys.exit(OWN_FAILURE)
    sys.exit(run(sys.argv[1:]))


def _prepare_output() -> None:
    """Make both output streams usable: a closed one discards its output, and one with a limited encoding escapes the characters that it lacks."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # the parent process has closed it
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _exit_at_once(number: int, frame: FrameType | None) -> None:
    """Exit without cleaning up. It is the handler while the process holds nothing; an exception during an import would print a traceback."""
    os._exit(128 + number)
