"""The context of one lease in its slot: calls, jobs, sessions, terminals, outputs and rights.

A reset replaces the object as a whole, so nothing of it reaches the next holder.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Protocol

from sandbox_server.agent.config import SlotLimits
from sandbox_server.agent.errors import Refused
from sandbox_server.agent.execution.background_tasks import BackgroundTasks
from sandbox_server.agent.execution.jobs import Jobs
from sandbox_server.agent.execution.journal import Journal
from sandbox_server.agent.execution.output import Spool
from sandbox_server.agent.execution.processes.drains import Drains
from sandbox_server.agent.execution.sessions.lease_sessions import LeaseSessions
from sandbox_server.agent.execution.slot_runtime import CacheFolder, ReadOnlyEntry
from sandbox_server.agent.execution.terminals.terminals import Terminals
from sandbox_server.agent.execution.tmux.tmux_terminal import TmuxTerminal


class LiveCall(Protocol):
    """A call that has processes."""

    has_concurrent_work: bool


@dataclasses.dataclass(frozen=True)
class SlotResources:
    """What all leases of one slot use, one after the other.

    Args:
        slot_id: the slot.
        limits: what the slot may use.
        processor_share: returns how many processors the slot is promised.
        drains: reads pipes that outlive the call that opened them.
        tasks: runs background tasks.
    """

    slot_id: str
    limits: SlotLimits
    processor_share: Callable[[], float]
    drains: Drains
    tasks: BackgroundTasks


class LeaseContext:
    """The calls, jobs, sessions, terminals, outputs and rights of one lease.

    Args:
        resources: of the slot.
        epoch: the epoch of the lease.
        spool_folder: the folder for the outputs of its calls. It is made when the first output needs it.
        spool_bytes: how much all files in that folder may take together.
    """

    def __init__(self, resources: SlotResources, epoch: int, spool_folder: str, spool_bytes: int) -> None:
        self.resources = resources
        self.epoch = epoch
        self.spool_folder = spool_folder
        self.spool = Spool(spool_folder, spool_bytes)
        self.journal = Journal()
        self.jobs = Jobs(self.spool, resources.drains, resources.tasks)
        self.tmux = TmuxTerminal(self.spool, resources.drains, resources.tasks)
        self.sessions = LeaseSessions(resources.drains, resources.tasks)
        self.terminals = Terminals(resources.drains, resources.tasks)
        self.cache: CacheFolder | None = None  # the shared cache that the holder was given
        self.read_only: tuple[ReadOnlyEntry, ...] = ()  # what the holder can no longer change in its workspace
        self.allow_hosts: tuple[str, ...] | None = None  # the only hosts that the holder may reach; None: all that the sandbox permits
        self.loss_evidence: dict[str, Any] = {}  # why the slot's init is gone; empty while it is there
        self._live_calls: set[LiveCall] = set()

    def add_live_call(self, call: LiveCall, own_shells: int = 0) -> bool:
        """Register a call that is about to have processes; `own_shells` of the shells of sessions are its own.

        Returns:
            True if another call, a job, a session or a terminal has processes already.
        """
        others = (self.jobs.count_running(), self.terminals.count_running(), self.tmux.is_running, self.sessions.count_shells() - own_shells)
        has_concurrent_work = bool(self._live_calls) or any(others)
        self.mark_live_calls_concurrent()
        self._live_calls.add(call)
        return has_concurrent_work

    def remove_live_call(self, call: LiveCall) -> None:
        """Forget a call that has ended, whether it was registered or not."""
        self._live_calls.discard(call)

    def mark_live_calls_concurrent(self) -> None:
        """Record for every live call that something else of the slot has begun to run beside it."""
        for call in self._live_calls:
            call.has_concurrent_work = True

    def end_calls_and_jobs(self, lost: str | None = None) -> None:
        """End all calls, jobs, sessions and terminals, without ending their processes: the caller does that.

        Args:
            lost: why the sandbox is lost, so that the calls end as `sandbox_lost`. None: they end as `cancelled`.
        """
        self.sessions.hold_sessions()
        for call in self.journal.running_calls():
            call.finish_without_waiting(lost)
        self.sessions.close_sessions("all processes of the slot were ended, because the rights of its lease were changed")
        self.jobs.forget_jobs()
        self.terminals.take_away_terminals(
            Refused("slot_unavailable", "the processes of the slot were ended: %s" % (lost or "its lease or its rights have changed"))
        )
        self.tmux.release_terminal()
