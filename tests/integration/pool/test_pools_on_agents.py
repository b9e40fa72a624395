"""The pools on the local backend with real agents: from a cold start to nothing left."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
import pytest_asyncio

from sandbox_server.agent import wire
from sandbox_server.backends.local import make_local_backend
from sandbox_server.backends.processes import start_time
from sandbox_server.core.clock import SystemClock
from sandbox_server.core.errors import SandboxLost
from sandbox_server.core.types import AcquireRequest, PoolSpec
from sandbox_server.pool.service import PoolService
from sandbox_server.store.memory import MemoryStore
from tests.support.crash import kill_pools


class Place:
    """Running pools, and what of them can be seen from outside."""

    def __init__(self, folder, **spec):
        self.backend = make_local_backend(folder, "me")
        spec = {"slots_per_sandbox": 2, "min_sandboxes": 1, "max_sandboxes": 1, "allow_none": True} | spec
        self.pools = PoolService({"default": PoolSpec(**spec)}, {"local": self.backend}, MemoryStore(), SystemClock(), owner="me")

    async def acquire(self, **fields):
        fields = {"trajectory_ids": (None,) * fields.get("count", 1)} | fields
        return (await self.pools.acquire(AcquireRequest(tenant="t", pool="default", **fields))).leases

    async def run(self, lease, command):
        location = self.pools.locate_slot("t", lease.lease_id)
        call = {
            "call_id": "c", "tool": "bash", "args": {"command": command}, "timeout_s": 20, "no_output_timeout_s": None,
            "output_limit_bytes": 10_000, "separate_streams": False,
        }  # fmt: skip
        async with location.agent.link.stream({"op": "calls", "slot": location.slot_id, "epoch": location.epoch}) as stream:
            stream.send_item(call)
            stream.end()
            async for event in stream:
                if isinstance(event, wire.Item):
                    return event.body.decode()
        raise AssertionError("the call has no result")

    async def agents(self):
        return [(handle.data["pid"], handle.data["started"]) for handle in await self.backend.list_owned("me")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_place(tmp_path_factory):
    """A place of one slot for the tests that leave it whole. They run in its event loop."""
    place = Place(tmp_path_factory.mktemp("place"), slots_per_sandbox=1)
    await place.pools.start()
    yield place
    await place.pools.stop()


shares_place = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
async def make_place(tmp_path):
    places = []

    async def make(**spec):
        place = Place(tmp_path, **spec)
        places.append(place)
        await place.pools.start()
        return place

    yield make
    for place in places:
        await place.pools.stop()


@shares_place
async def test_a_slot_is_clean_for_its_next_holder_and_the_old_epoch_is_refused(shared_place):
    place = shared_place
    (first,) = await place.acquire()
    await place.run(first, "echo secret > note; sleep 1000 & disown")
    old = place.pools.locate_slot("t", first.lease_id)
    place.pools.release("t", [first.lease_id])

    (second,) = await place.acquire()

    assert (second.slot, second.epoch) == (first.slot, first.epoch + 1)
    assert await place.run(second, "ls -A; pgrep sleep; true") == ""
    with pytest.raises(Exception, match="stale_epoch"):
        await old.agent.link.request({"op": "call_status", "slot": old.slot_id, "epoch": old.epoch, "call_id": "c"})
    place.pools.release("t", [second.lease_id])


@shares_place
async def test_a_kept_workspace_keeps_its_files_and_none_of_its_processes(shared_place):
    place = shared_place
    (first,) = await place.acquire(run_id="r")
    await place.run(first, "echo mine > note; sleep 1000 & disown")
    place.pools.release("t", [first.lease_id], None, False)

    (second,) = await place.acquire(run_id="r")

    assert second.workspace_kept
    assert await place.run(second, "cat note; pgrep sleep; true") == "mine\n"
    place.pools.release("t", [second.lease_id])


async def test_a_killed_agent_is_noticed_within_five_seconds_and_replaced(make_place):
    place = await make_place()
    (lease,) = await place.acquire()
    ((pid, started),) = await place.agents()

    os.kill(pid, signal.SIGKILL)
    link = place.pools.locate_slot("t", lease.lease_id).agent.link
    async with asyncio.timeout(5):
        await asyncio.wait([link.closed])
        recorded_result = await place.pools.wait_for_reconnect_or_loss(lease.lease_id, 5)
    (again,) = await place.acquire(wait_s=50)

    assert isinstance(recorded_result, SandboxLost)
    assert again.sandbox_id != lease.sandbox_id
    assert start_time(pid) != started


@shares_place
async def test_narrowed_before_the_grant_a_slot_has_no_network(shared_place):
    place = shared_place
    if "none" not in place.pools.view("default").capabilities["network"]:
        pytest.skip("no mode here can take the network away")

    (lease,) = await place.acquire(allow_network=False)

    assert await place.run(lease, "ls /sys/class/net 2>/dev/null; tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '") in ("lo\n", "lo\nlo\n")
    place.pools.release("t", [lease.lease_id])


async def test_stopping_leaves_no_process_and_no_folder(make_place):
    place = await make_place(slots_per_sandbox=2, min_sandboxes=2, max_sandboxes=2)
    (lease, *_) = await place.acquire(count=4)
    await place.run(lease, "sleep 1000 & disown")
    agents = await place.agents()

    await place.pools.stop()

    assert [start_time(pid) == started for pid, started in agents] == [False, False]
    assert await place.backend.list_owned("me") == []


async def test_what_a_killed_service_left_is_swept_at_the_next_start(make_place):
    place = await make_place()
    await place.acquire()
    (left,) = await place.agents()
    await kill_pools(place.pools)

    other = await make_place()
    await other.acquire()

    agents = await other.agents()
    assert left not in agents
    assert start_time(left[0]) != left[1]
