"""SIGTERM while the service starts: it ends as it does later, whatever it was at."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.service import clean_environ
from tests.support.users import ROOT

ENDS_WITHIN_S = 30.0
#: From when it listens for the signal: among the imports, in the look at its settings, while it makes its first sandbox.
DELAYS_S = (0.0, 0.1, 0.3, 0.6, 0.9, 1.2)


def listens_for_sigterm(pid: int) -> bool:
    """Whether a process has a handler for SIGTERM."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    caught = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(caught >> (signal.SIGTERM - 1) & 1)


def start(state_dir: Path, log: Path) -> subprocess.Popen[bytes]:
    """A service, once it listens for SIGTERM."""
    command = [sys.executable, "-m", "sandbox_server", "serve", "--port", "0", "--ephemeral"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=clean_environ({"SANDBOX_STATE_DIR": str(state_dir)}), stdout=output, stderr=output)
    until = time.monotonic() + ENDS_WITHIN_S
    while not listens_for_sigterm(process.pid):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < until
    return process


def test_it_listens_for_sigterm_before_it_imports_what_takes_long(tmp_path: Path) -> None:
    process = start(tmp_path / "state", tmp_path / "log")
    loaded = Path(f"/proc/{process.pid}/maps").read_text()
    process.send_signal(signal.SIGTERM)

    assert process.wait(ENDS_WITHIN_S) == 0
    assert "pydantic_core" not in loaded


@pytest.mark.timeout(120)
def test_it_ends_with_0_and_leaves_nothing_whenever_the_signal_comes(tmp_path: Path) -> None:
    for number, delay_s in enumerate(DELAYS_S):
        state_dir, log = tmp_path / f"state-{number}", tmp_path / f"log-{number}"
        process = start(state_dir, log)
        time.sleep(delay_s)
        process.send_signal(signal.SIGTERM)

        assert process.wait(ENDS_WITHIN_S) == 0, f"{delay_s:g} s after it listened for the signal:\n{log.read_text()}"
        assert not state_dir.exists()
