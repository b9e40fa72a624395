"""Services in every isolation mode of this machine, and what a test of terminals does with them."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.support.service import Service, running_service
from tests.support.terminal_client import TerminalClient, open_terminal
from tests.support.users import ME, ordinary_user

ROOT = [("bwrap", "root"), ("uid", "root")]
USER = [("bwrap", "user"), ("none", "user")]
MODES = [*ROOT, *USER] if os.geteuid() == 0 else USER
POOL = {"backend": "local", "slots_per_sandbox": 2, "min_sandboxes": 1, "max_sandboxes": 1, "on_shutdown": "destroy"}


@dataclass(frozen=True)
class TerminalHarness:
    """A running service with terminals.

    Args:
        mode: the isolation mode of its slots.
        service: the service.
        http: a client of it.
    """

    mode: str
    service: Service
    http: httpx.Client

    def acquire(self) -> str:
        """Acquire a slot. Returns the lease id."""
        answer = self.http.post("/v1/acquire", json={"wait_s": 30, "run_id": "terminals"})
        (lease,) = answer.raise_for_status().json()["leases"]
        assert lease["isolation"] == self.mode
        return str(lease["lease_id"])

    def release(self, lease_id: str) -> None:
        """Release a lease."""
        self.http.post("/v1/release", json={"lease_ids": [lease_id]}).raise_for_status()

    def bash(self, lease_id: str, command: str) -> str:
        """Run a command beside the terminals. Returns its output."""
        result = self.http.post(f"/v1/leases/{lease_id}/exec", json={"command": command}).raise_for_status().json()
        assert result["success"], result
        return str(result["output"])

    def terminal(self, lease_id: str, options: dict[str, Any] | None = None, **fields: Any) -> AbstractAsyncContextManager[TerminalClient]:
        """Connect to a terminal."""
        return open_terminal(self.service.url, self.service.token, lease_id, options, **fields)


@contextlib.contextmanager
def terminal_harness(mode: str, user: str) -> Iterator[TerminalHarness]:
    """Start a service in one isolation mode."""
    runner = ME if user == ("root" if os.geteuid() == 0 else "user") else ordinary_user()
    with tempfile.TemporaryDirectory() as empty:
        environ = {} if mode == "bwrap" else {"PATH": empty}  # as on a machine without bubblewrap
        pool = {**POOL, "allow_none": True} if mode == "none" else POOL
        with running_service({"pools": {"default": pool}}, env=environ, runner=runner) as service, service.http() as http:
            yield TerminalHarness(mode, service, http)


@pytest.fixture(scope="package", params=MODES, ids="-".join)
def every_mode(request: pytest.FixtureRequest) -> Iterator[TerminalHarness]:
    """A service in each mode, shared by the tests of this folder."""
    with terminal_harness(*request.param) as harness:
        yield harness


@pytest.fixture(scope="package")
def bwrap() -> Iterator[TerminalHarness]:
    """A service in the mode `bwrap`, shared by the tests of this folder."""
    with terminal_harness(*MODES[0]) as harness:
        yield harness


@pytest.fixture
async def lease_in_mode(every_mode: TerminalHarness) -> AsyncIterator[str]:
    """A lease in each mode, released after the test."""
    lease_id = every_mode.acquire()
    yield lease_id
    every_mode.release(lease_id)


@pytest.fixture
async def lease(bwrap: TerminalHarness) -> AsyncIterator[str]:
    """A lease in the mode `bwrap`, released after the test."""
    lease_id = bwrap.acquire()
    yield lease_id
    bwrap.release(lease_id)
