"""The wall clock is set while the service runs, or while it is down: nothing that is on record becomes older or younger by it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sandbox_server.core.errors import LeaseLost
from sandbox_server.core.types import AcquireRequest, PoolSpec, SandboxState
from sandbox_server.pool.dependencies import PoolDependencies
from sandbox_server.pool.service import PoolService
from sandbox_server.store.base import KeyRecord
from sandbox_server.store.record_time import boot_id
from sandbox_server.store.sqlite.store import SqliteStore
from sandbox_server.testing import FakeBackend, FakeClock, settle
from tests.support.crash import kill_pools
from tests.unit.store.test_store import LEASE, SANDBOX

DAY_S = 86_400.0
JUMPS = pytest.mark.parametrize("jump_s", [DAY_S, 3600.0, -3600.0, -DAY_S])


async def written(path, clock, *records, boot="one"):
    store = SqliteStore(path, clock, boot)
    for record in records:
        store.put(record)
    await store.flush()
    await store.close()


async def read(path, clock, boot="one"):
    store = SqliteStore(path, clock, boot)
    state = store.load()
    await store.close()
    return state


def some(clock):
    wall = clock.wall()
    return (
        replace(LEASE, acquired_at=wall, expires_at=wall + 60, ended_at=wall + 1, sandbox_ends_at=wall + 2),
        replace(SANDBOX, created_at=wall, ready_at=wall + 1),
        KeyRecord(tenant="t", key="k", request=AcquireRequest(tenant="t", pool="p"), lease_ids=("l-1",), granted_at=wall),
    )


@JUMPS
async def test_what_is_on_record_is_as_old_as_it_is(tmp_path, jump_s):
    clock = FakeClock()
    await written(tmp_path / "state.db", clock, *some(clock))
    clock.jump_wall(jump_s)
    clock.pass_time(10)

    state = await read(tmp_path / "state.db", clock)

    now = clock.wall()
    (lease,), (sandbox,), (key,) = state.leases, state.sandboxes, state.keys
    assert (lease.acquired_at - now, lease.expires_at - now, lease.ended_at - now, lease.sandbox_ends_at - now) == (-10, 50, -9, -8)
    assert (sandbox.created_at - now, sandbox.ready_at - now, key.granted_at - now) == (-10, -9, -10)


@JUMPS
async def test_what_was_written_before_and_after_a_jump_in_one_life_fits_together(tmp_path, jump_s):
    clock = FakeClock()
    store = SqliteStore(tmp_path / "state.db", clock, "one")
    before = some(clock)
    store.put(before[1])
    clock.jump_wall(jump_s)
    clock.pass_time(5)
    store.put(some(clock)[0])
    await store.flush()
    await store.close()

    state = await read(tmp_path / "state.db", clock)

    assert state.leases[0].acquired_at - state.sandboxes[0].created_at == 5
    assert clock.wall() - state.leases[0].acquired_at == 0


async def test_the_offset_is_the_first_lifes(tmp_path):
    clock = FakeClock()
    await written(tmp_path / "state.db", clock, *some(clock))
    for jump_s in (500.0, -40.0, DAY_S):
        clock.jump_wall(jump_s)
        clock.pass_time(1)
        await written(tmp_path / "state.db", clock)

    state = await read(tmp_path / "state.db", clock)

    assert clock.wall() - state.sandboxes[0].created_at == 3


@pytest.mark.parametrize("boots", [("one", "two"), ("", "")])
async def test_a_machine_that_was_started_since_goes_by_its_wall_clock(tmp_path, boots):
    clock = FakeClock()
    await written(tmp_path / "state.db", clock, *some(clock), boot=boots[0])
    later = FakeClock(monotonic_s=3.0, wall_s=clock.wall() + 100)

    state = await read(tmp_path / "state.db", later, boot=boots[1])

    assert later.wall() - state.sandboxes[0].created_at == 100
    await written(tmp_path / "state.db", later, boot=boots[1])
    later.jump_wall(1000)
    assert later.wall() - (await read(tmp_path / "state.db", later, boot="two")).sandboxes[0].created_at == (100 if boots[1] else 1100)


async def test_a_drift_is_no_jump(tmp_path):
    clock = FakeClock()
    await written(tmp_path / "state.db", clock, *some(clock))
    clock.jump_wall(0.1)

    state = await read(tmp_path / "state.db", clock)

    assert clock.wall() - state.sandboxes[0].created_at == pytest.approx(0.1)


def test_this_start_of_the_machine_has_a_name():
    assert len(boot_id()) == len("01234567-89ab-cdef-0123-456789abcdef")
    assert boot_id() == boot_id()


class Machine:
    """Lives of a service over one file, on a clock that somebody sets."""

    def __init__(self, path):
        self.path = path
        self.clock = FakeClock()
        self.backend = FakeBackend()
        self.spec = PoolSpec(slots_per_sandbox=2, min_sandboxes=1, max_sandboxes=1, max_lifetime_s=600, max_lease_s=600)

    async def start(self):
        self.store = SqliteStore(self.path, self.clock, "one")
        parts = PoolDependencies(store=self.store, clock=self.clock, connect=self.backend.connect, timers=self.clock, jitter=lambda: 0.5)
        self.pools = PoolService({"default": self.spec}, {"local": self.backend}, self.store, self.clock, dependencies=parts)
        await self.pools.start()
        while not self.pools.readiness()["ready"]:  # each step of the pool waits for what it has put on record
            await self.store.flush()
            await settle()

    async def again(self):
        await self.store.flush()
        await kill_pools(self.pools)
        await self.store.close()
        await self.start()

    async def acquire(self, **fields):
        return (await self.pools.acquire(AcquireRequest(tenant="t", pool="default", **fields))).leases


@pytest.fixture
async def machine(tmp_path):
    made = Machine(tmp_path / "state.db")
    await made.start()
    yield made
    await made.pools.stop("destroy")
    await made.store.close()


@JUMPS
async def test_leases_sandboxes_and_keys_outlive_a_jump_and_a_restart(machine, jump_s):
    (lease,) = await machine.acquire(ttl_s=300, request_key="k")
    (short,) = await machine.acquire(ttl_s=70)
    machine.clock.jump_wall(jump_s)
    await machine.again()
    machine.clock.jump_wall(-2 * jump_s)
    await machine.again()

    (sandbox,) = machine.pools.sandboxes()
    assert (sandbox.sandbox_id, sandbox.state) == (lease.sandbox_id, SandboxState.READY)
    assert (await machine.acquire(ttl_s=300, request_key="k"))[0].lease_id == lease.lease_id
    assert machine.pools.lease("t", lease.lease_id).expires_at - machine.clock.wall() == pytest.approx(300, abs=1)
    await machine.clock.advance(71)
    with pytest.raises(LeaseLost, match=r"expired|over"):
        machine.pools.lease("t", short.lease_id)
    assert machine.pools.lease("t", lease.lease_id).lease_id == lease.lease_id
    await machine.clock.advance(240)
    with pytest.raises(LeaseLost):
        machine.pools.lease("t", lease.lease_id)


@JUMPS
async def test_a_sandbox_is_as_old_as_it_is_after_a_jump_and_a_restart(machine, jump_s):
    (view,) = machine.pools.sandboxes()
    await machine.clock.advance(500)
    machine.clock.jump_wall(jump_s)
    await machine.again()
    assert [sandbox.sandbox_id for sandbox in machine.pools.sandboxes()] == [view.sandbox_id]

    await machine.clock.advance(110)

    assert view.sandbox_id not in [sandbox.sandbox_id for sandbox in machine.pools.sandboxes()]
