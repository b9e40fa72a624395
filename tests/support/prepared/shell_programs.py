"""Prepared programs for shells: a folder for `PATH` with `sandbox`, and with a `python` whose `-m sandbox_server` is the prepared service."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.prepared.cli import prepared_cli
from tests.support.prepared.service import prepared_service

CLI_VARIABLE, SERVICE_VARIABLE = "PREPARED_CLI_DESCRIPTOR", "PREPARED_SERVICE_DESCRIPTOR"
PYTHON = """#!/bin/sh
case "$1 $2" in
  "-m sandbox_server") shift 2; exec "{service}" "$@" ;;
  *) exec "{python}" "$@" ;;
esac
"""


def install_prepared_programs(folder: Path, *, with_service: bool) -> tuple[dict[str, str], list[int]]:
    """Write the programs to a folder.

    Args:
        folder: the folder.
        with_service: whether `python` is among them; otherwise it is removed, and shells find the interpreter.

    Returns:
        The environment variables and the descriptors that the programs need.
    """
    variables, descriptors = prepared_cli().install(folder / "sandbox", CLI_VARIABLE)
    python, service = folder / "python", folder / "sandbox-service"
    if not with_service:
        python.unlink(missing_ok=True)
        return variables, descriptors
    of_service, more = prepared_service().install(service, SERVICE_VARIABLE)
    python.write_text(PYTHON.format(service=service, python=sys.executable), encoding="utf-8")
    python.chmod(0o755)
    return variables | of_service, descriptors + more
