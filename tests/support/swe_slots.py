"""Slots for the tests of swe_smith_oracle: a service in each isolation mode, and a set-up that uses no package index."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator, Iterator

from env_client import AsyncLease
from environments.rollouts.exec_tool import ExecTool
from environments.rollouts.pool_spec import PoolRequest
from environments.rollouts.service import ConnectionSettings, PoolConnection
from tests.support.service import Service, running_service

POOL = {
    "backend": "local", "slots_per_sandbox": 3, "min_sandboxes": 1, "max_sandboxes": 1, "default_timeout_s": 120, "on_shutdown": "destroy",
    "env_vars": {"PIP_NO_INDEX": "1"},
}  # fmt: skip


@contextlib.contextmanager
def service_in_mode(mode: str) -> Iterator[Service]:
    """Start a service whose slots have an isolation mode. Without bubblewrap on its PATH, it has the mode `uid`."""
    with (
        tempfile.TemporaryDirectory(prefix="sp-empty-") as empty,
        running_service({"pools": {"default": POOL}}, env={"PATH": empty} if mode == "uid" else {}) as service,
    ):
        yield service


@contextlib.asynccontextmanager
async def connected(service: Service) -> AsyncIterator[PoolConnection]:
    """Open a connection to the pool of a service. All connections belong to one run, so what one test puts into the set-up cache, the next one finds."""
    settings = ConnectionSettings(sandbox_url=service.url, sandbox_token=service.token, run_id="swe-tests", releases_run=False)
    async with PoolConnection(PoolRequest(name="default", spec=None, acquire_timeout_s=60.0), settings) as pool:
        yield pool


@contextlib.asynccontextmanager
async def slots(pool: PoolConnection, count: int) -> AsyncIterator[list[ExecTool]]:
    """Hold slots for the duration of a block."""
    leases: tuple[AsyncLease, ...] = await pool.acquire([f"t-{number}" for number in range(count)])
    try:
        yield [pool.make_exec_tool(lease) for lease in leases]
    finally:
        await pool.release(leases)


async def shell(exec_tool: ExecTool, command: str) -> str:
    """Run a command and return what it wrote; it must succeed."""
    result = await exec_tool("terminal", {"command": command}, timeout=120)
    assert result.metadata["exit_code"] == 0, result.output
    return result.output
