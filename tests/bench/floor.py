"""The floor: how fast the bare machine spawns `bash -c true`."""

from __future__ import annotations

import json
import statistics
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

SOURCE = Path(__file__).with_name("floor.c")
COMMAND = ("bash", "-c", "true")


@dataclass
class Floor:
    """Laps of the bare machine, taken several times over a run, because a machine is not the same from one minute to the next."""

    program: Path
    p50s_s: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)

    @classmethod
    def built(cls, folder: Path) -> Floor:
        """Compile the floor into a folder.

        Raises:
            subprocess.CalledProcessError: It does not compile.
        """
        program = folder / "floor"
        subprocess.run(["cc", "-O2", "-Wall", "-Wextra", "-o", str(program), str(SOURCE)], check=True)
        return cls(program)

    def measure_one(self) -> None:
        """One command at a time."""
        self.p50s_s.append(self._run(150, 1)["p50_s"])

    def measure_rate(self) -> None:
        """Four commands at a time."""
        self.rates.append(self._run(1000, 4)["rate"])

    def _run(self, count: int, parallel: int) -> dict[str, float]:
        done = subprocess.run([str(self.program), str(count), str(parallel), *COMMAND], check=True, capture_output=True, text=True)
        value: dict[str, float] = json.loads(done.stdout)
        return value

    @property
    def p50_s(self) -> float:
        """One command at a time."""
        return statistics.median(self.p50s_s)

    @property
    def rate(self) -> float:
        """Commands a second, four at a time."""
        return statistics.median(self.rates)
