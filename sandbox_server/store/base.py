"""Where the service keeps what must outlive a crash. The seam, and the store that forgets.

Records are values: the newest record of a thing replaces the older one. `put` only queues, in order and without waiting, so that a decision
and its record are one step; an answer that depends on them leaves after `flush`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sandbox_server.core.execution import Result
from sandbox_server.core.types import AcquireRequest, Handle, Lease, LeaseState, PoolId, PoolSpec, SandboxState, SlotRef, SlotState
from sandbox_server.store.output_files import OutputFiles


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolRecord:
    """A pool that was made while the service ran. `closing`: it is to go once its last lease has ended. `tenant`: who owns it; None: no tenant does."""

    name: str
    spec: PoolSpec
    origin: str
    closing: bool = False
    tenant: str | None = None

    @property
    def pool_id(self) -> PoolId:
        """Which pool."""
        return PoolId(self.name, self.tenant)


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheRecord:
    """A shared cache in a sandbox: its name there, the tenant and run it is for, and the lease alone where there is no run."""

    key: str
    tenant: str
    run_id: str | None
    lease_id: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxRecord:
    """A sandbox, with the last checkpoint of its creation and the boot nonce its agent showed. `GONE` deletes it and its slots.

    `spec` is the one it was made with, `ready_at` when it first was ready, wall-clock.
    """

    sandbox_id: str
    pool: str
    state: SandboxState
    handle: Handle | None
    created_at: float
    boot: str | None = None
    spec: PoolSpec | None = None
    ready_at: float | None = None
    caches: tuple[CacheRecord, ...] = ()
    why: str = ""
    pool_tenant: str | None = None

    @property
    def pool_id(self) -> PoolId:
        """Which pool it is of."""
        return PoolId(self.pool, self.pool_tenant)


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotRecord:
    """A slot and the epoch it is in. `keep` is the tenant and run its files stay for."""

    ref: SlotRef
    pool: str
    state: SlotState
    epoch: int
    workspace: str
    isolation: str
    keep: tuple[str, str | None] | None = None
    pool_tenant: str | None = None

    @property
    def pool_id(self) -> PoolId:
        """Which pool it is of."""
        return PoolId(self.pool, self.pool_tenant)


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyRecord:
    """What a `request_key` of a tenant was granted."""

    tenant: str
    key: str
    request: AcquireRequest
    lease_ids: tuple[str, ...]
    granted_at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ClockRecord:
    """What record time is ahead of CLOCK_MONOTONIC while the machine runs that was started under this id; see `record_time`."""

    boot_id: str
    offset_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Deletion:
    """A lease, a request key, or a pool (by the key of its id) that nobody may ask for any more."""

    lease_id: str | None = None
    key: tuple[str, str] | None = None
    pool: str | None = None


#: Ends of a lease after which nobody is told how its calls ended.
OVER = frozenset({LeaseState.RELEASED, LeaseState.EXPIRED})

Record = PoolRecord | SandboxRecord | SlotRecord | Lease | KeyRecord | ClockRecord | Deletion


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedResult:
    """How a call ended, under the identity (tool and arguments) it was made with."""

    identity: bytes
    result: Result


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """Everything a store remembers, for a service that starts."""

    sandboxes: Sequence[SandboxRecord] = ()
    slots: Sequence[SlotRecord] = ()
    leases: Sequence[Lease] = ()
    keys: Sequence[KeyRecord] = ()
    pools: Sequence[PoolRecord] = ()
    clock: ClockRecord | None = None


class Store(Protocol):
    """What the pool and the dispatch remember."""

    @property
    def durable(self) -> bool:
        """Whether a service started later finds what is put here; if not, nothing could adopt its sandboxes."""
        ...

    def put(self, record: Record) -> None:
        """Queue one record. Never waits, never fails."""
        ...

    async def flush(self) -> None:
        """Return once everything put so far will survive a crash.

        Raises:
            StorageUnavailable: it cannot be written; promise nothing that rests on it.
        """
        ...

    @property
    def outputs(self) -> OutputFiles:
        """The files of large outputs; those of a lease are deleted when its verdicts are forgotten."""
        ...

    def load(self) -> State:
        """What was remembered when the store was opened."""
        ...

    def lease(self, lease_id: str) -> Lease | None:
        """The newest record of a lease, held or ended; None: there is none, or it is forgotten.

        Raises:
            StorageUnavailable: it cannot be read.
        """
        ...

    def record_result(self, lease_id: str, call_id: str, identity: bytes, result: Result) -> None:
        """Remember how a call ended: while its lease holds, and, where it ended with its sandbox, as long as that is said.

        The first verdict stays. Queued as `put` does.
        """
        ...

    def find_result(self, lease_id: str, call_id: str) -> RecordedResult | None:
        """What was recorded for this call."""
        ...

    def result_count(self, lease_id: str) -> int:
        """How many calls of this lease have a verdict."""
        ...

    @property
    def problem(self) -> str | None:
        """Why nothing new should be begun, and what to do; None: it can."""
        ...

    async def check_storage(self) -> None:
        """See that what was put can still be found by a service that starts later. To be called every second; `trouble` says what was found."""
        ...

    async def close(self) -> None:
        """Write what is queued and let go."""
        ...
