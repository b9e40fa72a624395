"""The three verbs, as a client sees them."""

from __future__ import annotations

import asyncio
import base64
import json

from tests.support.service_harness import BOB, ServiceHarness, bash, bearer

LEASE_FIELDS = {
    "lease_id", "epoch", "pool", "sandbox_id", "slot_id", "trajectory_id", "run_id", "tenant", "state", "acquired_at", "expires_at",
    "sandbox_ends_at", "workspace", "workspace_kept", "isolation", "allow_network", "cache", "labels",
}  # fmt: skip
RESULT_FIELDS = {
    "call_id", "lease_id", "success", "exit_code", "reason", "fault", "output", "error", "output_bytes", "truncated", "encoding",
    "started_at", "duration_s", "cpu_s", "max_rss_bytes", "metadata",
}  # fmt: skip


async def test_an_empty_acquire_gives_one_slot_of_the_default_pool(harness: ServiceHarness) -> None:
    answer = await harness.http.post("/v1/acquire", json={})

    document = answer.json()
    (lease,) = document["leases"]
    assert answer.status_code == 200
    assert document["waited_s"] >= 0
    assert set(lease) == LEASE_FIELDS
    assert (lease["pool"], lease["tenant"], lease["state"], lease["isolation"]) == ("default", "alice", "held", "bwrap")


async def test_a_gang_carries_its_trajectories_and_its_labels(harness: ServiceHarness) -> None:
    fields = {"count": 3, "trajectory_ids": ["t-1", "t-2", "t-3"], "run_id": "r", "labels": {"model": "m"}, "ttl_s": 60}

    leases = (await harness.http.post("/v1/acquire", json=fields)).json()["leases"]

    assert [lease["trajectory_id"] for lease in leases] == ["t-1", "t-2", "t-3"]
    assert {lease["run_id"] for lease in leases} == {"r"}
    assert [lease["labels"] for lease in leases] == [{"model": "m"}] * 3
    assert len({lease["slot_id"] for lease in leases}) == 3


async def test_a_request_key_gives_the_same_leases_again(harness: ServiceHarness) -> None:
    first = await harness.acquire(2, request_key="k")

    assert await harness.acquire(2, request_key="k") == first


async def test_calls_of_one_lease_run_in_order_and_a_failed_one_does_not_stop_the_next(harness: ServiceHarness) -> None:
    (lease_id,) = await harness.acquire()

    results = await harness.batch(bash(lease_id, "exit 3"), bash(lease_id, "echo next"))

    assert [set(result) for result in results] == [RESULT_FIELDS] * 2
    assert [(result["success"], result["exit_code"], result["output"], result["reason"]) for result in results] == [
        (False, 3, "", "exit"),
        (True, 0, "next\n", "exit"),
    ]
    assert [command for _, command in harness.agent.ran] == ["exit 3", "echo next"]


async def test_results_come_in_the_order_of_the_calls_over_many_leases(harness: ServiceHarness) -> None:
    leases = await harness.acquire(4)

    results = await harness.batch(*(bash(leases[n % 4], f"echo {n}", call_id=f"c-{n}") for n in range(40)))

    assert [(result["call_id"], result["output"]) for result in results] == [(f"c-{n}", f"{n}\n") for n in range(40)]


async def test_the_same_call_id_runs_once(harness: ServiceHarness) -> None:
    (lease_id,) = await harness.acquire()

    results = [*await harness.batch(bash(lease_id, "echo a", call_id="c")), *await harness.batch(bash(lease_id, "echo a", call_id="c"))]

    assert results[0] == results[1]
    assert harness.agent.ran == [("c", "echo a")]


async def test_another_command_under_the_same_call_id_is_a_conflict(harness: ServiceHarness) -> None:
    (lease_id,) = await harness.acquire()
    await harness.batch(bash(lease_id, "echo a", call_id="c"))

    (result,) = await harness.batch(bash(lease_id, "echo b", call_id="c"))

    assert (result["reason"], result["fault"], result["success"]) == ("call_conflict", "infra", False)


async def test_bytes_come_as_replacement_characters_or_exactly(harness: ServiceHarness) -> None:
    (lease_id,) = await harness.acquire()

    text, exact = await harness.batch(bash(lease_id, "bytes"), bash(lease_id, "bytes", encoding="base64"))

    assert (text["output"], text["encoding"]) == ("\ufffd\x00a", "utf-8")
    assert (base64.b64decode(exact["output"]), exact["encoding"]) == (b"\xff\x00a", "base64")


async def test_separate_streams_are_in_the_metadata(harness: ServiceHarness) -> None:
    (lease_id,) = await harness.acquire()

    (result,) = await harness.batch(bash(lease_id, "both", separate_streams=True))

    assert (result["output"], result["metadata"]["stdout"], result["metadata"]["stderr"]) == ("", "out", "er")


async def test_lines_come_in_the_order_of_finishing(harness: ServiceHarness) -> None:
    slow, quick = await harness.acquire(2)
    calls = [bash(slow, "hang", call_id="slow"), bash(quick, "echo hi", call_id="quick")]
    batch = asyncio.create_task(harness.http.post("/v1/exec-batch", json={"calls": calls}, headers={"Accept": "application/x-ndjson"}))
    while len(harness.agent.ran) < 2:
        await asyncio.sleep(0)
    cancelled = await harness.http.post("/v1/cancel", json={"lease_id": slow, "call_id": "slow"})

    answer = await batch

    assert cancelled.json()["reason"] == "cancelled"
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert [(line["call_id"], line["reason"]) for line in map(json.loads, answer.text.splitlines())] == [("quick", "exit"), ("slow", "cancelled")]


async def test_release_answers_with_what_ended_and_what_is_unknown(harness: ServiceHarness) -> None:
    (lease_id,) = await harness.acquire()

    first = await harness.http.post("/v1/release", json={"lease_ids": [lease_id, "nobodys"]})
    again = await harness.http.post("/v1/release", json={"lease_ids": [lease_id]})

    assert first.json() == {"released": [lease_id], "unknown": ["nobodys"]}
    assert again.json() == {"released": [lease_id], "unknown": []}


async def test_releasing_a_run_releases_all_of_it(harness: ServiceHarness) -> None:
    of_run = await harness.acquire(3, run_id="r")
    (other,) = await harness.acquire()

    answer = await harness.http.post("/v1/release", json={"run_id": "r"})

    assert sorted(answer.json()["released"]) == sorted(of_run)
    assert [lease["lease_id"] for lease in (await harness.http.get("/v1/leases")).json()["leases"]] == [other]


async def test_releasing_a_request_key_releases_what_its_acquire_has_and_refuses_what_comes_later(harness: ServiceHarness) -> None:
    gang = await harness.acquire(2, request_key="k")
    (other,) = await harness.acquire(1, request_key="other")

    answers = [(await harness.http.post("/v1/release", json={"request_key": key})).json() for key in ("k", "k", "later")]
    refused = [await harness.http.post("/v1/acquire", json={"count": 2, "request_key": key}) for key in ("k", "later")]

    assert answers == [{"released": gang, "unknown": []}] * 2 + [{"released": [], "unknown": []}]
    assert [(answer.status_code, answer.json()["code"]) for answer in refused] == [(410, "lease_lost")] * 2
    assert [lease["lease_id"] for lease in (await harness.http.get("/v1/leases")).json()["leases"]] == [other]
    assert (await harness.http.post("/v1/release", json={"request_key": "other"}, headers=bearer(BOB))).json() == {"released": [], "unknown": []}
    assert (await harness.http.get(f"/v1/leases/{other}")).json()["state"] == "held"


async def test_release_ends_a_running_call_as_cancelled(harness: ServiceHarness) -> None:
    (lease_id,) = await harness.acquire()
    running = asyncio.create_task(harness.batch(bash(lease_id, "hang")))
    while not harness.agent.ran:
        await asyncio.sleep(0)

    await harness.http.post("/v1/release", json={"lease_ids": [lease_id]})

    (result,) = await running
    assert (result["reason"], result["fault"]) == ("cancelled", "none")


async def test_another_tenants_lease_does_not_exist(harness: ServiceHarness) -> None:
    (lease_id,) = await harness.acquire()
    bob = bearer(BOB)

    seen = await harness.http.get(f"/v1/leases/{lease_id}", headers=bob)
    released = await harness.http.post("/v1/release", json={"lease_ids": [lease_id]}, headers=bob)
    (result,) = (await harness.http.post("/v1/exec-batch", json={"calls": [bash(lease_id, "true")]}, headers=bob)).json()["results"]

    assert (seen.status_code, seen.json()["code"]) == (404, "lease_not_found")
    assert released.json() == {"released": [], "unknown": [lease_id]}
    assert (result["reason"], result["fault"]) == ("lease_lost", "ambiguous")
