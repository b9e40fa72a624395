"""What the first process of a slot imports. Every slot has one, and needs memory for each module."""

from __future__ import annotations

import subprocess
import sys

from tests.support.users import ROOT

NAMES = "import sys; sys.path.insert(0, sys.argv[1]); import sandbox_server.agent.init.init; print(*sys.modules)"
OWN = "sandbox_server"
LARGE_MODULES = {"asyncio", "collections", "contextlib", "dataclasses", "enum", "functools", "re", "signal", "socket", "subprocess", "threading", "typing"}


def test_init_imports_no_large_module() -> None:
    done = subprocess.run([sys.executable, "-I", "-S", "-B", "-c", NAMES, str(ROOT)], capture_output=True, text=True, check=True)
    names = set(done.stdout.split())

    assert not names & LARGE_MODULES
    assert {name for name in names if name.startswith(OWN)} == {name for name in names if name.startswith(f"{OWN}.agent.init.")} | {
        OWN,
        f"{OWN}.agent",
        f"{OWN}.agent.init",
    }
