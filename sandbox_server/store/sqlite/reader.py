"""Reads records and results from the state file."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from sandbox_server.store.base import RecordedResult, State
from sandbox_server.store.codec import decode, decode_result


class StateFileReader:
    """A read-only connection to the state file. It is separate from the connection that writes, so that a read never waits for a write.

    Every method raises `sqlite3.Error` if the file cannot be read, and `ValueError` if its content cannot be decoded.

    Args:
        path: the path of the state file.
    """

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=0.0)
        self._connection.execute("PRAGMA query_only = ON")

    def read_state(self) -> State:
        """Return every record in the file."""
        return State(
            sandboxes=tuple(self.records("sandbox")),
            slots=tuple(self.records("slot")),
            leases=tuple(self.records("lease")),
            keys=tuple(self.records("key")),
            pools=tuple(self.records("pool")),
            run_batches=tuple(self.records("run_batch")),
            run_batch_items=tuple(self.records("run_batch_item")),
            clock=next(self.records("clock"), None),
        )

    def records(self, kind: str) -> Iterator[Any]:
        """Yield every record of a kind; see `codec.KINDS`."""
        for (document,) in self._connection.execute("SELECT doc FROM record WHERE kind = ?", (kind,)):
            yield decode(kind, document)

    def record(self, kind: str, key: str) -> Any:
        """Return the record of one object; None if there is none."""
        row = self._connection.execute("SELECT doc FROM record WHERE kind = ? AND key = ?", (kind, key)).fetchone()
        return None if row is None else decode(kind, row[0])

    def recorded_calls(self) -> Iterable[tuple[str, str]]:
        """Return the ids of the lease and of the call of every result."""
        return self._connection.execute("SELECT lease_id, call_id FROM verdict")

    def find_result(self, lease_id: str, call_id: str) -> RecordedResult | None:
        """Return the result of a call with its outputs; None if there is none."""
        sql = "SELECT identity, doc, lengths, outputs FROM verdict WHERE lease_id = ? AND call_id = ?"
        row = self._connection.execute(sql, (lease_id, call_id)).fetchone()
        return None if row is None else decode_result(*row)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()
