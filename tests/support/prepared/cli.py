"""The command line `sandbox` as a prepared program, for tests and for shells; see `process`."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import NoReturn

from tests.support.prepared.process import PreparedProcess, serve_requests

# The command line, and what its libraries import when they are first used.
PRELOADED = ("env_client.cli.app", "anyio", "certifi", "encodings.idna", "h11", "httpcore", "pydantic.type_adapter", "stringprep", "zoneinfo")
DESCRIPTOR_VARIABLE = "PREPARED_CLI_DESCRIPTOR"
#: A program that has the prepared process run the command. It needs a twentieth of the processor time of the command line's imports.
SCRIPT = f"""#!{sys.executable} -IS
import array, json, os, signal, socket, sys
requests = socket.socket(fileno=int(os.environ.pop("{DESCRIPTOR_VARIABLE}")))
ours, theirs = socket.socketpair()
request = {{"words": sys.argv[1:], "environ": dict(os.environ), "cwd": os.getcwd(), "has_terminal": False}}
requests.sendmsg([json.dumps(request).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2, theirs.fileno()]))])
theirs.close()
reports = ours.makefile()
pid = int(reports.readline())
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda number, _: os.kill(pid, number))
status = int(reports.readline())
os._exit(status if status >= 0 else 128 - status)
"""


@functools.cache
def prepared_cli() -> PreparedProcess:
    """Return the prepared command line of this test process, which is started at the first use."""
    return PreparedProcess(__name__)


def install_prepared_cli(folder: Path) -> tuple[dict[str, str], list[int]]:
    """Write a program `sandbox` to a folder, which has the prepared process run the command, for shells.

    Returns:
        The environment variables and the descriptors that the program needs.
    """
    script = folder / "sandbox"
    script.write_text(SCRIPT, encoding="utf-8")
    script.chmod(0o755)
    descriptor = prepared_cli().request_descriptor
    return {DESCRIPTOR_VARIABLE: str(descriptor)}, [descriptor]


def _run_command(words: list[str]) -> NoReturn:
    from env_client.cli import main

    sys.argv = ["sandbox", *words]
    main()
    raise AssertionError("main ends the process")


if __name__ == "__main__":
    serve_requests(PRELOADED, _run_command)
