"""Fixtures: `sandbox` as a process, with a running service and without one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.cli.sandbox_command import SandboxCommand
from tests.support.service import Service


@pytest.fixture
def sandbox(service: Service, tmp_path: Path) -> SandboxCommand:
    """`sandbox` with the shared service, in a working folder of the test's own."""
    return SandboxCommand(service.environ, tmp_path)


@pytest.fixture
def lease(sandbox: SandboxCommand) -> Iterator[str]:
    """A lease that is released after the test."""
    lease_id = sandbox.out("acquire", "--wait", "30").strip()
    yield lease_id
    sandbox("release", lease_id)


@pytest.fixture
def alone(tmp_path: Path) -> SandboxCommand:
    """`sandbox` on a machine where no service runs."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "state").mkdir()
    return SandboxCommand({"SANDBOX_STATE_DIR": str(tmp_path / "state"), "TMPDIR": str(tmp_path / "tmp")}, tmp_path)
