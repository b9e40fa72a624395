"""Ended leases: the newest are in memory, the others are read from the store, also after a restart, and all are deleted after an hour."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from sandbox_server.core.clock import SystemClock
from sandbox_server.core.types import Lease, LeaseState
from sandbox_server.pool.leasing.ended_leases import ENDED_LEASE_REMEMBERED_S, MAX_IN_MEMORY, EndedLeases
from sandbox_server.store.sqlite.store import SqliteStore
from tests.unit.store.test_store import LEASE

ENDED = 3 * MAX_IN_MEMORY
ENDED_AT = 5.0


@asynccontextmanager
async def opened(path: Path) -> AsyncIterator[tuple[SqliteStore, EndedLeases]]:
    store = SqliteStore(path)
    ended = EndedLeases(store.put, store.find_lease)
    ended.remember_leases(store.load().leases, SystemClock())
    yield store, ended
    await store.close()


def lease_objects() -> int:
    gc.collect()
    return sum(type(thing) is Lease for thing in gc.get_objects())


def ended_lease(number: int) -> Lease:
    return replace(LEASE, lease_id=f"l-{number}", labels={}, state=LeaseState.RELEASED, ended_at=ENDED_AT + number / 1e3, end_detail="released")


async def test_older_ended_leases_are_not_in_memory_and_are_found_all_the_same(tmp_path: Path) -> None:
    before = lease_objects()
    async with opened(tmp_path / "state.db") as (store, ended):
        for number in range(ENDED):
            ended.add_lease(ended_lease(number), float(number))
        await store.flush()
        await store.check_storage()  # after this the writer thread refers to no record any more
        assert lease_objects() - before <= MAX_IN_MEMORY

        assert [ended.get(f"l-{number}") for number in (0, ENDED - 1)] == [ended_lease(0), ended_lease(ENDED - 1)]

    async with opened(tmp_path / "state.db") as (store, ended):
        assert lease_objects() - before <= MAX_IN_MEMORY
        assert [ended.get(f"l-{number}") for number in (0, ENDED - 1)] == [ended_lease(0), ended_lease(ENDED - 1)]
        assert (ended.get("l-none"), ended.get("\ud800")) == (None, None)


async def test_what_ended_more_than_an_hour_ago_is_forgotten_at_once_and_on_record(tmp_path: Path) -> None:
    async with opened(tmp_path / "state.db") as (store, ended):
        for number in range(2 * MAX_IN_MEMORY):
            ended.add_lease(ended_lease(number), float(number))
        await store.flush()
        ended.purge(ENDED_LEASE_REMEMBERED_S + 0.5)
        assert (ended.get("l-0"), ended.get("l-1")) == (None, ended_lease(1))

    async with opened(tmp_path / "state.db") as (store, ended):
        assert (ended.get("l-0"), ended.get("l-1")) == (None, ended_lease(1))


async def test_a_lease_that_holds_has_not_ended(tmp_path: Path) -> None:
    async with opened(tmp_path / "state.db") as (store, ended):
        store.put(LEASE)
        await store.flush()
        assert (store.find_lease(LEASE.lease_id), ended.get(LEASE.lease_id)) == (LEASE, None)
