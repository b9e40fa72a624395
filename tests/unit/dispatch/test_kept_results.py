"""For how long the results of run-batches are kept, and whose make room for others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sandbox_server.dispatch.run_batch.kept_results import KEPT_S, KeptResults
from sandbox_server.dispatch.run_batch.values import RunBatchRequest
from sandbox_server.store.memory import MemoryStore
from sandbox_server.testing import FakeClock

LIMIT_BYTES = 100
ACTIVE: set[str] = set()


def request(key: str, tenant: str = "alice") -> RunBatchRequest:
    return RunBatchRequest(tenant=tenant, pool="default", request_key=key)


@contextmanager
def opened(store: MemoryStore, clock: FakeClock, folder: Path) -> Iterator[KeptResults]:
    """The kept results of one process of the service, restored from its store."""
    kept = KeptResults(store, clock, folder, LIMIT_BYTES)
    kept.restore(list(store.run_batches.values()))
    try:
        yield kept
    finally:
        kept.close()


def test_the_hour_of_a_run_batch_that_was_in_use_begins_with_the_restart(tmp_path: Path) -> None:
    store, clock = MemoryStore(), FakeClock()
    with opened(store, clock, tmp_path) as kept:
        for key in ("closed", "new", "repeated"):
            kept.add(request(key), "digest")
        for record in list(store.run_batches.values()):
            if record.key != "new":
                kept.end_use(record)
            if record.key == "repeated":
                kept.begin_use(record.batch_id)
    clock.pass_time(2 * KEPT_S)

    with opened(store, clock, tmp_path) as kept:
        kept.purge(ACTIVE.__contains__)
        assert {record.key for record in store.run_batches.values()} == {"new", "repeated"}
        assert kept.find(request("new"), "digest") is not None
    clock.pass_time(KEPT_S - 1)
    with opened(store, clock, tmp_path) as kept:
        kept.purge(ACTIVE.__contains__)
        assert kept.find(request("new"), "digest") is not None
        clock.pass_time(1)
        kept.purge(ACTIVE.__contains__)
        assert kept.find(request("new"), "digest") is None
