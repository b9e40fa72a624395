"""The service as a prepared program; see `process`."""

from __future__ import annotations

import functools
import sys
from typing import NoReturn

from tests.support.prepared.process import PreparedProcess, serve_requests

# The service, and what it imports when it is first used.
PRELOADED = (
    "sandbox_server.__main__",
    "sandbox_server.backends.local",
    "sandbox_server.store.sqlite",
    "httptools",
    "uvloop",
    "uvicorn.lifespan.on",
    "uvicorn.loops.uvloop",
    "uvicorn.protocols.http.httptools_impl",
    "websockets",
)


@functools.cache
def prepared_service() -> PreparedProcess:
    """Return the prepared service of this test process, which is started at the first use."""
    return PreparedProcess(__name__)


def _run_service(words: list[str]) -> NoReturn:
    from sandbox_server.__main__ import main

    sys.argv = ["sandbox_server", *words]
    sys.exit(main())


if __name__ == "__main__":
    serve_requests(PRELOADED, _run_service)
