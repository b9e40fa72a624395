"""For how long the results of run-batches are kept, and whose make room for others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sandbox_server.core.errors import LeaseLost
from sandbox_server.dispatch.run_batch.kept_results import KEPT_S, MAX_RECORDS, KeptResults
from sandbox_server.dispatch.run_batch.values import RunBatchRequest
from sandbox_server.store.memory import MemoryStore
from sandbox_server.testing import FakeClock

LIMIT_BYTES = 100
ACTIVE: set[str] = set()


def request(key: str, tenant: str = "alice") -> RunBatchRequest:
    return RunBatchRequest(tenant=tenant, pool="default", request_key=key)


@contextmanager
def opened(store: MemoryStore, clock: FakeClock, folder: Path, max_records: int = MAX_RECORDS) -> Iterator[KeptResults]:
    """The kept results of one process of the service, restored from its store."""
    kept = KeptResults(store, clock, folder, LIMIT_BYTES, max_records)
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


def test_results_make_room_for_those_of_a_tenant_that_has_less(tmp_path: Path) -> None:
    with opened(MemoryStore(), FakeClock(), tmp_path) as kept:
        old, running, others = (kept.add(request(key, tenant), "digest").batch_id for key, tenant in (("old", "alice"), ("new", "alice"), ("bobs", "bob")))
        active = {running, others}
        assert kept.make_room(others, 10, active.__contains__) == []
        assert kept.make_room(old, 20, active.__contains__) == []
        assert kept.make_room(running, 75, active.__contains__) == [old]
        assert kept.make_room(others, 40, active.__contains__) == [running]
        assert kept.find(request("bobs", "bob"), "digest") is not None
        for key in ("old", "new"):
            with pytest.raises(LeaseLost):
                kept.find(request(key), "digest")

        assert kept.make_room(others, LIMIT_BYTES + 1, active.__contains__) == [others]


def test_too_many_records_of_a_tenant_displace_its_own(tmp_path: Path) -> None:
    store = MemoryStore()
    with opened(store, FakeClock(), tmp_path, max_records=3) as kept:
        for key, tenant in (("bobs", "bob"), ("1", "alice"), ("2", "alice"), ("3", "alice"), ("4", "alice")):
            kept.add(request(key, tenant), "digest")
        active = {record.batch_id for record in store.run_batches.values() if record.key == "1"}
        kept.purge(active.__contains__)

        assert {record.key for record in store.run_batches.values()} == {"bobs", "1", "4"}


def test_a_jump_of_the_wall_clock_forgets_nothing(tmp_path: Path) -> None:
    clock = FakeClock()
    with opened(MemoryStore(), clock, tmp_path) as kept:
        kept.end_use(kept.add(request("key"), "digest"))
        clock.jump_wall(2 * KEPT_S)
        kept.purge(ACTIVE.__contains__)
        assert kept.find(request("key"), "digest") is not None
        clock.jump_wall(-4 * KEPT_S)
        clock.pass_time(KEPT_S)
        kept.purge(ACTIVE.__contains__)
        assert kept.find(request("key"), "digest") is None


def test_what_was_evicted_while_in_use_is_forgotten_after_an_hour(tmp_path: Path) -> None:
    clock = FakeClock()
    with opened(MemoryStore(), clock, tmp_path) as kept:
        batch_id = kept.add(request("key"), "digest").batch_id
        kept.evict(batch_id)
        clock.pass_time(KEPT_S)
        kept.purge({batch_id}.__contains__)
        assert kept.get(batch_id) is not None
        kept.purge(ACTIVE.__contains__)
        assert kept.get(batch_id) is None
