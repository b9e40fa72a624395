"""The peer: SWE-ReX, in a virtual environment of its own, kept running so that it can be measured in turns with the service."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PROGRAM = Path(__file__).with_name("peer_swerex.py")
REQUIREMENTS = ("swe-rex", "aiohttp")


class Peer:
    """A running SWE-ReX server and its client, measured on request.

    Args:
        process: `peer_swerex.py`: each line on its stdin starts one measurement, each line on its stdout is one result.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def measure_one_call_s(self) -> float:
        """Return the median time of one `execute`, in seconds, with one at a time."""
        return self._measure("one_call_s")

    def measure_rate(self) -> float:
        """Return the number of `execute` per second with eight clients."""
        return self._measure("rate")

    def _measure(self, name: str) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{name}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"SWE-ReX ended with {self._process.wait()} while it was measured")
        return float(line)


@contextlib.contextmanager
def running_peer(folder: Path) -> Iterator[Peer]:
    """Install SWE-ReX into a folder if it is not there yet, and run it for the length of the block.

    Raises:
        subprocess.CalledProcessError: it cannot be installed.
        OSError: it cannot be started.
    """
    python = folder / "peer-venv" / "bin" / "python"
    if not python.exists() or subprocess.run([str(python), "-c", "import swerex, aiohttp"], check=False, capture_output=True).returncode != 0:
        subprocess.run([sys.executable, "-m", "venv", str(python.parent.parent)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *REQUIREMENTS], check=True)
    with subprocess.Popen([str(python), str(PROGRAM)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Peer(process)
        # Leaving the block closes the program's stdin, which ends it.
