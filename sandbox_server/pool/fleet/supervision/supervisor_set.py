"""The supervisors of a pool's sandboxes and their tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable

from sandbox_server.pool.dependencies import PoolDependencies
from sandbox_server.pool.fleet.effects import DestroySandbox, DropCache, WaitForAdoptedCalls
from sandbox_server.pool.fleet.observed import Observed
from sandbox_server.pool.fleet.sandbox import Sandbox
from sandbox_server.pool.fleet.supervision.backend_access import BackendAccess
from sandbox_server.pool.fleet.supervision.supervisor import SandboxSupervisor
from sandbox_server.pool.inbox import InboxWriter
from sandbox_server.pool.leasing.held_lease import ResetOrder


class SupervisorSet:
    """One supervisor for each sandbox of a pool, from the moment it is started until its sandbox is gone.

    Args:
        inbox: takes what the supervisors observe.
        access: the pool's backend, with the budgets and the observer that its pools share.
        dependencies: the clock, timers, store, metrics, and the function that connects to agents.
        acquires_wait: returns whether an acquire waits for a slot of the pool.

    Attributes:
        tasks: the tasks of the supervisors, by sandbox id.
    """

    def __init__(self, inbox: InboxWriter[Observed], access: BackendAccess, dependencies: PoolDependencies, acquires_wait: Callable[[], bool]) -> None:
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._inbox = inbox
        self._access = access
        self._dependencies = dependencies
        self._acquires_wait = acquires_wait
        self._supervisors: dict[str, SandboxSupervisor] = {}

    def start_supervisor(self, sandbox: Sandbox) -> None:
        """Start the supervisor of a sandbox. It destroys the sandbox if that is already decided."""
        supervisor = SandboxSupervisor(sandbox, self._inbox, self._access, self._dependencies, self._acquires_wait)
        if sandbox.destroying:
            supervisor.destroy_sandbox()
        self._supervisors[sandbox.sandbox_id] = supervisor
        task = self.tasks[sandbox.sandbox_id] = asyncio.create_task(supervisor.run())
        task.add_done_callback(lambda task: self._remove_supervisor(sandbox.sandbox_id))

    def _remove_supervisor(self, sandbox_id: str) -> None:
        self.tasks.pop(sandbox_id, None)
        self._supervisors.pop(sandbox_id, None)

    def supervisor_of(self, sandbox_id: str) -> SandboxSupervisor | None:
        """The supervisor of a sandbox; None if the sandbox is gone."""
        return self._supervisors.get(sandbox_id)

    def reset_slots(self, orders: Iterable[ResetOrder]) -> None:
        """Have the agents reset slots."""
        for order in orders:
            supervisor = self._supervisors.get(order.ref.sandbox_id)
            if supervisor is not None:
                supervisor.reset_slot(order)

    def carry_out(self, effect: DestroySandbox | DropCache | WaitForAdoptedCalls) -> None:
        """Pass an effect on to the supervisor that it concerns, if its sandbox is not gone."""
        sandbox_id = effect.lease.sandbox_id if isinstance(effect, WaitForAdoptedCalls) else effect.sandbox_id
        supervisor = self._supervisors.get(sandbox_id)
        if supervisor is None:
            return
        match effect:
            case DestroySandbox():
                supervisor.destroy_sandbox()
            case DropCache():
                supervisor.drop_cache(effect.cache)
            case WaitForAdoptedCalls():
                supervisor.wait_for_adopted_calls(effect.lease)

    async def stop_supervisors(self, left_alone: Collection[str]) -> None:
        """Stop the supervisors of some sandboxes, and wait until the other sandboxes, which are being destroyed, are gone.

        Args:
            left_alone: the ids of the sandboxes that are left as they are, for another service to adopt.
        """
        tasks = dict(self.tasks)
        for sandbox_id in left_alone:
            if sandbox_id in tasks:
                tasks[sandbox_id].cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
