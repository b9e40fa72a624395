"""The command line `sandbox`. What it needs beyond the client comes with the extra `cli`."""

from __future__ import annotations

import io
import os
import signal
import sys
from types import FrameType

#: What `sandbox` ends with when it could not do its part, as docker does; below it are the command's own exit codes.
OWN_FAILURE = 125
_NEEDED = frozenset({"rich", "typer"})


def main() -> None:
    """Run the command line with this process's arguments, and end the process."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else somebody wants it ignored
        signal.signal(signal.SIGINT, _end)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by whoever started us
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):  # what it cannot show is no reason to fall over
            stream.reconfigure(errors="backslashreplace")
    try:
        from env_client.cli.app import run
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _NEEDED:
            raise
        sys.stderr.write(f"sandbox: the command line needs {missing}, which is not installed\n  in a clone of the repository: pip install '.[cli]'\n")
        sys.exit(OWN_FAILURE)
    sys.exit(run(sys.argv[1:]))


def _end(number: int, frame: FrameType | None) -> None:
    """End at once, while nothing is taken yet or everything is given back: an exception in the middle of an import would be a traceback."""
    os._exit(128 + number)
