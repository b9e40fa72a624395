"""The `Store` protocol, and the records that a store keeps.

Records are immutable values. A newer record of the same object replaces the older one. `Store.put` adds a record to an in-memory queue and
returns at once, so that a decision and its record are made in one step without an `await` between them. A response that depends on a record
is sent only after `Store.flush` has returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sandbox_server.core.execution import Result, ToolCall
from sandbox_server.core.types import AcquireRequest, Handle, Lease, LeaseState, PoolId, PoolSpec, SandboxState, SlotRef, SlotState
from sandbox_server.store.output_files import OutputFiles


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolRecord:
    """A pool that was created through the API.

    Attributes:
        name: the pool's name, which is unique for each tenant.
        spec: the pool's spec.
        origin: where the spec came from.
        closing: the pool was deleted, and is removed once its last lease has ended.
        tenant: the owner; None for a pool that belongs to no tenant.
    """

    name: str
    spec: PoolSpec
    origin: str
    closing: bool = False
    tenant: str | None = None

    @property
    def pool_id(self) -> PoolId:
        """The id of the pool."""
        return PoolId(self.name, self.tenant)


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheRecord:
    """A shared cache in a sandbox.

    Attributes:
        key: the name of the cache inside its sandbox.
        tenant: the tenant that uses it.
        run_id: the run that uses it; None where the lease belongs to no run.
        lease_id: the lease that uses it, where there is no run.
    """

    key: str
    tenant: str
    run_id: str | None
    lease_id: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxRecord:
    """A sandbox. A record with the state `GONE` deletes the sandbox and its slots from the store.

    Attributes:
        sandbox_id: the id of the sandbox.
        pool: the name of its pool.
        state: the state of the sandbox.
        handle: the last checkpoint of its creation; None before the first one.
        created_at: when its creation began, wall-clock time in Unix seconds.
        boot: the boot nonce of its agent; None before the agent first answered.
        spec: the pool spec that it was created with.
        ready_at: when it was ready for the first time, wall-clock time in Unix seconds.
        caches: the shared caches in it.
        why: why it drains or failed; empty otherwise.
        pool_tenant: the owner of the pool.
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
        """The id of the pool that the sandbox belongs to."""
        return PoolId(self.pool, self.pool_tenant)


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotRecord:
    """A slot and its current epoch.

    Attributes:
        ref: the slot.
        pool: the name of its pool.
        state: the state of the slot.
        epoch: the epoch of the slot.
        workspace: the path of the workspace, as commands in the slot see it.
        isolation: the isolation mode.
        keep: the tenant and run that the files in the slot are kept for; None: for nobody.
        pool_tenant: the owner of the pool.
    """

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
        """The id of the pool that the slot belongs to."""
        return PoolId(self.pool, self.pool_tenant)


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyRecord:
    """The leases that were granted to an acquire with a `request_key`.

    Attributes:
        tenant: the tenant that sent the request.
        key: its `request_key`.
        request: the acquire.
        lease_ids: the leases that it was granted.
        granted_at: when they were granted, wall-clock time in Unix seconds.
    """

    tenant: str
    key: str
    request: AcquireRequest
    lease_ids: tuple[str, ...]
    granted_at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RunBatchRecord:
    """A run-batch with a `request_key`. Its results are in a file of their own.

    Attributes:
        batch_id: the id of the run-batch.
        tenant: the tenant that sent the request.
        key: its `request_key`.
        digest: a digest of the request, which detects that the key is used again for another one.
        run_id: the run that owns the leases of its items.
        kept_since: since when its results are kept for a limited time, wall-clock time in Unix seconds.
        is_evicted: its results have been deleted to make room for others.
        is_cancelled: its run was released, so that none of its items begins any more.
    """

    batch_id: str
    tenant: str
    key: str
    digest: str
    run_id: str | None
    kept_since: float
    is_evicted: bool = False
    is_cancelled: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class RunBatchItemRecord:
    """An item of a run-batch that has a slot.

    Attributes:
        batch_id: the run-batch.
        index: the place of the item in the request.
        tenant: the tenant that sent the request.
        lease_id: the lease of its slot.
        call: the call that runs its program, once that may have been sent to the agent; None before, and where the request cannot be repeated.
        artifacts: the paths of the files that are to be read at its end.
    """

    batch_id: str
    index: int
    tenant: str
    lease_id: str
    call: ToolCall | None = None
    artifacts: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The key of the record."""
        return f"{self.batch_id}/{self.index}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ClockRecord:
    """The offset between record time and CLOCK_MONOTONIC; see `record_time`.

    Attributes:
        boot_id: the kernel's id of the machine start for which the offset is valid.
        offset_s: record time minus CLOCK_MONOTONIC, in seconds.
    """

    boot_id: str
    offset_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Deletion:
    """Deletes records from the store.

    Attributes:
        lease_id: deletes this lease, the results of its calls and its output files.
        key: deletes the request key that a tenant used: the tenant and the key.
        pool: deletes the pool with this `PoolId.key`.
        run_batch: deletes the run-batch with this id.
        run_batch_item: deletes the item of a run-batch with this key.
    """

    lease_id: str | None = None
    key: tuple[str, str] | None = None
    pool: str | None = None
    run_batch: str | None = None
    run_batch_item: str | None = None


#: When a lease ends in one of these states, the results of its calls are deleted. The results of a lease that was lost with its sandbox stay
#: until the lease itself is deleted, because its client still asks for them.
STATES_WITHOUT_RESULTS = frozenset({LeaseState.RELEASED, LeaseState.EXPIRED})

Record = PoolRecord | SandboxRecord | SlotRecord | Lease | KeyRecord | RunBatchRecord | RunBatchItemRecord | ClockRecord | Deletion


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedResult:
    """The result of a call, with the identity of the call.

    Attributes:
        identity: a digest of the tool and its arguments, which detects that a `call_id` is used again for a different call.
        result: the result.
    """

    identity: bytes
    result: Result


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """Every record in a store. A service that starts restores its state from this value."""

    sandboxes: Sequence[SandboxRecord] = ()
    slots: Sequence[SlotRecord] = ()
    leases: Sequence[Lease] = ()
    keys: Sequence[KeyRecord] = ()
    pools: Sequence[PoolRecord] = ()
    run_batches: Sequence[RunBatchRecord] = ()
    run_batch_items: Sequence[RunBatchItemRecord] = ()
    clock: ClockRecord | None = None


class Store(Protocol):
    """Keeps the records of the pools and the results of calls."""

    @property
    def durable(self) -> bool:
        """Whether the records are there after a restart of the service. If not, no later service can adopt the sandboxes."""
        ...

    def put(self, record: Record) -> None:
        """Queue one record for writing. Never waits and never raises."""
        ...

    async def flush(self) -> None:
        """Wait until everything that was put so far survives a crash.

        Raises:
            StorageUnavailable: it cannot be written. The caller must not promise anything that depends on it.
        """
        ...

    @property
    def outputs(self) -> OutputFiles:
        """The files of large outputs. The files of a lease are deleted together with the results of its calls."""
        ...

    def load(self) -> State:
        """Return every record that was in the store when it was opened."""
        ...

    def find_lease(self, lease_id: str) -> Lease | None:
        """Return the newest record of a lease, held or ended; None if there is none, or if it was deleted.

        Raises:
            StorageUnavailable: it cannot be read.
        """
        ...

    def record_result(self, lease_id: str, call_id: str, identity: bytes, result: Result) -> None:
        """Queue the result of a call for writing, as `put` does.

        The first result of a call stays: a second one is ignored. A result is kept while its lease is held; where the lease was lost with its
        sandbox, until the lease is deleted.

        Args:
            lease_id: the lease that the call ran under.
            call_id: the id of the call.
            identity: a digest of the tool and its arguments.
            result: the result.
        """
        ...

    def find_result(self, lease_id: str, call_id: str) -> RecordedResult | None:
        """Return the recorded result of a call; None if there is none.

        Raises:
            StorageUnavailable: it cannot be read.
        """
        ...

    def result_count(self, lease_id: str) -> int:
        """Return how many calls of a lease have a recorded result."""
        ...

    @property
    def problem(self) -> str | None:
        """One sentence that says why the service must not accept new work, and what to do about it; None if all is well."""
        ...

    async def check_storage(self) -> None:
        """Check that a later service will find what was put, and set `problem` accordingly. To be called every second."""
        ...

    async def close(self) -> None:
        """Write what is queued, and release every resource."""
        ...
