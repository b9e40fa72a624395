"""The task that keeps one sandbox from its creation to its end: it creates it, holds the link to its agent, sends it requests, and destroys it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any

from sandbox_server.backends.base import CreateContext, CreateFailed
from sandbox_server.core.errors import PoolServiceError, StorageUnavailable
from sandbox_server.core.types import Handle, Lease
from sandbox_server.link import AgentClient, AgentRefused, LinkLost
from sandbox_server.link.agent_reports import VerifyReport
from sandbox_server.link.errors import AgentProtocolError, NotSupportedByAgent
from sandbox_server.pool.dependencies import PoolDependencies
from sandbox_server.pool.fleet.observed import (
    AdoptedCallsEnded,
    CacheDropEnded,
    CheckpointReached,
    Observed,
    ResetFailed,
    SandboxConnected,
    SandboxDestroyed,
    SandboxDisconnected,
    SandboxEndTimeObserved,
    SandboxFailed,
    SlotsObserved,
)
from sandbox_server.pool.fleet.sandbox import Cache, Sandbox
from sandbox_server.pool.fleet.supervision.agent_connector import AgentConnector, UnexpectedSandboxEnd
from sandbox_server.pool.fleet.supervision.backend_access import BackendAccess
from sandbox_server.pool.inbox import InboxWriter
from sandbox_server.pool.leasing.held_lease import ResetOrder

log = logging.getLogger(__name__)

FIRST_DESTROY_PAUSE_S = 1.0
LONGEST_DESTROY_PAUSE_S = 10.0


class SandboxSupervisor:
    """Creates one sandbox, holds the link to its agent, and destroys it. `run` does this; `destroy_sandbox` makes it destroy the sandbox and return.

    The supervisor only reads the sandbox. What it observes goes into the inbox.

    Args:
        sandbox: the sandbox.
        inbox: takes what the supervisor observes.
        access: the backend, with the budgets and the observer that its pools share.
        dependencies: clock, timers, store, metrics and how to connect.
        acquires_wait: returns whether an acquire waits for a slot of the pool.
    """

    def __init__(
        self, sandbox: Sandbox, inbox: InboxWriter[Observed], access: BackendAccess, dependencies: PoolDependencies, acquires_wait: Callable[[], bool]
    ) -> None:
        self._sandbox = sandbox
        self._sandbox_id = sandbox.sandbox_id
        self._inbox = inbox
        self._backend = access.backend
        self._budget = access.budget
        self._resets = access.resets
        self._acquires_wait = acquires_wait
        self._dependencies = dependencies
        self._connector = AgentConnector(sandbox, access.backend, access.observer, dependencies)
        self._handle: Handle | None = sandbox.handle
        self._agent: AgentClient | None = None
        self._destroy_ordered = asyncio.Event()
        self._abort_reason: str | None = None
        self._requests: set[asyncio.Task[None]] = set()

    def destroy_sandbox(self) -> None:
        """Destroy the sandbox, whatever it is doing."""
        self._destroy_ordered.set()

    def abort_sandbox(self, reason: str) -> None:
        """Report the sandbox as failed and destroy it, because the service cannot keep it.

        Args:
            reason: why, as shown to the holders of its leases.
        """
        self._abort_reason = reason
        self._destroy_ordered.set()

    async def run(self) -> None:
        """Create the sandbox or find it again, keep it, and destroy it. Returns when it is gone."""
        if not self._destroy_ordered.is_set():
            await self._keep_until_end()
        await self._destroy()

    async def _keep_until_end(self) -> None:
        keeping = asyncio.create_task(self._keep_connected())
        ordered = asyncio.create_task(self._destroy_ordered.wait())
        try:
            await asyncio.wait({keeping, ordered}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (keeping, ordered, *self._requests):
                task.cancel()
            await asyncio.gather(keeping, ordered, *self._requests, return_exceptions=True)
            if self._agent is not None:
                await self._agent.close()
        error = None if keeping.cancelled() else keeping.exception()
        if self._abort_reason is not None:
            error = UnexpectedSandboxEnd(self._abort_reason)
        if isinstance(error, Exception):
            self._inbox.put(SandboxFailed(sandbox_id=self._sandbox_id, error=error))

    async def _keep_connected(self) -> None:
        """Create the sandbox if it is new, then hold a link to its agent until the task is cancelled.

        Raises:
            CreateFailed, PoolServiceError: the sandbox could not be created.
            UnexpectedSandboxEnd: it has ended although the service did not destroy it, or the service can no longer use it.
        """
        try:
            if self._sandbox.boot is not None and self._handle is not None:
                agent, report = await self._connector.reconnect(self._handle, "the service was started again")
            else:
                async with self._budget.reserve_creation():
                    agent, report = await self._connector.connect_first(await self._create())
            if self._backend.traits.ends_sandboxes:
                self._start_request(self._report_end_time())
            while True:
                self._agent = agent
                self._inbox.put(SandboxConnected(sandbox_id=self._sandbox_id, agent=agent, report=report))
                reason = await self._watch_slots(agent)
                self._inbox.put(SandboxDisconnected(sandbox_id=self._sandbox_id))
                await agent.close()
                assert self._handle is not None, "a sandbox that was connected to has a handle"
                agent, report = await self._connector.reconnect(self._handle, reason)
        except (CreateFailed, UnexpectedSandboxEnd, PoolServiceError):
            raise
        except AgentProtocolError as error:
            raise UnexpectedSandboxEnd(f"its agent violated the protocol: {error}") from error
        except Exception as error:  # a fault in keeping one sandbox must not end the pool
            log.exception("keeping a sandbox failed", extra=self._sandbox.fields)
            raise UnexpectedSandboxEnd(f"the service could not keep it: {type(error).__name__}: {error}") from error

    async def _create(self) -> Handle:
        sandbox = self._sandbox
        context = CreateContext(pool_id=sandbox.pool_id, spec=sandbox.spec, sandbox_id=sandbox.sandbox_id)
        async with aclosing(self._backend.create(context)) as checkpoints:
            async for handle in checkpoints:
                self._handle = handle
                # Each checkpoint is on disk before the next step begins, so that a crash leaves nothing that cannot be found again.
                await self._inbox.put_and_wait(CheckpointReached(sandbox_id=sandbox.sandbox_id, handle=handle))
                await self._dependencies.store.flush()
        if self._handle is None or self._handle.address is None:
            raise CreateFailed("the backend made no agent that can be reached")
        return self._handle

    async def _report_end_time(self) -> None:
        assert self._handle is not None, "a sandbox that was connected to has a handle"
        self._inbox.put(SandboxEndTimeObserved(sandbox_id=self._sandbox_id, ends_at=await self._connector.wait_for_end_time(self._handle)))

    async def _watch_slots(self, agent: AgentClient) -> str:
        """Report the state of the agent's slots until the link is lost. Returns how that happened, as part of a sentence."""
        try:
            async with aclosing(agent.watch_slots(self._sandbox_id)) as updates:
                async for update in updates:
                    self._inbox.put(SlotsObserved(sandbox_id=self._sandbox_id, slots=update.slots, effective=update.effective))
        except LinkLost as error:
            return str(error)
        except AgentRefused as error:
            return f"its agent refused to report its slots: {error}"
        return "its agent ended the stream of slot reports"

    # Requests to the agent.

    def _start_request(self, request: Coroutine[Any, Any, None]) -> None:
        """Run a request in a task of its own, at most as long as the sandbox is kept."""
        task = asyncio.create_task(request)
        self._requests.add(task)
        task.add_done_callback(self._requests.discard)

    def reset_slot(self, order: ResetOrder) -> None:
        """Have the agent reset a slot. If the link is lost, the pool orders the reset again once there is a new one."""
        if self._agent is not None and self._agent.is_connected:
            self._start_request(self._reset_slot(self._agent, order))

    async def _reset_slot(self, agent: AgentClient, order: ResetOrder) -> None:
        """Reset a slot when it is its turn."""
        async with self._resets.reserve_reset(self._acquires_wait):
            await self._ask_for_reset(agent, order)

    async def _ask_for_reset(self, agent: AgentClient, order: ResetOrder) -> None:
        """Reset a slot. Only a problem is reported from here: that the slot is clean is reported by `_watch_slots`, which is earlier."""
        await self._flush_epoch()
        clock, spec = self._dependencies.clock, self._sandbox.spec
        started = clock.monotonic()
        try:
            report = await agent.reset_slot(order.ref.slot_id, order.epoch, has_network=spec.slots_have_network, keeps_files=order.keep)
        except LinkLost:
            return
        except AgentRefused as error:
            self._inbox.put(ResetFailed(ref=order.ref, epoch=order.epoch, problem=f"its agent refused to reset it: {error}"))
            return
        self._dependencies.meter.observe("sandbox_reset_seconds", clock.monotonic() - started, **self._sandbox.pool_id.labels)
        if report.problem is not None:
            self._inbox.put(ResetFailed(ref=order.ref, epoch=order.epoch, problem=report.problem))

    async def verify_slot(self, order: ResetOrder) -> VerifyReport:
        """Have the agent put leftovers into a free slot and reset it. The slot is clean afterwards, or in quarantine.

        Args:
            order: the slot and its epoch after the reset.

        Raises:
            LinkLost: the agent cannot be reached now. The slot is reset once it can.
            AgentRefused: the agent has refused the self-test. The slot is reset.
        """
        await self._flush_epoch()
        if self._agent is None:
            raise LinkLost("the link went before the slot was verified")
        try:
            report = await self._agent.verify_slot(order.ref.slot_id, order.epoch, has_network=self._sandbox.spec.slots_have_network)
        except AgentRefused:
            self.reset_slot(order)
            raise
        if report.problem is not None:
            self._inbox.put(ResetFailed(ref=order.ref, epoch=order.epoch, problem=report.problem))
        return report

    async def _flush_epoch(self) -> None:
        """Wait until a slot's next epoch is on disk, before the agent learns it. So a service that starts again never repeats an epoch.

        If it cannot be written, the slot is reset all the same. A service that starts then learns from the agent that its epoch is newer.
        """
        try:
            await self._dependencies.store.flush()
        except StorageUnavailable as error:
            log.warning("a slot is reset although its new epoch could not be written: %s", error.detail, extra=self._sandbox.fields)

    def drop_cache(self, cache: Cache) -> None:
        """Have the agent delete a shared cache."""
        self._start_request(self._drop_cache(cache))

    async def _drop_cache(self, cache: Cache) -> None:
        is_gone = False
        try:
            if self._agent is not None:
                await self._agent.drop_cache(cache.record.key)
                is_gone = True
        except LinkLost:
            pass  # the pool orders it again once there is a new link
        except NotSupportedByAgent:
            is_gone = True
        except AgentRefused as error:
            # The cache cannot be deleted before the slots that used it have been reset. The request is repeated.
            log.debug("a cache is not dropped yet: %s", error, extra=self._sandbox.fields)
        self._inbox.put(CacheDropEnded(sandbox_id=self._sandbox_id, cache=cache, is_gone=is_gone))

    def wait_for_adopted_calls(self, lease: Lease) -> None:
        """Have the agent report when no call runs any more in the slot of an adopted lease."""
        self._start_request(self._wait_for_adopted_calls(lease))

    async def _wait_for_adopted_calls(self, lease: Lease) -> None:
        calls_ran = True
        try:
            if self._agent is not None:
                calls_ran = await self._agent.wait_until_quiet(lease.slot_id, lease.epoch)
        except LinkLost:
            return  # the pool orders it again once there is a new link
        except AgentRefused as error:
            fields = {"lease_id": lease.lease_id, "sandbox_id": lease.sandbox_id}
            log.warning("an agent does not report whether calls of an adopted lease still run: %s", error, extra=fields)
        self._inbox.put(AdoptedCallsEnded(sandbox_id=self._sandbox_id, lease_id=lease.lease_id, calls_ran=calls_ran))

    # The end.

    async def _destroy(self) -> None:
        pause_s = FIRST_DESTROY_PAUSE_S
        while self._handle is not None:
            try:
                await self._backend.destroy(self._handle)
            except (OSError, PoolServiceError) as error:
                log.warning("a sandbox could not be destroyed yet: %s", error, extra=self._sandbox.fields)
                self._count_destroy("failed")
                await self._dependencies.timers.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_DESTROY_PAUSE_S)
            else:
                self._count_destroy("ok")
                break
        self._inbox.put(SandboxDestroyed(sandbox_id=self._sandbox_id))

    def _count_destroy(self, outcome: str) -> None:
        self._dependencies.meter.count("sandbox_backend_calls_total", backend=self._backend.name, op="destroy", outcome=outcome)
