"""The programs of `environments` and atroposlib's run-api as prepared programs; see `process`."""

from __future__ import annotations

import functools
import os
import runpy
import sys
from pathlib import Path
from typing import NoReturn

from tests.support.prepared.process import PreparedProcess, serve_requests
from tests.support.prepared.service import REAL_SERVICE_VARIABLE, prepared_python

PRELOADED = (
    "environments.terminal_test_env",
    "environments.swe_smith_oracle_env",
    "environments.batch.command_line",
    "environments.demo.small_trainer",
    "atroposlib.cli.run_api",
    "anyio",
    "datasets",
    "encodings.idna",
    "h11",
    "uvicorn.loops.uvloop",
    "uvicorn.protocols.http.httptools_impl",
    "transformers.models.auto",
)


@functools.cache
def prepared_environments() -> PreparedProcess:
    """Return the prepared programs of this test process, which are started at the first use. What they start of the service is prepared, too."""
    return PreparedProcess(__name__, str(prepared_python()))


PYTHON = """#!/bin/sh
case "$1 $2" in
  *_env.py\\ *|"-m environments."*|"-m atroposlib."*) exec "{environments}" "$@" ;;
  *) exec "{python}" "$@" ;;
esac
"""


@functools.cache
def environments_python() -> Path:
    """Return a program like the interpreter, which has prepared processes run the programs of `environments` and the service. It is in a folder of its own."""
    folder = prepared_environments().folder
    environments, python = folder / "environments", folder / "bin" / "python"
    prepared_environments().install(environments)
    python.parent.mkdir()
    python.write_text(PYTHON.format(environments=environments, python=prepared_python()), encoding="utf-8")
    python.chmod(0o755)
    return python


def _run_program(words: list[str]) -> NoReturn:
    if os.environ.pop(REAL_SERVICE_VARIABLE, None) is None:
        sys.executable = sys.argv[3]
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
    sys.exit()


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"  # it is read when the libraries are imported
    serve_requests(PRELOADED, _run_program)
