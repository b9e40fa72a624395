"""Test that the demonstration does what the README says."""

from __future__ import annotations

import subprocess
import sys

from tests.support.service import clean_environ
from tests.support.users import ROOT


def test_the_demo_fixes_the_project_in_all_slots() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "env_client.demo"], cwd=ROOT, env=clean_environ({"COLUMNS": "140"}), capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("FAILED (failures=1)") == 8
    assert done.stdout.count("OK") == 8
    assert "clean" in done.stdout
