"""The slots of a run: those of its own pool, and those of the pools and images that single rows name."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from env_client import (
    AcquireOptions,
    AsyncLease,
    CallGatherer,
    Forbidden,
    InvalidRequest,
    NotImplementedYet,
    PoolConflict,
    PoolInfo,
    PoolNotFound,
    SandboxError,
    Unauthorized,
    available_tools,
)
from environments.batch.files.prompt_file import Prompt
from environments.batch.settings import BatchSettings
from environments.rollouts.cancellation import finish_despite_cancellation, was_cancelled
from environments.rollouts.exec_tool import RolloutFault
from environments.rollouts.pool_spec import DELETE_AFTER_IDLE_S, PoolRequest, name_pool
from environments.rollouts.service import PoolConnection, PoolUnavailable

#: The slots of one sandbox in the pools that the runner makes.
SLOTS_PER_SANDBOX = 10
#: How many pools of rows are remembered with their tools.
MAX_KNOWN_POOLS = 256
#: What the service refuses because of the row itself. Another attempt would be refused, too.
_ROW_ERRORS = (PoolNotFound, NotImplementedYet, InvalidRequest, Forbidden, PoolConflict)


class RowRefused(Exception):
    """The service does not have what the row asks for; the message is the service's own sentence."""


def plan_run_pool(settings: BatchSettings) -> PoolRequest:
    """Return the pool of a run: the named one, or one on the local backend with a slot for each worker."""
    if settings.pool is not None:
        return PoolRequest(name=settings.pool, spec=None, acquire_timeout_s=settings.acquire_timeout_s)
    spec = _make_spec("local", settings)
    return PoolRequest(name=name_pool(spec), spec=spec, acquire_timeout_s=settings.acquire_timeout_s)


def _make_spec(backend: str, settings: BatchSettings, image: str | None = None) -> dict[str, Any]:
    """Return the spec of a pool with a slot for each worker."""
    slots_per_sandbox = min(settings.num_workers, SLOTS_PER_SANDBOX)
    spec: dict[str, Any] = {
        "backend": backend,
        "slots_per_sandbox": slots_per_sandbox,
        "min_sandboxes": 1,
        "max_sandboxes": -(-settings.num_workers // slots_per_sandbox),
        "acquire_timeout_s": settings.acquire_timeout_s,
        "delete_after_idle_s": DELETE_AFTER_IDLE_S,
    }
    return spec if image is None else {**spec, "image": image}


class RunSlots:
    """Acquires the slots of a run and releases them.

    Args:
        connection: the opened connection to the pool of the run.
        settings: the settings of the run.
    """

    def __init__(self, connection: PoolConnection, settings: BatchSettings) -> None:
        self._connection = connection
        self._settings = settings
        self._pools: dict[str, PoolInfo] = {}
        #: How many slots are held.
        self.held_count = 0

    @property
    def gatherer(self) -> CallGatherer:
        """Sends the tool calls of all trajectories."""
        return self._connection.gatherer

    async def release_earlier_slots(self) -> None:
        """Release the slots that a killed process of the same run still holds.

        Raises:
            SandboxError: the service does not release them.
        """
        await self._connection.client.release(run_id=self._connection.run_id)

    @asynccontextmanager
    async def slot(self, prompt: Prompt, trajectory_id: str) -> AsyncIterator[AsyncLease]:
        """Hold a slot for a prompt during a block, in the pool that its row names, or in that of the run. It is released however the block ends.

        Raises:
            RowRefused: the service does not have the pool or the image of the row.
            RolloutFault: no slot could be acquired; a later attempt may succeed.
            PoolUnavailable: the pool of the run cannot be used any more.
        """
        if prompt.pool is None and prompt.image is None:
            # A pool with fewer slots than workers is no fault: the prompt waits for the slots of the other workers, however long these take.
            (lease,) = await self._connection.acquire([trajectory_id], cache=None, waits_for_own=True)
        else:
            lease = await self._acquire_for_row(prompt, trajectory_id)
        self.held_count += 1
        try:
            yield lease
        finally:
            self.held_count -= 1
            await finish_despite_cancellation(self._connection.release([lease], cancelled=was_cancelled()))

    async def pool_of(self, lease: AsyncLease) -> PoolInfo:
        """Return the pool of a slot, with the tools that it has.

        Raises:
            RolloutFault: the service does not describe the pool.
        """
        name = lease.info.pool
        known = self._pools.get(name)
        if known is None:
            try:
                known = await self._connection.client.pool(name)
            except SandboxError as error:
                raise RolloutFault.from_error(error) from error
            if len(self._pools) >= MAX_KNOWN_POOLS:
                self._pools.clear()
            if "tools" in known.capabilities:  # otherwise its first sandbox has not reported yet
                self._pools[name] = known
        return known

    async def _acquire_for_row(self, prompt: Prompt, trajectory_id: str) -> AsyncLease:
        try:
            name = prompt.pool or await self._ensure_image_pool(prompt.image or "")
            options: AcquireOptions = {
                "run_id": self._connection.run_id,
                "trajectory_id": trajectory_id,
                "ttl_s": self._settings.lease_ttl_s,
                "wait_s": self._settings.acquire_timeout_s,
            }
            (lease,) = await self._connection.client.hold(1, name, **options)
        except Unauthorized:
            raise
        except _ROW_ERRORS as error:
            raise RowRefused(error.detail) from error
        except SandboxError as error:
            raise RolloutFault(f"no slot could be acquired: {error.detail}", reason=error.code) from error
        return lease

    async def _ensure_image_pool(self, image: str) -> str:
        """Make the pool of an image, unless the service has it already; return its name."""
        spec = _make_spec(self._settings.image_backend, self._settings, image)
        name = name_pool(spec)
        await self._connection.client.pool_put(name, spec)
        return name


def describe_pool_error(error: PoolUnavailable) -> str:
    """Return the sentence of an error with the settings under the names that they have here."""
    sentence = str(error)
    for name, here in (("sandbox_pool", "--pool"), ("sandbox_url", "SANDBOX_URL"), ("sandbox_token", "SANDBOX_TOKEN")):
        sentence = sentence.replace(name, here)
    return sentence


def tools_of(pool: PoolInfo) -> tuple[str, ...]:
    """Return the slot tools that a model can use in a pool."""
    return available_tools(pool.capabilities)


def max_timeout_s(pool: PoolInfo) -> float:
    """Return the longest timeout that a call may have in a pool, in seconds."""
    spec: Mapping[str, Any] = pool.spec
    return float(spec.get("max_timeout_s") or 3600.0)
