"""A store for tests of crashes: flushed records survive, and other records may be lost."""

from __future__ import annotations

from sandbox_server.core.errors import StorageUnavailable
from sandbox_server.core.execution import Result
from sandbox_server.core.types import Lease
from sandbox_server.store.base import Record, RecordedResult, State
from sandbox_server.store.memory import MemoryStore
from sandbox_server.store.output_files import OutputFiles


class CrashingStore:
    """A durable store in memory. While `failure` is set, writing to it fails."""

    durable = True
    failure: StorageUnavailable | None = None

    def __init__(self) -> None:
        self.disk = MemoryStore(durable=True)
        self.live = MemoryStore()
        self._pending: list[Record | tuple[str, str, bytes, Result]] = []

    @property
    def outputs(self) -> OutputFiles:
        """The files of large outputs, which survive a crash."""
        return self.disk.outputs

    @property
    def unflushed(self) -> int:
        """The number of changes that a crash would lose now."""
        return len(self._pending)

    def put(self, record: Record) -> None:
        """Queue one record."""
        self.live.put(record)
        self._pending.append(record)

    async def flush(self) -> None:
        """Write all queued records to the simulated disk.

        Raises:
            StorageUnavailable: `failure` is set.
        """
        if self.failure is not None:
            raise self.failure
        self._write(len(self._pending))

    def _write(self, count: int) -> None:
        written, self._pending = self._pending[:count], self._pending[count:]
        for item in written:
            if isinstance(item, tuple):
                self.disk.record_result(*item)
            else:
                self.disk.put(item)

    def crash(self, also_written: int = 0) -> None:
        """Simulate a crash of the process, after the first `also_written` queued changes reached the disk."""
        self._write(also_written)
        self._pending.clear()
        self.live = MemoryStore()
        for records in (self.disk.pools, self.disk.sandboxes, self.disk.slots, self.disk.leases, self.disk.keys):
            for record in records.values():
                self.live.put(record)
        self.live.results = {lease_id: dict(calls) for lease_id, calls in self.disk.results.items()}

    def load(self) -> State:
        """Return the records on the simulated disk."""
        return self.disk.load()

    def find_lease(self, lease_id: str) -> Lease | None:
        """Return the newest record of a lease."""
        return self.live.find_lease(lease_id)

    def record_result(self, lease_id: str, call_id: str, identity: bytes, result: Result) -> None:
        """Queue the result of a call."""
        self.live.record_result(lease_id, call_id, identity, result)
        self._pending.append((lease_id, call_id, identity, result))

    def find_result(self, lease_id: str, call_id: str) -> RecordedResult | None:
        """Return the recorded result of a call."""
        return self.live.find_result(lease_id, call_id)

    def result_count(self, lease_id: str) -> int:
        """Return how many calls of a lease have a result."""
        return self.live.result_count(lease_id)

    @property
    def problem(self) -> str | None:
        """The reason for which writing fails; None while it succeeds."""
        return None if self.failure is None else self.failure.detail

    async def check_storage(self) -> None:
        """Do nothing: a store in memory has nothing to check."""

    async def close(self) -> None:
        """Write the queued records."""
        await self.flush()
