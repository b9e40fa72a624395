"""What each kind of fault needs on this machine, such as a program or a privilege. Each is tried, and what is missing is named."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

LIBRARIES = Path("/usr/lib")
INSTALL = "apt-get install faketime"
PROBE_S = 86_400
PROBE = "import time; print(time.time())"
PROBE_TIMEOUT_S = 20.0


def faketime_library(libraries: Path = LIBRARIES) -> Path | None:
    """Return the path of the library that sets the wall clock of a process, or None where it is not installed."""
    return next(iter(sorted(libraries.glob("*/faketime/libfaketime.so.1"))), None)


def fake_clock(library: Path, clock: Path) -> dict[str, str]:
    """Return the environment variables with which a process reads the offset of its wall clock from a file every second."""
    return {
        "LD_PRELOAD": str(library),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_DONT_RESET": "1",
    }


def clock_problem(library: Path | None, folder: Path, environ: Mapping[str, str]) -> str | None:
    """Return why the wall clock of a process cannot be set on this machine, or None where it can.

    Args:
        library: the path of libfaketime; None if it is not installed.
        folder: a folder for the file with the offset.
        environ: the environment variables of the process with which it is tried.
    """
    if library is None:
        return f"libfaketime is not installed ({INSTALL})"
    clock = folder / "clock.probe"
    clock.write_text(f"{PROBE_S:+d}\n", encoding="ascii")
    tried = subprocess.run(
        [sys.executable, "-c", PROBE], env={**environ, **fake_clock(library, clock)}, check=False, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S
    )
    clock.unlink()
    try:
        is_set = abs(float(tried.stdout) - time.time() - PROBE_S) < PROBE_S / 2
    except ValueError:
        is_set = False
    return None if is_set else f"{library} does not set the clock of {sys.executable}: {tried.stderr.strip() or 'no error'}"
