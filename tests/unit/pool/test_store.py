"""The store that forgets: the newest record stands, and what is over is forgotten with all that hangs on it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sandbox_server.core.execution import Fault, Reason, Result
from sandbox_server.core.types import AcquireRequest, Lease, LeaseState, SandboxState, SlotRef, SlotState
from sandbox_server.pool.store import Forgotten, KeyRecord, MemoryStore, SandboxRecord, SlotRecord

LEASE = Lease(
    lease_id="l-1", epoch=1, pool="p", sandbox_id="s-1", slot_id="0", tenant="t", trajectory_id=None, run_id=None, state=LeaseState.HELD,
    ttl_s=60, acquired_at=0, expires_at=60, workspace="/workspace", isolation="bwrap", allow_network=True,
)  # fmt: skip
RESULT = Result(call_id="c", lease_id="l-1", reason=Reason.EXIT, fault=Fault.NONE)
SANDBOX = SandboxRecord(sandbox_id="s-1", pool="p", state=SandboxState.READY, handle=None, created_at=0)
SLOT = SlotRecord(ref=SlotRef(sandbox_id="s-1", slot_id="0"), pool="p", state=SlotState.LEASED, epoch=1, workspace="/workspace", isolation="bwrap")


async def test_the_newest_record_of_a_thing_stands():
    store = MemoryStore()
    for record in (SANDBOX, SLOT, LEASE, replace(SLOT, epoch=2), replace(LEASE, expires_at=90)):
        store.put(record)
    await store.flush()

    state = store.load()
    assert (state.sandboxes, state.slots, state.leases) == ((SANDBOX,), (replace(SLOT, epoch=2),), (replace(LEASE, expires_at=90),))
    assert not store.durable


def test_a_sandbox_that_is_gone_takes_its_slots_along():
    store = MemoryStore()
    store.put(SANDBOX)
    store.put(SLOT)
    store.put(replace(SANDBOX, state=SandboxState.GONE))

    assert (store.load().sandboxes, store.load().slots) == ((), ())


def test_the_first_verdict_stays():
    store = MemoryStore()
    store.put(LEASE)
    store.record_verdict("l-1", "c", b"id", RESULT)
    store.record_verdict("l-1", "c", b"other", replace(RESULT, exit_code=1))

    verdict = store.verdict("l-1", "c")
    assert verdict is not None
    assert (verdict.identity, verdict.result) == (b"id", RESULT)
    assert (store.verdict("l-1", "d"), store.verdict("l-2", "c"), store.verdict_count("l-1")) == (None, None, 1)


@pytest.mark.parametrize(("state", "kept"), [(LeaseState.RELEASED, False), (LeaseState.EXPIRED, False), (LeaseState.SANDBOX_LOST, True)])
def test_verdicts_live_as_long_as_somebody_is_told(state, kept):
    store = MemoryStore()
    store.put(LEASE)
    store.record_verdict("l-1", "c", b"id", RESULT)
    store.put(replace(LEASE, state=state))
    store.record_verdict("l-1", "late", b"id", RESULT)

    assert (store.verdict("l-1", "c") is not None, store.verdict("l-1", "late") is not None) == (kept, kept)
    store.put(Forgotten(lease_id="l-1"))
    assert (store.load().leases, store.verdict("l-1", "c")) == ((), None)


def test_a_key_can_be_forgotten():
    store = MemoryStore()
    key = KeyRecord(tenant="t", key="k", request=AcquireRequest(tenant="t", pool="p"), lease_ids=("l-1",), granted_at=0)
    store.put(key)
    assert store.load().keys == (key,)
    store.put(Forgotten(key=("t", "k")))

    assert store.load().keys == ()
