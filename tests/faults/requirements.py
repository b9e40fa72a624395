"""What each kind of fault needs of this machine, tried and not guessed: a program, a privilege. What is missing is named."""

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
    """The library that gives a process another wall clock, wherever this architecture has it; None: it is not installed."""
    return next(iter(sorted(libraries.glob("*/faketime/libfaketime.so.1"))), None)


def fake_clock(library: Path, clock: Path) -> dict[str, str]:
    """The variables with which a process reads its wall clock's offset from a file, again every second."""
    return {
        "LD_PRELOAD": str(library),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_DONT_RESET": "1",
    }


def clock_problem(library: Path | None, folder: Path, environ: Mapping[str, str]) -> str | None:
    """Why the wall clock of a process cannot be set here; None: it can.

    Args:
        library: libfaketime, if it is installed.
        folder: where a file can be written for the try.
        environ: the variables of the process that tries it.
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
