"""One slot of the sandbox: its state, the slot runtime that it has now, and what belongs to its current lease."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any, Callable, Protocol

from sandbox_server.agent.errors import Refused, StartFailed
from sandbox_server.agent.execution.background_tasks import BackgroundTasks
from sandbox_server.agent.execution.call_spec import CallSpec
from sandbox_server.agent.execution.calls import AgentCall, find_call, submit_call
from sandbox_server.agent.execution.evidence import judge_lost_init
from sandbox_server.agent.execution.journal import CallOutcome
from sandbox_server.agent.execution.lease_context import LeaseContext, SlotResources
from sandbox_server.agent.execution.processes.drains import Drains
from sandbox_server.agent.execution.slot_runtime import SlotRuntime
from sandbox_server.agent.kernel.processor_share import promised_share
from sandbox_server.agent.slots.runtimes import RuntimePool

log = logging.getLogger(__name__)

STARTING, READY, RESETTING, QUARANTINED, BROKEN = "starting", "ready", "resetting", "quarantined", "broken"
FIRST_EPOCH = 1


class PortConnection(Protocol):
    """A connection to a program that listens on a port of the slot."""

    def close_connection(self, detail: str) -> None:
        """Close the connection, and tell the service why: `detail`."""


class AgentSlot:
    """One slot.

    A request must name the epoch of the current lease. A lower epoch belongs to an earlier lease, a higher one was never announced; both are refused.

    Args:
        slot_id: names the slot within its sandbox; a number from 0 on.
        runtimes: starts and ends slot runtimes.
        on_change: called with the slot whenever its state has changed.
    """

    def __init__(self, slot_id: str, runtimes: RuntimePool, on_change: Callable[[AgentSlot], None]) -> None:
        self.slot_id = slot_id
        self.loop = asyncio.get_event_loop()
        self._runtimes = runtimes
        self._pinned_to = runtimes.processors.pinned_to(runtimes.config.limits.cpu, int(slot_id))
        self._on_change = on_change
        self.state = STARTING
        self.detail: str | None = None  # why the slot is in its state
        self._agent_ends = False
        self.runtime: SlotRuntime | None = None
        self.drains = Drains(self.loop, runtimes.max_drains)
        self.port_connections: set[PortConnection] = set()
        self.max_port_connections = runtimes.max_port_connections
        self.tasks = BackgroundTasks(slot_id)
        self._resources = SlotResources(slot_id, runtimes.config.limits, self._processor_share, self.drains, self.tasks)
        self.lease = self._new_lease(FIRST_EPOCH)

    def _new_lease(self, epoch: int) -> LeaseContext:
        config = self._runtimes.config
        return LeaseContext(self._resources, epoch, os.path.join(config.base_dir, "spool", self.slot_id, str(epoch)), config.spool_bytes)

    def _processor_share(self) -> float:
        config = self._runtimes.config
        return promised_share(self._runtimes.processors.usable, config.slots, config.limits.cpu)

    @property
    def epoch(self) -> int:
        """The epoch of the current lease."""
        return self.lease.epoch

    def view(self) -> dict[str, Any]:
        """The slot as the service sees it."""
        runtime = self.runtime
        view = {
            "slot_id": self.slot_id,
            "epoch": self.epoch,
            "state": self.state,
            "isolation": self._runtimes.isolation.name,
            "workspace": runtime.workspace if runtime is not None else None,
            "tmp": runtime.tmp if runtime is not None else None,
            "network": runtime.has_network if runtime is not None else None,
        }
        if self.detail is not None:
            view["detail"] = self.detail
        if self.lease.loss_evidence:
            view["evidence"] = self.lease.loss_evidence
        return view

    def set_state(self, state: str, detail: str | None = None) -> None:
        """Enter a state, and report that."""
        self.state, self.detail = state, detail
        self._on_change(self)

    # The slot runtime.

    async def start_slot(self) -> None:
        """Give the slot its first runtime. If none can be started, the slot is broken."""
        try:
            self.adopt_runtime(await self._runtimes.new_runtime(self.slot_id, self._runtimes.config.network))
        except StartFailed as error:
            self.set_state(BROKEN, str(error))

    def adopt_runtime(self, runtime: SlotRuntime) -> None:
        """Give the slot its first runtime, which was started already."""
        if self.take_runtime(runtime):
            self.set_state(READY)
        else:
            self.set_state(BROKEN, "init has ended")

    def take_runtime(self, runtime: SlotRuntime) -> bool:
        """Give the slot a new runtime. Returns False if its init has ended already."""
        self.runtime = runtime
        runtime.slot_id = self.slot_id
        runtime.link.on_lost = lambda detail: self._on_init_lost(runtime, detail)
        runtime.link.on_in_flight_full = self._runtimes.on_in_flight_full
        if self._pinned_to:
            runtime.link.pin_slot(self._pinned_to)
        return not runtime.link.closed

    def detach_runtime(self) -> SlotRuntime | None:
        """Take the runtime away from the slot. Returns it, for the caller to end."""
        runtime, self.runtime = self.runtime, None
        if runtime is not None:
            runtime.link.on_lost = None
            self.drains.close_pipes()
            for connection in list(self.port_connections):
                connection.close_connection("the processes of the slot were ended")
        return runtime

    def current_runtime(self) -> SlotRuntime:
        """Return the runtime in which calls run now.

        Raises:
            Refused: slot_unavailable, because there is none.
        """
        if self.runtime is None:
            raise Refused("slot_unavailable", "the slot has no runtime")
        return self.runtime

    def _on_init_lost(self, runtime: SlotRuntime, detail: str) -> None:
        if self.runtime is runtime and self.state == READY:
            log.warning("the init of a slot has ended", extra={"slot_id": self.slot_id, "detail": detail})
            _, _, metadata = judge_lost_init(runtime, {}, detail)
            evidence = self.lease.loss_evidence = metadata["evidence"]
            self.set_state(BROKEN, ("its own work ran out of memory: %s" if "oom_kills" in evidence else "%s") % detail)

    # Requests for the current lease.

    def check_admits(self, epoch: Any) -> None:
        """Check that a request with this epoch may use the slot now.

        Raises:
            Refused: stale_epoch or slot_unavailable.
        """
        self.check_epoch(epoch)
        if self.state != READY:
            detail = "slot %s is %s%s" % (self.slot_id, self.state, ": " + self.detail if self.detail else "")
            raise Refused("slot_unavailable", detail, agent_ends=self._agent_ends)

    def check_epoch(self, epoch: Any) -> None:
        """Check that a request with this epoch may read the journal, whatever the state of the slot is.

        Raises:
            Refused: stale_epoch.
        """
        if epoch != self.epoch:
            raise Refused("stale_epoch", "slot %s is at epoch %d, not %s" % (self.slot_id, self.epoch, ascii(epoch)))

    def submit_call(self, spec: CallSpec, on_done: Callable[[CallOutcome], None]) -> None:
        """Run a call of the current lease, see `calls.submit_call`."""
        submit_call(self.lease, self.current_runtime(), spec, on_done)

    def find_call(self, call_id: Any) -> AgentCall | CallOutcome:
        """Find a call of the current lease, see `calls.find_call`."""
        return find_call(self.lease, call_id)

    # Changes of the holder, and the end.

    def begin_lease(self, epoch: int) -> str:
        """End the current lease and begin the next one: what runs is cancelled, what was recorded is forgotten.

        Args:
            epoch: of the next lease.

        Returns:
            The folder with the outputs of the old lease, for the caller to delete.
        """
        old, self.lease = self.lease, self._new_lease(epoch)
        old.end_calls_and_jobs()  # after the exchange: when a call ends, the next one of its stream must find that its epoch is over
        return old.spool_folder

    async def end_slot(self) -> None:
        """End the slot because the agent is shutting down. What still runs is lost."""
        reason = "its agent was told to end"
        self._agent_ends = True
        # This change is not reported, because the end of the agent implies it. But requests that still come must be refused.
        if self.state == READY:
            self.state, self.detail = BROKEN, reason
        self.lease.end_calls_and_jobs(reason)
        runtime = self.detach_runtime()
        if runtime is not None:
            await self._runtimes.end_runtime(runtime, keeps_files=False)
