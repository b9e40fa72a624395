"""Connects to the agent of one sandbox, and finds out from its backend whether a sandbox that does not answer still exists."""

from __future__ import annotations

import asyncio
from functools import partial

from sandbox_server.backends.base import Backend, CreateFailed, Observation, ObservedState, OpensPipes
from sandbox_server.core.types import Handle
from sandbox_server.link import AgentClient, AgentEndpoint, LinkLost
from sandbox_server.link.agent_reports import AgentReport
from sandbox_server.pool.dependencies import PoolDependencies
from sandbox_server.pool.fleet.sandbox import Sandbox, check_agent_report
from sandbox_server.pool.fleet.supervision.observer import BackendObserver

#: How long the agent of a new sandbox may take to answer, in seconds.
FIRST_HELLO_S = 60.0
CONNECT_S = 2.0
RECONNECT_INTERVAL_S = 0.1


class UnexpectedSandboxEnd(Exception):
    """A sandbox has ended although the service did not destroy it, or the service can no longer use it. The message says how."""


class AgentConnector:
    """Makes the links to the agent of one sandbox.

    Args:
        sandbox: the sandbox. It is only read.
        backend: the sandbox's backend.
        observer: asks the backend for the sandbox's state.
        dependencies: clock, timers and how to connect.
    """

    def __init__(self, sandbox: Sandbox, backend: Backend, observer: BackendObserver, dependencies: PoolDependencies) -> None:
        self._sandbox = sandbox
        self._backend = backend
        self._observer = observer
        self._dependencies = dependencies

    async def connect_first(self, handle: Handle) -> tuple[AgentClient, AgentReport]:
        """Connect to the agent of a new sandbox.

        Args:
            handle: the last checkpoint of its creation.

        Raises:
            CreateFailed: the agent has ended, did not answer within `FIRST_HELLO_S`, or cannot give the pool what its spec asks for.
            AgentProtocolError: the program that answers is not an agent, or is the agent of another sandbox.
        """
        clock = self._dependencies.clock
        deadline = clock.monotonic() + FIRST_HELLO_S
        question = _RepeatedQuestion(self._observer, handle, self._dependencies)
        try:
            while True:
                try:
                    return await self._connect(handle, max(deadline - clock.monotonic(), CONNECT_S))
                except LinkLost as error:
                    observation = await question.next_answer()
                    if observation is not None and observation.state is ObservedState.GONE:
                        raise CreateFailed(f"its agent ended before it said hello: {error}") from error
                    if clock.monotonic() >= deadline:
                        raise CreateFailed(f"its agent did not say hello within {FIRST_HELLO_S:g} s: {error}") from error
        finally:
            question.cancel()

    async def reconnect(self, handle: Handle, reason: str) -> tuple[AgentClient, AgentReport]:
        """Connect again to an agent whose link was lost, or find out that its sandbox has ended.

        A sandbox that answers is never lost. One that does not is kept for as long as its backend cannot be asked: then only the end of its
        `max_lifetime_s` and `max_lease_s`, by which the pool retires it, ends it.

        Args:
            handle: the last checkpoint of the sandbox.
            reason: how the link was lost.

        Raises:
            UnexpectedSandboxEnd: the backend reports that the sandbox is gone, another agent answers in its place, or the agent was not reachable for
                the backend's `lost_after_s` although the backend reports that it runs.
            CreateFailed: the agent can no longer give the pool what its spec asks for.
            AgentProtocolError: the program that answers is not an agent, or is the agent of another sandbox.
        """
        clock = self._dependencies.clock
        deadline = _ReconnectDeadline(self._backend.traits.lost_after_s, clock.monotonic())
        question = _RepeatedQuestion(self._observer, handle, self._dependencies)
        try:
            while True:
                try:
                    agent, report = await self._connect(handle, CONNECT_S)
                except LinkLost as error:
                    observation = await question.next_answer()
                    if observation is not None and observation.state is ObservedState.GONE:
                        raise UnexpectedSandboxEnd(f"its agent has ended ({reason})") from error
                    if deadline.has_passed(observation, clock.monotonic()):
                        raise UnexpectedSandboxEnd(f"its agent could not be reached for {deadline.lost_after_s:g} s: {error}") from error
                else:
                    if report.boot == self._sandbox.boot:
                        return agent, report
                    await agent.close()
                    raise UnexpectedSandboxEnd("another agent answers in its place: its own has ended")
        finally:
            question.cancel()

    async def wait_for_end_time(self, handle: Handle) -> float | None:
        """Ask the backend when it will end the sandbox by itself, until it reports it.

        Returns:
            That time in Unix seconds; None if the backend will not end the sandbox.
        """
        while True:
            # The observer keeps the distance between two questions.
            observation = await self._observer.request_observation(handle)
            if observation.state is not ObservedState.UNKNOWN:
                return observation.ends_at

    async def _connect(self, handle: Handle, timeout_s: float) -> tuple[AgentClient, AgentReport]:
        link = await self._dependencies.connect(_endpoint_of(handle, self._backend), timeout_s)
        agent = AgentClient(link, self._dependencies.response_timeout_s)
        try:
            report = agent.report(self._sandbox.sandbox_id)
            check_agent_report(report, self._sandbox.spec)
        except BaseException:  # also if the connecting is cancelled: the link has tasks and an open connection
            await agent.close()
            raise
        return agent, report


def _endpoint_of(handle: Handle, backend: Backend) -> AgentEndpoint:
    assert handle.address is not None, "only a sandbox whose creation is finished is connected to"
    open_pipe = partial(backend.open_pipe, handle) if isinstance(backend, OpensPipes) else None
    return AgentEndpoint(address=handle.address, token=handle.token or "", certificate=handle.certificate, open_pipe=open_pipe)


class _ReconnectDeadline:
    """Until when an agent must be reached again, although its backend reports that its sandbox runs. No I/O.

    Args:
        lost_after_s: how long the agent may be unreachable, in seconds.
        now: the monotonic time at which the link was lost.
    """

    def __init__(self, lost_after_s: float, now: float) -> None:
        self.lost_after_s = lost_after_s
        self._ends_at = now + lost_after_s
        self._was_unknown = False

    def has_passed(self, observation: Observation | None, now: float) -> bool:
        """Whether the sandbox counts as lost after one more failed attempt.

        Args:
            observation: what the backend has reported after the attempt, other than `GONE`; None if it has not responded yet.
            now: the monotonic time.
        """
        if observation is None or observation.state is ObservedState.UNKNOWN:
            self._was_unknown = self._was_unknown or observation is not None or now >= self._ends_at
            return False
        if self._was_unknown:
            # Failed attempts prove nothing while the backend could not be asked: the network may have been away, too.
            self._was_unknown, self._ends_at = False, now + self.lost_after_s
            return False
        return now >= self._ends_at


class _RepeatedQuestion:
    """Asks for the state of one sandbox again and again, and waits at most one reconnect interval at a time.

    Args:
        observer: asks the backend.
        handle: the last checkpoint of the sandbox.
        dependencies: how to wait.
    """

    def __init__(self, observer: BackendObserver, handle: Handle, dependencies: PoolDependencies) -> None:
        self._observer = observer
        self._handle = handle
        self._timers = dependencies.timers
        self._pending: asyncio.Future[Observation] | None = None

    async def next_answer(self) -> Observation | None:
        """Wait until the reconnect interval is over, or until the backend reports that the sandbox is gone.

        Returns:
            What the backend has answered; None if it has not answered yet.
        """
        pending = self._pending = self._pending or self._observer.request_observation(self._handle)
        interval_over = asyncio.Event()
        timer = self._timers.call_later(RECONNECT_INTERVAL_S, interval_over.set)

        def stop_waiting_if_gone(answered: asyncio.Future[Observation]) -> None:
            if not answered.cancelled() and answered.result().state is ObservedState.GONE:
                interval_over.set()

        pending.add_done_callback(stop_waiting_if_gone)
        try:
            await interval_over.wait()
        finally:
            timer.cancel()
            pending.remove_done_callback(stop_waiting_if_gone)
        if not pending.done():
            return None
        self._pending = None
        return pending.result()

    def cancel(self) -> None:
        """Cancel the request to the backend, if the backend has not answered it yet."""
        if self._pending is not None:
            self._pending.cancel()
