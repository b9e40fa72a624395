"""SIGKILL for the service, and another one after it: real agents, a real state file."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import aclosing
from pathlib import Path

import pytest

from sandbox_server.agent import wire
from sandbox_server.api.call_events import call_events
from sandbox_server.api.contract.render import result_document
from sandbox_server.backends.processes import start_time
from sandbox_server.core.clock import SystemClock
from sandbox_server.core.execution import Reason
from sandbox_server.core.types import AcquireRequest
from sandbox_server.dispatch.call_admission import CallLimits
from sandbox_server.dispatch.call_queries import CallQueries
from sandbox_server.dispatch.call_tracker import CallTracker
from sandbox_server.dispatch.dispatcher import Dispatcher
from sandbox_server.dispatch.limits.concurrency import ConcurrencyLimiter
from sandbox_server.telemetry import Telemetry
from tests.integration.pool.pools_process import call, make_pools

ROOT = Path(__file__).parents[3]


@pytest.fixture
def live_once(tmp_path):
    """Runs a first life up to its death: `live_once(command)` returns what it said. The command goes on."""

    def live(command):
        argv = [sys.executable, "-m", "tests.integration.pool.pools_process", str(tmp_path), command]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, cwd=ROOT)
        said = json.loads(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        return said

    return live


@pytest.fixture
async def again(tmp_path):
    """Starts the next life."""
    services = []

    async def start():
        services.append(make_pools(tmp_path))
        await services[-1].start()
        return services[-1]

    yield start
    for pools in services[-1:]:
        await pools.stop("destroy")
        await pools._store.close()
        assert await next(iter(pools._catalog.backends.values())).list_owned("me") == []


async def until(happens):
    async with asyncio.timeout(20):
        while not happens():
            await asyncio.sleep(0.01)


async def result_of(location, call_id):
    async with location.agent.link.stream({"op": "attach", "slot": location.slot_id, "epoch": location.epoch, "call_id": call_id, "offset": 0}) as stream:
        stream.end()
        async for event in stream:
            if isinstance(event, wire.Item):
                return event.meta, event.body
    raise AssertionError("the call has no result")


def agents(tmp_path):
    handles = [json.loads(path.read_text()) for path in tmp_path.glob("sandboxes/*/handle.json")]
    return [(handle["data"]["pid"], handle["data"]["started"]) for handle in handles]


async def test_a_command_goes_on_over_the_death_of_the_service_and_its_result_is_there(live_once, again, tmp_path):
    said = live_once("echo began; until test -e go; do sleep 0.05; done; echo $$ ended")
    ((pid, started),) = agents(tmp_path)
    assert start_time(pid) == started, "the sandbox survived"

    pools = await again()
    await until(lambda: pools.readiness()["ready"])
    lease = pools.lease("t", said["lease_id"])
    location = pools.locate_slot("t", lease.lease_id)
    assert await location.agent.link.request({"op": "call_status", "slot": location.slot_id, "epoch": location.epoch, "call_id": "c"})
    async with location.agent.link.stream({"op": "calls", "slot": location.slot_id, "epoch": location.epoch}) as stream:
        stream.send_item(call("go", "touch go"))
        stream.end()
        async for _ in stream:
            pass
    meta, body = await result_of(location, "c")

    assert (meta["reason"], meta["exit_code"]) == ("exit", 0)
    assert body.startswith(b"began\n")
    assert body.endswith(b"ended\n")
    assert agents(tmp_path) == [(pid, started)]
    (other,) = (await pools.acquire(AcquireRequest(tenant="t", pool="default"))).leases
    assert (other.sandbox_id, other.epoch) == (said["sandbox_id"], 2)


async def test_a_call_of_an_earlier_life_is_told_of_in_the_encoding_that_it_asked_for(live_once, again):
    said = live_once("printf '\\377\\0'; sleep 100")
    lease_id = said["lease_id"]
    pools = await again()
    await until(lambda: pools.readiness()["ready"])
    dispatcher = Dispatcher(pools, pools._store, SystemClock(), Telemetry(), CallLimits(), CallTracker(()), ConcurrencyLimiter(lambda tenant: None))
    records = CallQueries(pools, pools._store, dispatcher.call_tracker, SystemClock(), dispatcher.outputs)

    running = await records.call_status("t", lease_id, "c")
    async with aclosing(call_events(records, "t", lease_id, "c", 0)) as found:
        first = await anext(found)
        cancelled = await dispatcher.cancel_call("t", lease_id, "c")
        last = b"".join([piece async for piece in found])
    done = await records.call_status("t", lease_id, "c")

    assert (running.output_bytes, running.encoding) == (2, "base64")
    assert b'"data":"/wA=","encoding":"base64"' in first
    assert b'"output":"/wA="' in last
    assert result_document(cancelled) == result_document(done)
    assert (done.reason, result_document(done)["output"], done.encoding) == (Reason.CANCELLED, "/wA=", "base64")


async def test_an_agent_that_died_with_the_service_is_replaced(live_once, again, tmp_path):
    said = live_once("echo began; sleep 100")
    ((pid, started),) = agents(tmp_path)
    os.kill(pid, signal.SIGKILL)
    await until(lambda: start_time(pid) != started)

    pools = await again()
    (lease,) = (await pools.acquire(AcquireRequest(tenant="t", pool="default", wait_s=20))).leases

    assert lease.sandbox_id != said["sandbox_id"]
    assert len(pools.sandboxes()) == 1
    with pytest.raises(Exception, match="its agent has ended"):
        pools.lease("t", said["lease_id"])


async def test_a_sandbox_that_no_record_tells_of_is_destroyed(live_once, again, tmp_path):
    live_once("echo began; sleep 100")
    ((pid, started),) = agents(tmp_path)
    for path in tmp_path.glob("state.db*"):
        path.unlink()

    pools = await again()

    assert start_time(pid) != started
    assert pools.leases("t") == ([], None)
