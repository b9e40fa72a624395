"""All that is waited for on behalf of one sandbox: its creation, its link, its slots' resets, its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Protocol

from sandbox_server.backends.base import Backend, CreateContext, CreateFailed, Observation, ObservedState, OpensPipes
from sandbox_server.core.errors import PoolServiceError, StorageUnavailable
from sandbox_server.core.types import Handle, Lease, SlotRef
from sandbox_server.link import AgentClient, AgentRefused, Endpoint, LinkLost
from sandbox_server.link.agent_reports import AgentReport, SlotReport, VerifyReport
from sandbox_server.link.errors import AgentProtocolError, NotSupportedByAgent
from sandbox_server.pool.dependencies import PoolDependencies
from sandbox_server.pool.fleet.backend_access import BackendAccess
from sandbox_server.pool.fleet.observer import BackendObserver
from sandbox_server.pool.fleet.sandbox import Cache, Sandbox, check_agent_report
from sandbox_server.pool.fleet.ticker import Timers
from sandbox_server.pool.leasing.held_lease import ResetOrder

log = logging.getLogger(__name__)

FIRST_HELLO_S = 60.0
CONNECT_S = 2.0
RECONNECT_EVERY_S = 0.1
DESTROY_AGAIN_S = 1.0
LONGEST_DESTROY_PAUSE_S = 10.0


def endpoint_of(handle: Handle, backend: Backend) -> Endpoint:
    """How the agent of a created sandbox is reached."""
    assert handle.address is not None, "only a created sandbox is connected to"
    open_pipe = partial(backend.open_pipe, handle) if isinstance(backend, OpensPipes) else None
    return Endpoint(address=handle.address, token=handle.token or "", certificate=handle.certificate, open_pipe=open_pipe)


class SandboxOver(Exception):
    """The sandbox has ended without being told to; the message says how."""


class SupervisorListener(Protocol):
    """Who is told what was seen of a sandbox: its pool."""

    def sandbox_changed(self, sandbox: Sandbox) -> None:
        """There is a new checkpoint to record."""

    def sandbox_connected(self, sandbox: Sandbox, agent: AgentClient, report: AgentReport) -> None:
        """Its agent answers, for the first time or again."""

    def sandbox_unreachable(self, sandbox: Sandbox) -> None:
        """The link is gone; whether the sandbox is, is being found out."""

    def sandbox_failed(self, sandbox: Sandbox, error: Exception) -> None:
        """It could not be made, or has ended. What is left of it will be destroyed."""

    def sandbox_gone(self, sandbox: Sandbox) -> None:
        """The backend says that nothing of it is left."""

    def effective_seen(self, effective: Mapping[str, int | None]) -> None:
        """Its agent says which limits hold for each slot now."""

    def slots_seen(self, sandbox: Sandbox, slots: Sequence[SlotReport]) -> None:
        """Its agent shows slots."""

    def reset_done(self, ref: SlotRef, epoch: int, problem: str | None) -> None:
        """A reset has ended, proven clean unless there is a problem."""

    def cache_dropped(self, sandbox: Sandbox, cache: Cache, *, gone: bool) -> None:
        """The agent has deleted a cache, or could not be asked."""

    def lease_quiet(self, sandbox: Sandbox, lease_id: str, *, ran: bool) -> None:
        """No call runs any more in the slot of this adopted lease; `ran`: one did when its agent was found again."""


class _PendingObservation:
    """The state of one sandbox as its backend reports it, asked for again and again without waiting longer than one reconnect interval.

    Args:
        observer: whom to ask.
        handle: the sandbox.
        timers: how to wait.
    """

    def __init__(self, observer: BackendObserver, handle: Handle, timers: Timers) -> None:
        self._observer = observer
        self._handle = handle
        self._timers = timers
        self._pending: asyncio.Future[Observation] | None = None

    def __enter__(self) -> _PendingObservation:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._pending is not None:
            self._pending.cancel()

    async def _sleep_until_next_attempt(self) -> None:
        await self._timers.sleep(RECONNECT_EVERY_S)

    async def next_observation(self) -> Observation | None:
        """Wait for the end of the reconnect interval, or for the news that the sandbox is gone.

        Returns:
            What the backend has answered; None if it has not answered yet.
        """
        pending = self._pending = self._pending or self._observer.request_observation(self._handle)
        pause = asyncio.create_task(self._sleep_until_next_attempt())
        try:
            waited: set[asyncio.Future[Any]] = {pending, pause}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if not pending.done() or pending.result().state is not ObservedState.GONE:
                await pause
        finally:
            pause.cancel()
        if not pending.done():
            return None
        self._pending = None
        return pending.result()


class SandboxSupervisor:
    """Keeps one sandbox from its creation to its end. `run` is one task; `end` asks it to finish.

    Args:
        sandbox: what is kept.
        pool: is told what is seen.
        access: the backend, with the budget and the observer that its pools share.
        dependencies: clock, timers and how to connect.
    """

    def __init__(self, sandbox: Sandbox, pool: SupervisorListener, access: BackendAccess, dependencies: PoolDependencies) -> None:
        self._sandbox = sandbox
        self._pool = pool
        self._backend = access.backend
        self._budget = access.budget
        self._observer = access.observer
        self._dependencies = dependencies
        self._ending = asyncio.Event()
        self._behind: set[asyncio.Task[None]] = set()

    def _task(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something behind, as long as the sandbox is kept."""
        task = asyncio.create_task(work)
        self._behind.add(task)
        task.add_done_callback(self._behind.discard)

    def end(self) -> None:
        """Destroy the sandbox, whatever it is doing."""
        self._sandbox.destroying = True
        self._ending.set()

    async def run(self) -> None:
        """Make it, or find it again, keep it, destroy it. Returns when it is gone."""
        if not self._ending.is_set():
            await self._keep()
        await self._destroy()

    async def _keep(self) -> None:
        life = asyncio.create_task(self._life())
        ordered = asyncio.create_task(self._ending.wait())
        try:
            await asyncio.wait({life, ordered}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (life, ordered, *self._behind):
                task.cancel()
            await asyncio.gather(life, ordered, *self._behind, return_exceptions=True)
            if self._sandbox.agent is not None:
                await self._sandbox.agent.close()
        if not life.cancelled():
            error = life.exception()
            self._sandbox.destroying = True
            assert isinstance(error, Exception), "a sandbox's life ends with an error, or is cancelled"
            self._pool.sandbox_failed(self._sandbox, error)

    async def _life(self) -> None:
        """Runs until it is cancelled; raises when the sandbox has ended by itself."""
        try:
            if self._sandbox.boot is not None:
                agent, report = await self._link_again("the service was started again")
            else:
                async with self._budget.turn():
                    await self._create()
                    agent, report = await self._first_link()
            while True:
                self._pool.sandbox_connected(self._sandbox, agent, report)
                why = await self._watch(agent)
                self._pool.sandbox_unreachable(self._sandbox)
                await agent.close()
                agent, report = await self._link_again(why)
        except (CreateFailed, SandboxOver, PoolServiceError):
            raise
        except AgentProtocolError as error:
            raise SandboxOver(f"its agent is not to be trusted: {error}") from error
        except Exception as error:  # the edge of this loop: whatever it was, the sandbox is given up and the pool lives on
            log.exception("keeping a sandbox failed", extra=self._sandbox.fields)
            raise SandboxOver(f"the service could not keep it: {type(error).__name__}: {error}") from error

    async def _create(self) -> None:
        sandbox = self._sandbox
        context = CreateContext(pool_id=sandbox.pool_id, spec=sandbox.spec, sandbox_id=sandbox.sandbox_id)
        async with aclosing(self._backend.create(context)) as steps:
            async for handle in steps:
                sandbox.handle = handle
                self._pool.sandbox_changed(sandbox)
                await self._dependencies.store.flush()
        if sandbox.handle is None or sandbox.handle.address is None:
            raise CreateFailed("the backend made no agent that can be reached")

    async def _connect(self, timeout_s: float) -> tuple[AgentClient, AgentReport]:
        handle = self._sandbox.handle
        assert handle is not None, "only a created sandbox is connected to"
        agent = AgentClient(await self._dependencies.connect(endpoint_of(handle, self._backend), timeout_s))
        try:
            report = agent.report(self._sandbox.sandbox_id)
            check_agent_report(report, self._sandbox.spec)
        except BaseException:
            await agent.close()
            raise
        return agent, report

    async def _first_link(self) -> tuple[AgentClient, AgentReport]:
        clock = self._dependencies.clock
        until = clock.monotonic() + FIRST_HELLO_S
        with self._observing() as state:
            while True:
                try:
                    return await self._connect(max(until - clock.monotonic(), CONNECT_S))
                except LinkLost as error:
                    observation = await state.next_observation()
                    if observation is not None and observation.state is ObservedState.GONE:
                        raise CreateFailed(f"its agent ended before it said hello: {error}") from error
                    if clock.monotonic() >= until:
                        raise CreateFailed(f"its agent did not say hello within {FIRST_HELLO_S:g} s: {error}") from error

    async def _link_again(self, why: str) -> tuple[AgentClient, AgentReport]:
        """Connect again after the link was lost, or find out that the sandbox has ended.

        As long as its backend cannot be asked, a sandbox is kept: only the end of its pool's `max_lifetime_s` and `max_lease_s` ends it then.
        """
        clock = self._dependencies.clock
        lost_after_s = self._backend.traits.lost_after_s
        until, was_unknown = clock.monotonic() + lost_after_s, False
        with self._observing() as state:
            while True:
                try:
                    agent, report = await self._connect(CONNECT_S)
                except LinkLost as error:
                    observation = await state.next_observation()
                    if observation is None:
                        continue
                    if observation.state is ObservedState.UNKNOWN:
                        was_unknown = True
                        continue
                    if observation.state is ObservedState.RUNNING and was_unknown:
                        # The attempts that failed while nobody could tell prove nothing: the agent gets all of its time from now on.
                        was_unknown, until = False, clock.monotonic() + lost_after_s
                    if observation.state is ObservedState.GONE:
                        raise SandboxOver(f"its agent has ended ({why})") from error
                    if clock.monotonic() >= until:
                        raise SandboxOver(f"its agent could not be reached for {lost_after_s:g} s: {error}") from error
                else:
                    if report.boot == self._sandbox.boot:
                        return agent, report
                    await agent.close()
                    raise SandboxOver("another agent answers in its place: its own has ended")

    def _observing(self) -> _PendingObservation:
        assert self._sandbox.handle is not None, "only a created sandbox is observed"
        return _PendingObservation(self._observer, self._sandbox.handle, self._dependencies.timers)

    async def _watch(self, agent: AgentClient) -> str:
        """Tell the pool what the agent shows, until the link is gone. Returns how it went."""
        try:
            async with aclosing(agent.watch_slots(self._sandbox.sandbox_id)) as updates:
                async for update in updates:
                    if update.effective is not None:
                        self._pool.effective_seen(update.effective)
                    self._pool.slots_seen(self._sandbox, update.slots)
        except LinkLost as error:
            return str(error)
        except AgentRefused as error:
            return f"its agent shows its slots no more: {error}"
        return "its agent ended its watch"

    def reset(self, order: ResetOrder) -> None:
        """Have the agent reset a slot. Where the link is gone, the pool orders it again when it is back."""
        if self._sandbox.reachable:
            self._task(self._reset(order))

    async def _reset(self, order: ResetOrder) -> None:
        agent = self._sandbox.agent
        assert agent is not None, "resets are asked of a reachable agent"
        await self._on_record()
        started = self._dependencies.clock.monotonic()
        has_network = self._sandbox.spec.slots_have_network
        try:
            report = await agent.reset_slot(order.ref.slot_id, order.epoch, has_network=has_network, keeps_files=order.keep)
        except LinkLost:
            return
        except AgentRefused as error:
            self._pool.reset_done(order.ref, order.epoch, f"its agent will not reset it: {error}")
            return
        self._dependencies.meter.observe("sandbox_reset_seconds", self._dependencies.clock.monotonic() - started, **self._sandbox.pool_id.labels)
        self._pool.reset_done(order.ref, order.epoch, report.problem)

    async def verify(self, order: ResetOrder) -> VerifyReport:
        """Have the agent plant leftovers in a free slot and reset it; what it found. The slot is clean afterwards, or in quarantine.

        Raises:
            LinkLost: the agent cannot be reached now; the slot is reset when it can.
            AgentRefused: it will not; the slot is reset.
        """
        await self._on_record()
        agent = self._sandbox.agent
        if agent is None:
            raise LinkLost("the link went before the slot was verified")
        try:
            report = await agent.verify_slot(order.ref.slot_id, order.epoch, has_network=self._sandbox.spec.slots_have_network)
        except AgentRefused:
            self.reset(order)
            raise
        self._pool.reset_done(order.ref, order.epoch, report.problem)
        return report

    async def _on_record(self) -> None:
        """A slot's next epoch is on record before its agent hears of it: a service that starts again never gives out one that the agent has left.

        Where it cannot be recorded, cleaning up goes first; a service that starts then sees that its agent is ahead.
        """
        try:
            await self._dependencies.store.flush()
        except StorageUnavailable as error:
            log.warning("a slot is reset without a record: %s", error.detail, extra=self._sandbox.fields)

    def drop_cache(self, cache: Cache) -> None:
        """Have the agent delete a shared cache."""
        self._task(self._drop_cache(cache))

    async def _drop_cache(self, cache: Cache) -> None:
        gone = False
        try:
            if self._sandbox.agent is not None:
                await self._sandbox.agent.drop_cache(cache.record.key)
                gone = True
        except LinkLost:
            pass  # asked again when it is back
        except NotSupportedByAgent:
            gone = True
        except AgentRefused as error:
            # The cache cannot be deleted before the slots that used it have been reset. The request is repeated.
            log.debug("a cache is not dropped yet: %s", error, extra=self._sandbox.fields)
        self._pool.cache_dropped(self._sandbox, cache, gone=gone)

    def await_quiet(self, lease: Lease) -> None:
        """Have the agent say when no call runs any more in the slot of an adopted lease."""
        self._task(self._await_quiet(lease))

    async def _await_quiet(self, lease: Lease) -> None:
        ran = True
        try:
            if self._sandbox.agent is not None:
                ran = await self._sandbox.agent.wait_until_quiet(lease.slot_id, lease.epoch)
        except LinkLost:
            return  # asked again when it is back
        except AgentRefused as error:
            log.warning("whether calls still run cannot be told: %s", error, extra={"lease_id": lease.lease_id, "sandbox_id": lease.sandbox_id})
        self._pool.lease_quiet(self._sandbox, lease.lease_id, ran=ran)

    def _count(self, op: str, outcome: str) -> None:
        self._dependencies.meter.count("sandbox_backend_calls_total", backend=self._backend.name, op=op, outcome=outcome)

    async def _destroy(self) -> None:
        pause_s = DESTROY_AGAIN_S
        while self._sandbox.handle is not None:
            try:
                await self._backend.destroy(self._sandbox.handle)
            except (OSError, PoolServiceError) as error:
                log.warning("a sandbox could not be destroyed yet: %s", error, extra=self._sandbox.fields)
                self._count("destroy", "failed")
                await self._dependencies.timers.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_DESTROY_PAUSE_S)
            else:
                self._count("destroy", "ok")
                break
        self._pool.sandbox_gone(self._sandbox)
