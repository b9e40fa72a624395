"""The command line `sandbox` as a prepared program; see `process`."""

from __future__ import annotations

import functools
import os
import sys
from typing import NoReturn

from tests.support.prepared.process import PreparedProcess, serve_requests
from tests.support.prepared.service import REAL_SERVICE_VARIABLE, prepared_python

# The command line, and what its libraries import when they are first used.
PRELOADED = ("env_client.cli.app", "anyio", "certifi", "encodings.idna", "h11", "httpcore", "pydantic.type_adapter", "stringprep", "zoneinfo")


@functools.cache
def prepared_cli() -> PreparedProcess:
    """Return the prepared command line of this test process, which is started at the first use. What it starts of the service is prepared, too."""
    return PreparedProcess(__name__, str(prepared_python()))


def _run_command(words: list[str]) -> NoReturn:
    from env_client.cli import main

    if os.environ.pop(REAL_SERVICE_VARIABLE, None) is None:
        sys.executable = sys.argv[3]
    sys.argv = ["sandbox", *words]
    main()
    raise AssertionError("main ends the process")


if __name__ == "__main__":
    serve_requests(PRELOADED, _run_command)
