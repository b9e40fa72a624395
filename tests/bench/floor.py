"""The floor: how fast the bare machine starts `bash -c true` and waits for it, measured by a small C program."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("floor.c")
COMMAND = ("bash", "-c", "true")
ONE_CALL_LAPS = 60
RATE_LAPS, RATE_PARALLEL = 400, 4


@dataclass(frozen=True)
class Floor:
    """The compiled program that measures the bare machine.

    Args:
        program: its path.
    """

    program: Path

    @classmethod
    def compile(cls, folder: Path) -> Floor:
        """Compile the program into a folder.

        Raises:
            subprocess.CalledProcessError: it does not compile.
        """
        program = folder / "floor"
        subprocess.run(["cc", "-O2", "-Wall", "-Wextra", "-o", str(program), str(SOURCE)], check=True)
        return cls(program)

    def measure_one_call_s(self) -> float:
        """Return the median time of one command, in seconds, with one command at a time."""
        return self._run(ONE_CALL_LAPS, 1)["p50_s"]

    def measure_rate(self) -> float:
        """Return the number of commands per second, with four commands at a time."""
        return self._run(RATE_LAPS, RATE_PARALLEL)["rate"]

    def _run(self, count: int, parallel: int) -> dict[str, float]:
        done = subprocess.run([str(self.program), str(count), str(parallel), *COMMAND], check=True, capture_output=True, text=True)
        value: dict[str, float] = json.loads(done.stdout)
        return value
