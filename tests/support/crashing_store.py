"""A store whose service can die: what was flushed is there for the next one, what was not may be lost."""

from __future__ import annotations

from sandbox_server.core.errors import StorageUnavailable
from sandbox_server.core.execution import Result
from sandbox_server.core.types import Lease
from sandbox_server.store.base import Record, RecordedResult, State
from sandbox_server.store.memory import MemoryStore
from sandbox_server.store.output_files import OutputFiles


class CrashingStore:
    """A durable store in memory. While `failure` is set it cannot be written."""

    durable = True
    failure: StorageUnavailable | None = None

    def __init__(self) -> None:
        self.disk = MemoryStore(durable=True)
        self.live = MemoryStore()
        self._pending: list[Record | tuple[str, str, bytes, Result]] = []

    @property
    def outputs(self) -> OutputFiles:
        """The files of large outputs, which outlive a crash."""
        return self.disk.outputs

    @property
    def unflushed(self) -> int:
        """How many changes would be lost by a crash now."""
        return len(self._pending)

    def put(self, record: Record) -> None:
        """Queue one record."""
        self.live.put(record)
        self._pending.append(record)

    async def flush(self) -> None:
        """All that was put is on the disk.

        Raises:
            StorageUnavailable: it shall not be.
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
        """The process ends; so many of the changes that nobody waited for had been written all the same."""
        self._write(also_written)
        self._pending.clear()
        self.live = MemoryStore()
        for records in (self.disk.pools, self.disk.sandboxes, self.disk.slots, self.disk.leases, self.disk.keys):
            for record in records.values():
                self.live.put(record)
        self.live.results = {lease_id: dict(calls) for lease_id, calls in self.disk.results.items()}

    def load(self) -> State:
        """What is on the disk."""
        return self.disk.load()

    def lease(self, lease_id: str) -> Lease | None:
        """The newest record of a lease."""
        return self.live.lease(lease_id)

    def record_result(self, lease_id: str, call_id: str, identity: bytes, result: Result) -> None:
        """Queue how a call ended."""
        self.live.record_result(lease_id, call_id, identity, result)
        self._pending.append((lease_id, call_id, identity, result))

    def find_result(self, lease_id: str, call_id: str) -> RecordedResult | None:
        """What was recorded for this call."""
        return self.live.find_result(lease_id, call_id)

    def result_count(self, lease_id: str) -> int:
        """How many calls of this lease have a verdict."""
        return self.live.result_count(lease_id)

    @property
    def problem(self) -> str | None:
        """Why it cannot be written, while it shall not be."""
        return None if self.failure is None else self.failure.detail

    async def check_storage(self) -> None:
        """There is nothing to see."""

    async def close(self) -> None:
        """Write what is queued."""
        await self.flush()
