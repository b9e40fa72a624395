"""The service as a prepared program; see `process`."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import NoReturn

from sandbox_server.agent.build import content
from tests.support.prepared.process import PreparedProcess, serve_requests

# The service, and what it imports when it is first used.
PRELOADED = (
    "sandbox_server.__main__",
    "sandbox_server.backends.local",
    "sandbox_server.store.sqlite",
    "httptools",
    "tests.support.service_main",
    "uvloop",
    "uvicorn.lifespan.on",
    "uvicorn.loops.uvloop",
    "uvicorn.main",
    "uvicorn.protocols.http.httptools_impl",
    "uvicorn.protocols.websockets.auto",
    "websockets",
)
#: Set for a prepared program that starts the service as a real process, and not in a child of the prepared one.
REAL_SERVICE_VARIABLE = "TEST_WITH_REAL_SERVICE"
PYTHON = """#!/bin/sh
case "$1 $2" in
  "-m sandbox_server") shift 2; exec "{service}" "$@" ;;
  *) exec "{python}" "$@" ;;
esac
"""


@functools.cache
def prepared_service() -> PreparedProcess:
    """Return the prepared service of this test process, which is started at the first use."""
    return PreparedProcess(__name__)


@functools.cache
def prepared_python() -> Path:
    """Return a program like the interpreter, whose `-m sandbox_server` has the prepared service run the command. It is in a folder of its own."""
    folder = prepared_service().folder
    service, python = folder / "sandbox-service", folder / "bin" / "python"
    prepared_service().install(service)
    python.parent.mkdir()
    python.write_text(PYTHON.format(service=service, python=sys.executable), encoding="utf-8")
    python.chmod(0o755)
    return python


def _run_service(words: list[str]) -> NoReturn:
    """Run `uvicorn` if that is the first word, and otherwise the service, with those parts that its environment names."""
    if words[0] == "uvicorn":
        from uvicorn.main import main as run_uvicorn

        run_uvicorn(words[1:], prog_name="uvicorn")
        raise AssertionError("it ends the process")
    from sandbox_server.__main__ import main
    from tests.support.service_main import VARIABLE, ServiceParts

    sys.argv = ["sandbox_server", *words]
    sys.exit(main(parts=ServiceParts.from_environ().make_parts()) if VARIABLE in os.environ else main())


if __name__ == "__main__":
    content()  # so that not every service packs the agent
    serve_requests(PRELOADED, _run_service)
