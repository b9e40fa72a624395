"""The store of a service whose state ends with its process."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from sandbox_server.core.execution import Result
from sandbox_server.core.types import Lease, SandboxState, SlotRef
from sandbox_server.store.base import (
    STATES_WITHOUT_RESULTS,
    Deletion,
    KeyRecord,
    PoolRecord,
    Record,
    RecordedResult,
    RunBatchItemRecord,
    RunBatchRecord,
    SandboxRecord,
    SlotRecord,
    State,
)
from sandbox_server.store.output_files import OutputFiles


@dataclass
class MemoryStore:
    """A `Store` in memory. Its records are lost when the process ends; otherwise it behaves as `Store` promises."""

    durable: bool = False
    sandboxes: dict[str, SandboxRecord] = field(default_factory=dict)
    slots: dict[SlotRef, SlotRecord] = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)
    keys: dict[tuple[str, str], KeyRecord] = field(default_factory=dict)
    pools: dict[str, PoolRecord] = field(default_factory=dict)
    run_batches: dict[str, RunBatchRecord] = field(default_factory=dict)
    run_batch_items: dict[str, RunBatchItemRecord] = field(default_factory=dict)
    results: dict[str, dict[str, RecordedResult]] = field(default_factory=dict)
    outputs: OutputFiles = field(default_factory=lambda: OutputFiles(None))
    _slots_by_sandbox: dict[str, set[SlotRef]] = field(default_factory=dict)

    def put(self, record: Record) -> None:
        """Keep one record, or carry out a deletion."""
        if isinstance(record, SlotRecord):
            self.slots[record.ref] = record
            self._slots_by_sandbox.setdefault(record.ref.sandbox_id, set()).add(record.ref)
        elif isinstance(record, Lease):
            self.leases[record.lease_id] = record
            if record.state in STATES_WITHOUT_RESULTS:
                self._delete_results(record.lease_id)
        elif isinstance(record, SandboxRecord):
            self._put_sandbox(record)
        elif isinstance(record, KeyRecord):
            self.keys[record.tenant, record.key] = record
        elif isinstance(record, PoolRecord):
            self.pools[record.pool_id.key] = record
        elif isinstance(record, RunBatchRecord):
            self.run_batches[record.batch_id] = record
        elif isinstance(record, RunBatchItemRecord):
            self.run_batch_items[record.key] = record
        elif isinstance(record, Deletion):
            self._delete(record)

    def _put_sandbox(self, record: SandboxRecord) -> None:
        if record.state is not SandboxState.GONE:
            self.sandboxes[record.sandbox_id] = record
            return
        self.sandboxes.pop(record.sandbox_id, None)
        for ref in self._slots_by_sandbox.pop(record.sandbox_id, ()):
            del self.slots[ref]

    def _delete(self, deletion: Deletion) -> None:
        if deletion.lease_id is not None:
            self.leases.pop(deletion.lease_id, None)
            self._delete_results(deletion.lease_id)
        if deletion.key is not None:
            self.keys.pop(deletion.key, None)
        if deletion.pool is not None:
            self.pools.pop(deletion.pool, None)
        if deletion.run_batch is not None:
            self.run_batches.pop(deletion.run_batch, None)
        if deletion.run_batch_item is not None:
            self.run_batch_items.pop(deletion.run_batch_item, None)

    def _delete_results(self, lease_id: str) -> None:
        self.results.pop(lease_id, None)
        self.outputs.delete_files(lease_id)

    async def flush(self) -> None:
        """Return at once: nothing is written anywhere."""

    def load(self) -> State:
        """Return every record that is in the store now."""
        return State(
            sandboxes=tuple(self.sandboxes.values()),
            slots=tuple(self.slots.values()),
            leases=tuple(self.leases.values()),
            keys=tuple(self.keys.values()),
            pools=tuple(self.pools.values()),
            run_batches=tuple(self.run_batches.values()),
            run_batch_items=tuple(self.run_batch_items.values()),
        )

    def find_lease(self, lease_id: str) -> Lease | None:
        """Return the newest record of a lease; None if there is none."""
        return self.leases.get(lease_id)

    def record_result(self, lease_id: str, call_id: str, identity: bytes, result: Result) -> None:
        """Keep the result of a call, unless the call has one already or the results of its lease were deleted."""
        lease = self.leases.get(lease_id)
        if lease is None or lease.state not in STATES_WITHOUT_RESULTS:
            self.results.setdefault(lease_id, {}).setdefault(call_id, RecordedResult(identity=identity, result=result))

    def find_result(self, lease_id: str, call_id: str) -> RecordedResult | None:
        """Return the recorded result of a call; None if there is none."""
        return self.results.get(lease_id, {}).get(call_id)

    def result_count(self, lease_id: str) -> int:
        """Return how many calls of a lease have a recorded result."""
        return len(self.results.get(lease_id, ()))

    @property
    def problem(self) -> str | None:
        """Always None: memory cannot become unavailable."""
        return None

    async def check_storage(self) -> None:
        """Return at once: there is nothing on disk to check."""

    async def close(self) -> None:
        """Close the output files."""
        await asyncio.to_thread(self.outputs.close)
