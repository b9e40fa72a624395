"""The results that are kept for repeated run-batches: their records, their files, and how much room they take."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from sandbox_server.core.clock import Clock, monotonic_at
from sandbox_server.core.errors import CallConflict, LeaseLost
from sandbox_server.dispatch.run_batch.values import RunBatchRequest
from sandbox_server.store.base import Deletion, RunBatchRecord, Store
from sandbox_server.store.file_deleter import FileDeleter

KEPT_S = 3600.0
"""How long results are kept after the last item has ended or the last client has gone, in seconds."""
NOT_YET = float(1 << 53)
"""The recorded `kept_since` of a run-batch that is in use: a time far in the future, because its hour has not begun. A restart begins it."""
MAX_RECORDS = 10_000
"""How many run-batches are remembered for repeated requests. Beyond that, the oldest of the tenant that has most of them is forgotten."""
SUFFIX = ".ndjson"


class KeptResults:
    """The run-batches with a `request_key`, and the room that their results take.

    Args:
        store: keeps their records.
        clock: gives the time.
        folder: the folder of the results, a file for each run-batch.
        limit_bytes: how much room all of them may take (`limits.run_batch_kept_bytes`).
        max_records: how many are remembered.
    """

    def __init__(self, store: Store, clock: Clock, folder: Path, limit_bytes: int, max_records: int = MAX_RECORDS) -> None:
        self._store = store
        self._clock = clock
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._max_records = max_records
        self._records: dict[str, RunBatchRecord] = {}
        self._id_by_key: dict[tuple[str, str], str] = {}
        self._size_bytes: dict[str, int] = {}
        self._tenant_bytes: Counter[str] = Counter()
        self._unused_since: dict[str, float] = {}  # since when the hour of a run-batch runs, monotonic; in this order
        self._deleter = FileDeleter()

    def restore(self, records: Sequence[RunBatchRecord]) -> None:
        """Remember the run-batches that an earlier process has recorded, and delete the files of those that nobody remembers."""
        now = self._clock.wall()
        for record in sorted(records, key=lambda record: record.kept_since):
            if record.kept_since > now:
                self.update(replace(record, kept_since=now))
            else:
                self._remember(record)
            self._unused_since[record.batch_id] = monotonic_at(self._clock, record.kept_since)
        found = {path.name.removesuffix(SUFFIX): path for path in self._folder.glob(f"*{SUFFIX}")} if self._folder.is_dir() else {}
        for batch_id, path in found.items():
            known = self._records.get(batch_id)
            if known is None or known.is_evicted:
                self._deleter.delete(str(path))
            else:
                self._set_size(batch_id, path.stat().st_size)

    def path_of(self, batch_id: str) -> Path:
        """The file with the results of a run-batch."""
        return self._folder / f"{batch_id}{SUFFIX}"

    def find(self, request: RunBatchRequest, digest: str) -> RunBatchRecord | None:
        """Find the run-batch that a request repeats; None if it is a new one.

        Args:
            request: the request; it must have a key.
            digest: the digest of the request with its items.

        Raises:
            CallConflict: the key was used with another body.
            LeaseLost: the results are not kept any more.
        """
        batch_id = self._id_by_key.get(_key_of(request))
        if batch_id is None:
            return None
        record = self._records[batch_id]
        if record.digest != digest:
            raise CallConflict(f"request_key {record.key!r} was used before with another body")
        self._check_kept(record)
        return record

    def _check_kept(self, record: RunBatchRecord) -> None:
        if record.is_evicted:
            why = f"all that is kept may have {self._limit_bytes} bytes, that is `limits.run_batch_kept_bytes`, or a result could not be written to the disk"
            raise LeaseLost(f"the results of request_key {record.key!r} are not kept any more: {why}; use a new request_key to run the programs again")

    def add(self, request: RunBatchRequest, digest: str) -> RunBatchRecord:
        """Remember a new run-batch. The record is queued for the store."""
        tenant, key = _key_of(request)
        batch_id = new_batch_id()
        record = RunBatchRecord(batch_id=batch_id, tenant=tenant, key=key, digest=digest, run_id=request.run_id or batch_id, kept_since=NOT_YET)
        self.update(record)
        return record

    def begin_use(self, batch_id: str) -> RunBatchRecord:
        """Take note that a run-batch is in use, so that its hour does not run.

        Returns:
            Its record.

        Raises:
            LeaseLost: its results are not kept any more.
        """
        self._check_kept(self._records[batch_id])
        self._unused_since.pop(batch_id, None)
        self.update(replace(self._records[batch_id], kept_since=NOT_YET))
        return self._records[batch_id]

    def end_use(self, record: RunBatchRecord) -> None:
        """Take note that a run-batch is not in use any more: its hour begins."""
        self._unused_since[record.batch_id] = self._clock.monotonic()
        self.update(replace(record, kept_since=self._clock.wall()))

    def get(self, batch_id: str) -> RunBatchRecord | None:
        """The record of a run-batch; None if it is not remembered."""
        return self._records.get(batch_id)

    def of_run(self, tenant: str, run_id: str) -> list[RunBatchRecord]:
        """The run-batches of a run."""
        return [record for record in self._records.values() if record.tenant == tenant and record.run_id == run_id]

    def update(self, record: RunBatchRecord) -> None:
        """Replace the record of a run-batch."""
        self._remember(record)
        self._store.put(record)

    def _remember(self, record: RunBatchRecord) -> None:
        self._records.pop(record.batch_id, None)  # so that the records are in the order in which they were used last
        self._records[record.batch_id] = record
        self._id_by_key[record.tenant, record.key] = record.batch_id

    def forget(self, batch_id: str) -> None:
        """Forget a run-batch, and delete its results."""
        record = self._records.get(batch_id)
        if record is not None:
            self._delete_results(batch_id)
            del self._records[batch_id]
            del self._id_by_key[record.tenant, record.key]
            self._unused_since.pop(batch_id, None)
            self._store.put(Deletion(run_batch=batch_id))

    def _delete_results(self, batch_id: str) -> None:
        self._set_size(batch_id, 0)
        self._deleter.delete(str(self.path_of(batch_id)))

    def evict(self, batch_id: str) -> None:
        """Delete the results of a run-batch. A repeated request is told for an hour that they are not kept any more."""
        self._delete_results(batch_id)
        record = self._records[batch_id]
        self._unused_since.setdefault(batch_id, self._clock.monotonic())
        self.update(replace(record, is_evicted=True, kept_since=min(record.kept_since, self._clock.wall())))

    def make_room(self, batch_id: str, size_bytes: int, is_active: Callable[[str], bool]) -> Sequence[str]:
        """Take note that the results of a run-batch have grown, and evict run-batches as long as all results take too much room.

        They are those of the tenant whose results take the most room, so that no tenant loses its results because another one has more: first those
        that are not active, from the one that was used least recently on; then the one that has grown, or the largest one if it belongs to another
        tenant.

        Args:
            batch_id: the run-batch.
            size_bytes: how much room its results take now.
            is_active: whether a run-batch is followed or has running items.

        Returns:
            The run-batches that were evicted.
        """
        self._set_size(batch_id, size_bytes)
        evicted: list[str] = []
        while self._tenant_bytes.total() > self._limit_bytes:
            evicted.append(self._choose_evicted(batch_id, is_active))
            self.evict(evicted[-1])
        return evicted

    def _choose_evicted(self, grown_id: str, is_active: Callable[[str], bool]) -> str:
        grown_tenant = self._records[grown_id].tenant
        tenant = max(self._tenant_bytes, key=lambda name: (self._tenant_bytes[name], name == grown_tenant))
        kept = [batch_id for batch_id, record in self._records.items() if record.tenant == tenant and batch_id in self._size_bytes]
        unused = next((batch_id for batch_id in kept if not is_active(batch_id)), None)
        if unused is not None:
            return unused
        return grown_id if grown_id in kept else max(kept, key=self._size_bytes.__getitem__)

    def _set_size(self, batch_id: str, size_bytes: int) -> None:
        tenant = self._records[batch_id].tenant
        self._tenant_bytes[tenant] += size_bytes - self._size_bytes.pop(batch_id, 0)
        if size_bytes:
            self._size_bytes[batch_id] = size_bytes
        if not self._tenant_bytes[tenant]:
            del self._tenant_bytes[tenant]

    def purge(self, is_active: Callable[[str], bool]) -> None:
        """Forget the run-batches whose results were kept for an hour, and the oldest beyond `MAX_RECORDS`, but none that is active."""
        latest = self._clock.monotonic() - KEPT_S
        for batch_id, since in list(self._unused_since.items()):
            if since <= latest and not is_active(batch_id):
                self.forget(batch_id)
        while len(self._records) > self._max_records:
            counts = Counter(record.tenant for record in self._records.values())
            tenant = max(counts, key=counts.__getitem__)
            oldest = next((record for record in self._records.values() if record.tenant == tenant and not is_active(record.batch_id)), None)
            if oldest is None:
                return
            self.forget(oldest.batch_id)

    def close(self) -> None:
        """End the thread that deletes files."""
        self._deleter.delete_remaining()


def new_batch_id() -> str:
    """Make the id of a run-batch."""
    return f"rb-{secrets.token_hex(10)}"


def _key_of(request: RunBatchRequest) -> tuple[str, str]:
    assert request.request_key is not None, "only requests with a key are kept"
    return request.tenant, request.request_key
