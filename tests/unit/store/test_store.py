"""What every store promises: the newest record of an object is kept, and a deletion removes everything that belongs to the object."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from sandbox_server.core.execution import Fault, Reason, Result
from sandbox_server.core.types import AcquireRequest, Handle, Lease, LeaseState, LocalSpec, NomadSpec, PoolSpec, SandboxState, SlotRef, SlotState
from sandbox_server.store.base import CacheRecord, Deletion, KeyRecord, PoolRecord, RecordedResult, SandboxRecord, SlotRecord
from sandbox_server.store.codec import decode, encode
from sandbox_server.store.memory import MemoryStore
from sandbox_server.store.sqlite.store import SqliteStore

LEASE = Lease(
    lease_id="l-1", epoch=1, pool="p", sandbox_id="s-1", slot_id="0", tenant="t", trajectory_id=None, run_id=None, state=LeaseState.HELD,
    ttl_s=60, acquired_at=0, expires_at=60, workspace="/workspace", isolation="bwrap", allow_network=True,
)  # fmt: skip
RESULT = Result(call_id="c", lease_id="l-1", reason=Reason.EXIT, fault=Fault.NONE)
SANDBOX = SandboxRecord(sandbox_id="s-1", pool="p", state=SandboxState.READY, handle=None, created_at=0)
SLOT = SlotRecord(ref=SlotRef(sandbox_id="s-1", slot_id="0"), pool="p", state=SlotState.LEASED, epoch=1, workspace="/workspace", isolation="bwrap")


@pytest.fixture(params=["memory", "sqlite"])
async def make_store(request, tmp_path):
    """Creates the store. A second call opens a durable store again, and returns the same memory store."""
    stores = []

    async def make():
        if request.param == "memory":
            return stores[0] if stores else stores.append(MemoryStore()) or stores[0]
        if stores:
            await stores.pop().close()
        stores.append(SqliteStore(tmp_path / "state.db"))
        return stores[0]

    yield make
    await stores[0].close()


async def test_the_newest_record_of_an_object_is_kept(make_store):
    store = await make_store()
    for record in (SANDBOX, SLOT, LEASE, replace(SLOT, epoch=2), replace(LEASE, expires_at=90)):
        store.put(record)
    await store.flush()

    state = (await make_store()).load()
    assert (state.sandboxes, state.slots, state.leases) == ((SANDBOX,), (replace(SLOT, epoch=2),), (replace(LEASE, expires_at=90),))


async def test_a_sandbox_that_is_gone_takes_its_slots_along(make_store):
    store = await make_store()
    store.put(SANDBOX)
    store.put(SLOT)
    store = await make_store()
    store.put(replace(SANDBOX, state=SandboxState.GONE))

    state = (await make_store()).load()
    assert (state.sandboxes, state.slots) == ((), ())


async def test_the_first_result_of_a_call_stays(make_store):
    store = await make_store()
    store.put(LEASE)
    store.record_result("l-1", "c", b"id", RESULT)
    store.record_result("l-1", "c", b"other", replace(RESULT, exit_code=1))

    store = await make_store()
    store.record_result("l-1", "c", b"other", replace(RESULT, exit_code=2))
    recorded_result = store.find_result("l-1", "c")
    assert recorded_result is not None
    assert (recorded_result.identity, recorded_result.result) == (b"id", RESULT)
    assert (store.find_result("l-1", "d"), store.find_result("l-2", "c"), store.result_count("l-1")) == (None, None, 1)


@pytest.mark.parametrize(("state", "kept"), [(LeaseState.RELEASED, False), (LeaseState.EXPIRED, False), (LeaseState.SANDBOX_LOST, True)])
async def test_results_are_kept_as_long_as_a_client_may_ask_for_them(state, kept, make_store):
    store = await make_store()
    store.put(LEASE)
    store.record_result("l-1", "c", b"id", RESULT)
    store = await make_store()
    store.put(replace(LEASE, state=state))
    store.record_result("l-1", "late", b"id", RESULT)

    assert (store.find_result("l-1", "c") is not None, store.find_result("l-1", "late") is not None) == (kept, kept)
    store = await make_store()
    assert (store.find_result("l-1", "c") is not None, store.result_count("l-1")) == (kept, 2 * kept)
    store.put(Deletion(lease_id="l-1"))
    store = await make_store()
    assert (store.load().leases, store.find_result("l-1", "c")) == ((), None)


async def test_a_request_key_can_be_deleted(make_store):
    store = await make_store()
    key = KeyRecord(tenant="t", key="k", request=AcquireRequest(tenant="t", pool="p"), lease_ids=("l-1",), granted_at=0)
    store.put(key)
    store = await make_store()
    assert store.load().keys == (key,)
    store.put(Deletion(key=("t", "k")))

    assert (await make_store()).load().keys == ()


async def test_a_pool_is_kept_until_it_is_deleted(make_store):
    store = await make_store()
    spec = PoolSpec(env_vars={"A": "b"}, local=LocalSpec(expose=("/opt", "/srv")), cpu=1.5, delete_after_idle_s=5)
    pool = PoolRecord(name="mine", spec=spec, origin="api", closing=True)
    store.put(pool)
    store = await make_store()
    assert store.load().pools == (pool,)
    store.put(Deletion(pool="mine"))

    assert (await make_store()).load().pools == ()


async def test_every_field_comes_back_as_it_was(make_store):
    store = await make_store()
    data = {"pid": 7, "deep": {"a": [1]}}
    handle = Handle(backend="local", pool="p", owner="o", sandbox_id="s-1", address="tls:[::1]:7", token="secret", certificate="-----BEGIN", data=data)
    caches = (CacheRecord(key="r-1", tenant="t", run_id=None, lease_id="l-1"),)
    sandbox = replace(SANDBOX, handle=handle, boot="b", spec=PoolSpec(nomad=NomadSpec(datacenters=("a", "b"))), ready_at=1.5, caches=caches, why="ö")
    slot = replace(SLOT, keep=("t", None))
    lease = replace(LEASE, labels={"ü": "\x00"}, ended_at=1.25, end_detail="x" * 5000, cache="rw")
    key = KeyRecord(tenant="t", key="\x00'\"", request=AcquireRequest(tenant="t", pool="p", trajectory_ids=("a", None)), lease_ids=("l-1",), granted_at=1)
    result = replace(RESULT, output=b"", stdout=b"\x00\xff", stderr=b"", metadata={"evidence": {"n": 1 << 70}}, tool_ok=True)
    for record in (sandbox, slot, lease, key):
        store.put(record)
    store.record_result("l-1", "c", b"\x00id", result)

    store = await make_store()

    state = store.load()
    assert (state.sandboxes, state.slots, state.leases, state.keys) == ((sandbox,), (slot,), (lease,), (key,))
    assert store.find_result("l-1", "c") == RecordedResult(identity=b"\x00id", result=result)


def test_a_sandbox_of_an_older_version_has_no_certificate():
    handle = Handle(backend="local", pool="p", owner="o", sandbox_id="s-1", address="unix:/x", token="secret", data={"pid": 7})
    document = json.loads(encode(replace(SANDBOX, handle=handle)))
    del document["handle"]["certificate"]

    assert decode("sandbox", json.dumps(document)).handle == handle


async def test_text_that_is_not_unicode_can_be_recorded(make_store):
    store = await make_store()
    store.put(replace(LEASE, end_detail="no such file: \udcff"))
    store.put(replace(LEASE, lease_id="l-2"))
    await store.flush()

    assert {lease.lease_id for lease in (await make_store()).load().leases} == {"l-1", "l-2"}
