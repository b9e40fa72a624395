"""What the supervisor of a sandbox has observed. Supervisors put these values into their pool's inbox, and `Fleet.apply` applies them to its state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sandbox_server.core.types import Handle, SlotRef
from sandbox_server.link import AgentClient
from sandbox_server.link.agent_reports import AgentReport, SlotReport
from sandbox_server.pool.fleet.sandbox import Cache


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointReached:
    """The creation of a sandbox has completed a step that left something behind."""

    sandbox_id: str
    handle: Handle


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxConnected:
    """The agent of a sandbox answers, for the first time or again."""

    sandbox_id: str
    agent: AgentClient
    report: AgentReport


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxDisconnected:
    """The link to an agent is lost. Whether its sandbox still exists is not known yet."""

    sandbox_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxEndTimeObserved:
    """The backend has reported when it will end a sandbox by itself.

    Attributes:
        ends_at: that time in Unix seconds; None if the backend will not end it.
    """

    sandbox_id: str
    ends_at: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxFailed:
    """A sandbox could not be created, or has ended although the service did not destroy it. What is left of it is being destroyed."""

    sandbox_id: str
    error: Exception


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxDestroyed:
    """The backend has nothing of a sandbox any more."""

    sandbox_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotsObserved:
    """An agent reports the state of some of its slots.

    Attributes:
        slots: those slots.
        effective: the limits that hold for each of the agent's slots from now on; None if the agent says nothing about them.
    """

    sandbox_id: str
    slots: Sequence[SlotReport]
    effective: Mapping[str, int | None] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ResetFailed:
    """A slot could not be reset, or could not be proven clean. That a slot is clean is reported by `SlotsObserved` alone.

    Attributes:
        ref: the slot.
        epoch: the epoch that the slot was to be reset to.
        problem: why the slot is not clean.
    """

    ref: SlotRef
    epoch: int
    problem: str

    @property
    def sandbox_id(self) -> str:
        """The sandbox of the slot."""
        return self.ref.sandbox_id


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheDropEnded:
    """The request to delete a shared cache has ended.

    Attributes:
        cache: the cache.
        is_gone: whether the agent has deleted it. Otherwise it is asked again later.
    """

    sandbox_id: str
    cache: Cache
    is_gone: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class AdoptedCallsEnded:
    """No call of an earlier service runs any more in the slot of an adopted lease.

    Attributes:
        lease_id: the lease.
        calls_ran: whether a call was still running when the agent was asked.
    """

    sandbox_id: str
    lease_id: str
    calls_ran: bool


Observed = (
    CheckpointReached
    | SandboxConnected
    | SandboxDisconnected
    | SandboxEndTimeObserved
    | SandboxFailed
    | SandboxDestroyed
    | SlotsObserved
    | ResetFailed
    | CacheDropEnded
    | AdoptedCallsEnded
)
