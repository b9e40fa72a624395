"""The peer: SWE-ReX, installed into a virtual environment of its own the first time."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

PROGRAM = Path(__file__).with_name("peer_swerex.py")
NEEDS = ("swe-rex", "aiohttp")


@dataclass(frozen=True)
class Peer:
    """What SWE-ReX takes for one `execute`, and how many it does a second with eight clients."""

    p50_s: float
    rate: float


def measure_peer(folder: Path) -> Peer:
    """Install SWE-ReX if it is not there yet, and measure it.

    Raises:
        subprocess.CalledProcessError: It cannot be installed, or does not run.
    """
    python = folder / "peer-venv" / "bin" / "python"
    if not python.exists() or subprocess.run([str(python), "-c", "import swerex, aiohttp"], check=False, capture_output=True).returncode != 0:
        subprocess.run([sys.executable, "-m", "venv", str(python.parent.parent)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *NEEDS], check=True)
    done = subprocess.run([str(python), str(PROGRAM)], check=True, stdout=subprocess.PIPE, text=True)
    return Peer(**json.loads(done.stdout))
