"""The changes that are written to the state file in one commit."""

from __future__ import annotations

from dataclasses import dataclass, field

from sandbox_server.store.base import Record, RecordedResult
from sandbox_server.store.codec import RecordId


@dataclass(slots=True)
class WriteBatch:
    """Changes to the state file.

    Attributes:
        records: the newest record of each object; None deletes its record.
        results: new results, by the id of the lease and the id of the call.
        output_bytes: the size of the outputs in `results`.
    """

    records: dict[RecordId, Record | None] = field(default_factory=dict)
    results: dict[str, dict[str, RecordedResult]] = field(default_factory=dict)
    output_bytes: int = 0

    def __bool__(self) -> bool:
        return bool(self.records or self.results)

    def __len__(self) -> int:
        """How many records and results there are."""
        return len(self.records) + sum(map(len, self.results.values()))

    def add_result(self, lease_id: str, call_id: str, recorded_result: RecordedResult) -> None:
        """Add the result of a call that has no result in this batch."""
        self.results.setdefault(lease_id, {})[call_id] = recorded_result
        self.output_bytes += recorded_result.result.held_bytes

    def remove_results(self, lease_id: str) -> None:
        """Remove every result of a lease."""
        self.output_bytes -= sum(recorded_result.result.held_bytes for recorded_result in self.results.pop(lease_id, {}).values())

    def remove_oldest_result(self) -> tuple[str, str]:
        """Remove the first result of the lease that got a result first. Returns the ids of its lease and its call."""
        lease_id, calls = next(iter(self.results.items()))
        call_id = next(iter(calls))
        self.output_bytes -= calls.pop(call_id).result.held_bytes
        if not calls:
            del self.results[lease_id]
        return lease_id, call_id

    def merged_onto(self, older: WriteBatch) -> WriteBatch:
        """Return both batches as one. Where both have a record of the same object, the record of this batch is used. `older` must not be used afterwards."""
        merged = WriteBatch({**older.records, **self.records}, older.results, older.output_bytes)
        for lease_id, calls in self.results.items():
            for call_id, recorded_result in calls.items():
                merged.add_result(lease_id, call_id, recorded_result)
        return merged
