"""The command line `sandbox`. What it needs beyond the client comes with the extra `cli`."""

from __future__ import annotations

import os
import signal
import sys

#: What `sandbox` ends with when it could not do its part, as docker does; below it are the command's own exit codes.
OWN_FAILURE = 125
_NEEDED = frozenset({"rich", "typer"})


def main() -> None:
    """Run the command line with this process's arguments, and end the process."""
    if sys.stdout is None:  # closed by whoever started us
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    try:
        from env_client.cli.app import run
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _NEEDED:
            raise
        sys.stderr.write(f"sandbox: the command line needs {missing}, which is not installed: pip install 'sandbox-pool[cli]'\n")
        sys.exit(OWN_FAILURE)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    sys.exit(run(sys.argv[1:]))
