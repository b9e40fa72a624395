"""Run-batches with scripted agents: which items are started again, and what happens when no slot can be had."""

from __future__ import annotations

import asyncio
import gc
import json
import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from sandbox_server.api.routes.run_batch import RunBatchResponse
from sandbox_server.core.execution import Result
from sandbox_server.dispatch.limits.response_budget import STREAM_BYTES
from sandbox_server.dispatch.limits.room_queue import TENANT_SHARE
from sandbox_server.dispatch.run_batch.batch import RunBatch
from sandbox_server.dispatch.run_batch.registry import RunBatches
from sandbox_server.dispatch.run_batch.result_log import Follower
from sandbox_server.dispatch.run_batch.values import Program, RunBatchRequest
from sandbox_server.pool.service import PoolService
from sandbox_server.store.memory import MemoryStore
from tests.support.service_harness import ALICE, BOB, ServiceHarness, bearer, open_service_harness

NDJSON = "application/x-ndjson"


def program(command: str, **fields: Any) -> dict[str, Any]:
    return {"tool": "bash", "args": {"command": command}, **fields}


async def wait_for_slots(harness: ServiceHarness) -> None:
    """Wait until the pool has its sandbox."""
    await harness.http.post("/v1/release", json={"lease_ids": await harness.acquire()})


def run_batches_of(harness: ServiceHarness) -> RunBatches:
    """The run-batches of the service."""
    service = harness.application._edge.service
    assert service is not None
    return service.run_batches


async def follow(harness: ServiceHarness, wanted: RunBatchRequest, *commands: str) -> tuple[RunBatch, Follower]:
    """Send a run-batch without HTTP."""
    run_batches = run_batches_of(harness)
    spool = run_batches.new_spool(wanted)
    for command in commands:
        await spool.append(Program(tool="bash", args={"command": command}))
    return await run_batches.follow(wanted, spool, run_batches.view_pool(wanted), reads_at_end=False)


async def run(harness: ServiceHarness, *items: dict[str, Any], **header: Any) -> list[dict[str, Any]]:
    answer = await harness.http.post("/v1/run-batch", json={"items": list(items), **header})
    assert answer.status_code == 200, answer.text
    results: list[dict[str, Any]] = answer.json()["results"]
    return results


async def test_an_item_that_has_certainly_not_run_is_started_again(tmp_path: Path) -> None:
    async with open_service_harness(tmp_path / "state") as harness:
        await wait_for_slots(harness)
        harness.agent.failing_archive_count = 2
        (done,) = await run(harness, program("echo ok", files={"a": "b", "c": "d"}))
        assert done["output"] == "ok\n"

        harness.agent.failing_archive_count = 3
        (failed,) = await run(harness, program("echo never", files={"a": "b", "c": "d"}))
        assert (failed["reason"], failed["fault"], failed["metadata"]["may_have_run"]) == ("backend_error", "infra", False)
        assert harness.agent.failing_archive_count == 0
        assert [command for _, command in harness.agent.ran].count("echo never") == 0


class CountingStore(MemoryStore):
    """A store that counts the results that it is given."""

    recorded_count = 0

    def record_result(self, lease_id: str, call_id: str, identity: bytes, result: Result) -> None:
        self.recorded_count += 1
        super().record_result(lease_id, call_id, identity, result)


async def test_the_result_of_a_call_is_recorded_only_if_the_request_can_be_repeated(tmp_path: Path) -> None:
    store = CountingStore()
    async with open_service_harness(tmp_path / "state", store=store) as harness:
        (done,) = await run(harness, program("echo ok"))
        assert (done["output"], store.recorded_count) == ("ok\n", 0)

        (done,) = await run(harness, program("echo ok"), request_key="again")
        assert (done["output"], store.recorded_count) == ("ok\n", 1)


async def test_a_repeat_starts_an_item_that_certainly_did_not_run(tmp_path: Path) -> None:
    async with open_service_harness(tmp_path / "state") as harness:
        await wait_for_slots(harness)
        harness.agent.failing_archive_count = 3
        items = [program("echo ok", files={"a": "b", "c": "d"}), program("exit 5")]
        failed, ended = await run(harness, *items, request_key="again", max_parallel=1)
        done, same = await run(harness, *items, request_key="again", max_parallel=1)

        assert (failed["reason"], done["output"]) == ("backend_error", "ok\n")
        assert same == ended


async def test_an_item_that_may_have_run_is_not_started_again(tmp_path: Path) -> None:
    async with open_service_harness(tmp_path / "state") as harness:
        (lost,) = await run(harness, program("refuse internal"), request_key="once")
        (again,) = await run(harness, program("refuse internal"), request_key="once")

        assert (lost["reason"], lost["fault"], lost["metadata"]["may_have_run"]) == ("backend_error", "infra", True)
        assert again == lost


@contextmanager
def files_limited_to(size_bytes: int) -> Iterator[None]:
    """Let no write of this process make a file larger, as if the disk were full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


async def test_a_program_whose_result_cannot_be_written_is_not_started_again(tmp_path: Path) -> None:
    async with open_service_harness(tmp_path / "state") as harness:
        await wait_for_slots(harness)
        items = [program("big 60000"), program("echo small")]
        with files_limited_to(32 << 10):
            lost, small = await run(harness, *items, request_key="full", max_parallel=1)
        again = await harness.http.post("/v1/run-batch", json={"items": items, "request_key": "full", "max_parallel": 1})

        assert (lost["reason"], lost["metadata"]["may_have_run"], small["output"]) == ("backend_error", True, "small\n")
        assert (again.status_code, again.json()["code"]) == (410, "lease_lost")
        assert [command for _, command in harness.agent.ran].count("big 60000") == 1


async def test_a_request_for_a_pool_that_drains_gets_its_error_and_may_be_repeated(tmp_path: Path) -> None:
    async with open_service_harness(tmp_path / "state") as harness:
        await harness.http.put("/v1/pools/going", json={"slots_per_sandbox": 1, "min_sandboxes": 1, "max_sandboxes": 1})
        (held,) = await harness.acquire(pool="going")
        await harness.http.delete("/v1/pools/going")
        body = {"pool": "going", "request_key": "going", "items": [program("true")]}
        for accept in ("application/json", NDJSON):
            answer = await harness.http.post("/v1/run-batch", json=body, headers={"accept": accept})
            assert (answer.status_code, answer.json()["code"]) == (503, "draining")
        await harness.http.post("/v1/release", json={"lease_ids": [held]})


async def test_an_error_after_the_head_of_the_response_is_a_result_of_each_item(tmp_path: Path) -> None:
    async with open_service_harness(tmp_path / "state") as harness:
        await harness.http.put("/v1/pools/going", json={"slots_per_sandbox": 1, "min_sandboxes": 1, "max_sandboxes": 1})
        (held,) = await harness.acquire(pool="going")
        batch, follower = await follow(harness, RunBatchRequest(tenant=ALICE.name, pool="going"), "true", "true")
        resources, sent = ExitStack(), asyncio.Queue[Any]()
        resources.callback(batch.detach, follower)
        response = RunBatchResponse(batch, follower, resources, NDJSON, 60.0, heartbeat_s=0.001)
        sending = asyncio.create_task(response({}, asyncio.Event().wait, sent.put))  # type: ignore[arg-type]  # a client that never hangs up
        assert (await sent.get())["status"] == 200
        await harness.http.delete("/v1/pools/going")
        await sending
        body = b"".join(sent.get_nowait().get("body", b"") for _ in range(sent.qsize()))
        results = [json.loads(line) for line in body.split(b"\n") if line]

        assert [(result["index"], result["reason"], result["metadata"]["may_have_run"]) for result in results] == [
            (0, "backend_error", False),
            (1, "backend_error", False),
        ]
        await harness.http.post("/v1/release", json={"lease_ids": [held]})


async def test_the_files_of_a_program_are_not_in_memory_while_it_runs(tmp_path: Path) -> None:
    async with open_service_harness(tmp_path / "state") as harness:
        await wait_for_slots(harness)
        running = asyncio.create_task(run(harness, *[program("live", files={"written": "x", "too": "y"})] * 2, request_key="files"))
        while [command for _, command in harness.agent.ran].count("live") < 2:
            await asyncio.sleep(0)
        held = [found.files for found in gc.get_objects() if isinstance(found, Program) and "written" in found.files]
        for index in range(2):
            harness.agent.finish(f"item-{index}")

        assert [result["reason"] for result in await running] == ["exit", "exit"]
        assert held == []


@pytest.mark.parametrize("what", ["released", "evicted"])
async def test_a_repeat_takes_note_of_what_happens_while_its_results_are_opened(tmp_path: Path, what: str) -> None:
    async with open_service_harness(tmp_path / "state") as harness:
        await wait_for_slots(harness)
        harness.agent.failing_archive_count = 3
        await run(harness, program("echo ok", files={"a": "b", "c": "d"}), request_key="opened", run_id="opened")
        run_batches = run_batches_of(harness)
        (record,) = run_batches._kept.of_run(ALICE.name, "opened")
        body = {"items": [program("echo ok", files={"a": "b", "c": "d"})], "request_key": "opened", "run_id": "opened"}
        repeat = asyncio.create_task(harness.http.post("/v1/run-batch", json=body))
        while not run_batches._opening:
            await asyncio.sleep(0)
        if what == "released":
            run_batches.cancel_run(ALICE.name, "opened")
            assert (await repeat).json()["results"][0]["reason"] == "cancelled"
        else:
            run_batches._kept.evict(record.batch_id)
            assert ((await repeat).status_code, (await repeat).json()["code"]) == (410, "lease_lost")
        assert harness.agent.ran == []


async def test_a_repeat_while_a_result_is_written_adds_no_second_one(tmp_path: Path) -> None:
    async with open_service_harness(tmp_path / "state") as harness:
        wanted = RunBatchRequest(tenant=ALICE.name, pool="default", request_key="written")
        await wait_for_slots(harness)
        batch, follower = await follow(harness, wanted, "live")
        while not harness.agent.ran:
            await asyncio.sleep(0)
        async with batch.results._append_lock:
            harness.agent.finish("item-0")
            while not batch.has_result(0):
                await asyncio.sleep(0)
            batch.detach(follower)
            same, follower = await follow(harness, wanted, "live")
        while same._running:
            await same.results.changed.wait()
        same.cancel()
        assert same is batch
        assert same._ending is not None
        await same._ending
        assert [line.index for line in batch.results.lines] == [0]
        same.detach(follower)


async def test_the_lease_of_an_item_does_not_expire_while_the_item_waits_for_room(tmp_path: Path) -> None:
    async with open_service_harness(tmp_path / "state") as harness:
        await wait_for_slots(harness)
        service = harness.application._edge.service
        assert service is not None
        pools, budget = cast(PoolService, service.pools), service.dispatcher.response_budget
        full = [await budget.reserve_stream(ALICE.name) for _ in range(int(budget.limits.memory_bytes * TENANT_SHARE) // STREAM_BYTES)]
        waiting = asyncio.create_task(run(harness, program("echo ok"), run_id="waits"))
        while not (leases := (await harness.http.get("/v1/leases", params={"run_id": "waits"})).json()["leases"]):
            await asyncio.sleep(0)
        pool = pools._directory.pool_of(leases[0]["lease_id"])
        assert pool is not None
        while not pool.book.lease_index.runs_call(leases[0]["lease_id"]):
            await asyncio.sleep(0)
        assert harness.agent.ran == []
        for reservation in full:
            reservation.release()
        assert (await waiting)[0]["output"] == "ok\n"


async def test_another_tenant_shares_neither_keys_nor_runs(tmp_path: Path) -> None:
    async with open_service_harness(tmp_path / "state") as harness:
        mine = await run(harness, program("echo mine"), request_key="key", run_id="run")
        theirs = await harness.http.post("/v1/run-batch", json={"items": [program("echo theirs")], "request_key": "key"}, headers=bearer(BOB))
        assert theirs.json()["results"][0]["output"] == "theirs\n"
        await harness.http.post("/v1/release", json={"run_id": "run"}, headers=bearer(BOB))

        assert await run(harness, program("echo mine"), request_key="key", run_id="run") == mine


async def test_items_wait_while_every_slot_is_held(tmp_path: Path) -> None:
    async with open_service_harness(tmp_path / "state") as harness:
        held = await harness.acquire(4)
        waiting = asyncio.create_task(run(harness, program("echo late")))
        while (await harness.http.get("/v1/pools/default")).json()["queue"] == 0:
            await asyncio.sleep(0)
        await harness.http.post("/v1/release", json={"lease_ids": held})

        assert (await waiting)[0]["output"] == "late\n"


async def test_a_whole_request_with_the_same_items_is_the_same_in_both_forms(tmp_path: Path) -> None:
    async with open_service_harness(tmp_path / "state") as harness:
        items = [program("echo a", files={"x": "y"}), program("exit 2")]
        as_object = await run(harness, *items, request_key="forms")
        lines = "\n".join(json.dumps(line) for line in ({"request_key": "forms"}, *items))
        answer = await harness.http.post("/v1/run-batch", content=lines, headers={"content-type": NDJSON})

        assert answer.json()["results"] == as_object
        assert httpx.codes.is_success(answer.status_code)
