"""The store of a service whose state ends with its process."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from sandbox_server.core.execution import Result
from sandbox_server.core.types import Lease, SandboxState, SlotRef
from sandbox_server.store.base import OVER, Deletion, KeyRecord, PoolRecord, Record, RecordedResult, SandboxRecord, SlotRecord, State
from sandbox_server.store.output_files import OutputFiles


@dataclass
class MemoryStore:
    """A store that forgets when the process ends, and otherwise keeps the promises of `Store`."""

    durable: bool = False
    sandboxes: dict[str, SandboxRecord] = field(default_factory=dict)
    slots: dict[SlotRef, SlotRecord] = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)
    keys: dict[tuple[str, str], KeyRecord] = field(default_factory=dict)
    pools: dict[str, PoolRecord] = field(default_factory=dict)
    result_store: dict[str, dict[str, RecordedResult]] = field(default_factory=dict)
    outputs: OutputFiles = field(default_factory=lambda: OutputFiles(None))
    _slots_of: dict[str, set[SlotRef]] = field(default_factory=dict)

    def put(self, record: Record) -> None:
        """Remember one record."""
        if isinstance(record, SlotRecord):
            self.slots[record.ref] = record
            self._slots_of.setdefault(record.ref.sandbox_id, set()).add(record.ref)
        elif isinstance(record, Lease):
            self.leases[record.lease_id] = record
            if record.state in OVER:
                self._forget_verdicts(record.lease_id)
        elif isinstance(record, SandboxRecord):
            self._put_sandbox(record)
        elif isinstance(record, KeyRecord):
            self.keys[record.tenant, record.key] = record
        elif isinstance(record, PoolRecord):
            self.pools[record.pool_id.key] = record
        elif isinstance(record, Deletion):
            self._forget(record)

    def _put_sandbox(self, record: SandboxRecord) -> None:
        if record.state is not SandboxState.GONE:
            self.sandboxes[record.sandbox_id] = record
            return
        self.sandboxes.pop(record.sandbox_id, None)
        for ref in self._slots_of.pop(record.sandbox_id, ()):
            del self.slots[ref]

    def _forget(self, record: Deletion) -> None:
        if record.lease_id is not None:
            self.leases.pop(record.lease_id, None)
            self._forget_verdicts(record.lease_id)
        if record.key is not None:
            self.keys.pop(record.key, None)
        if record.pool is not None:
            self.pools.pop(record.pool, None)

    def _forget_verdicts(self, lease_id: str) -> None:
        self.result_store.pop(lease_id, None)
        self.outputs.forget(lease_id)

    async def flush(self) -> None:
        """There is nothing to wait for."""

    def load(self) -> State:
        """What is remembered now."""
        return State(
            sandboxes=tuple(self.sandboxes.values()),
            slots=tuple(self.slots.values()),
            leases=tuple(self.leases.values()),
            keys=tuple(self.keys.values()),
            pools=tuple(self.pools.values()),
        )

    def lease(self, lease_id: str) -> Lease | None:
        """The newest record of a lease."""
        return self.leases.get(lease_id)

    def record_result(self, lease_id: str, call_id: str, identity: bytes, result: Result) -> None:
        """Remember how a call ended; the first verdict stays."""
        lease = self.leases.get(lease_id)
        if lease is None or lease.state not in OVER:
            self.result_store.setdefault(lease_id, {}).setdefault(call_id, RecordedResult(identity=identity, result=result))

    def find_result(self, lease_id: str, call_id: str) -> RecordedResult | None:
        """What was recorded for this call."""
        calls = self.result_store.get(lease_id)
        return None if calls is None else calls.get(call_id)

    def result_count(self, lease_id: str) -> int:
        """How many calls of this lease have a verdict."""
        return len(self.result_store.get(lease_id, ()))

    @property
    def problem(self) -> str | None:
        """There is none."""
        return None

    async def check_storage(self) -> None:
        """There is nothing to see."""

    async def close(self) -> None:
        """Let go of the output files."""
        await asyncio.to_thread(self.outputs.close)
