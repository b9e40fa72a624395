"""The harnesss that are attacked: every isolation mode that this machine has, as root where we are root, and as an ordinary user."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hostile.harness import Harness
from tests.hostile.matrix import Matrix
from tests.support.service import running_service
from tests.support.users import ME, ordinary_user

POOL = {
    "backend": "local",
    "slots_per_sandbox": 3,
    "min_sandboxes": 1,
    "max_sandboxes": 1,
    "require_sandbox": True,
    "slot_processes": 200,
    "max_file_mb": 64,
    "on_shutdown": "destroy",
}
HARNESSS = [("bwrap", "root"), ("uid", "root"), ("bwrap", "user")] if os.geteuid() == 0 else [("bwrap", "user")]
MATRIX_FOLDER = Path(__file__).resolve().parent.parent.parent / "build"


@pytest.fixture(scope="session")
def matrix() -> Iterator[Matrix]:
    it = Matrix()
    yield it
    if it.rows:
        it.save(MATRIX_FOLDER)


@pytest.fixture(scope="package", params=HARNESSS, ids="-".join)
def running_harness(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    """One service a harness, for the whole suite. The `uid` harness is a machine without bubblewrap: its PATH has none."""
    mode, user = request.param
    if mode == "bwrap":
        assert shutil.which("bwrap"), "bubblewrap is not installed: `make setup` says how to get it"
    environ = {"PATH": str(tmp_path_factory.mktemp("empty"))} if mode == "uid" else {}
    runner = ME if user == ("root" if os.geteuid() == 0 else "user") else ordinary_user()
    with running_service({"pools": {"default": POOL}}, env=environ, runner=runner) as service:
        harness = Harness(mode=mode, user=user, url=service.url, token=service.token, state_dir=str(service.state_dir), pid=service.process.pid)
        yield harness
        harness.client.close()


@pytest.fixture
def harness(running_harness: Harness) -> Iterator[Harness]:
    """The harness with all its slots free, before and after."""
    running_harness.settled()
    yield running_harness
    running_harness.release_all()
    running_harness.settled()


@pytest.fixture
def file_count(harness: Harness) -> int:
    """How many files the flood makes: a million once, fewer in the other harnesss, to keep the suite short."""
    return 1_000_000 if harness.name == "`bwrap` as root" else 100_000
