"""What is around the three verbs."""

from __future__ import annotations

import asyncio

import pytest

from tests.contract.contract import CONTRACT
from tests.support.service_harness import BOB, ServiceHarness, bearer


async def test_renew_puts_the_end_off_and_names_what_is_lost(harness: ServiceHarness) -> None:
    (lease_id,) = await harness.acquire(ttl_s=10)
    before = (await harness.http.get(f"/v1/leases/{lease_id}")).json()["expires_at"]

    answer = (await harness.http.post("/v1/renew", json={"lease_ids": [lease_id, "nobodys"], "ttl_s": 500})).json()

    assert answer["leases"][0]["expires_at"] > before + 400
    assert [(lost["lease_id"], lost["code"]) for lost in answer["lost"]] == [("nobodys", "lease_not_found")]


async def test_renew_never_shortens(harness: ServiceHarness) -> None:
    (lease_id,) = await harness.acquire(ttl_s=600)
    before = (await harness.http.get(f"/v1/leases/{lease_id}")).json()["expires_at"]

    (lease,) = (await harness.http.post("/v1/renew", json={"lease_ids": [lease_id], "ttl_s": 1})).json()["leases"]

    assert lease["expires_at"] == pytest.approx(before, abs=0.01)


async def test_leases_come_in_pages(harness: ServiceHarness) -> None:
    mine = await harness.acquire(4)

    seen: list[str] = []
    cursor: dict[str, str] = {}
    while True:
        page = (await harness.http.get("/v1/leases", params={"limit": "3", **cursor})).json()
        seen += [lease["lease_id"] for lease in page["leases"]]
        if "next_cursor" not in page:
            break
        cursor = {"cursor": page["next_cursor"]}

    assert sorted(seen) == sorted(mine)


async def test_leases_are_found_by_run_and_trajectory(harness: ServiceHarness) -> None:
    (wanted,) = await harness.acquire(run_id="r", trajectory_id="t")
    await harness.acquire(run_id="r")
    await harness.acquire(trajectory_id="t")

    found = (await harness.http.get("/v1/leases", params={"run_id": "r", "trajectory_id": "t"})).json()["leases"]

    assert [lease["lease_id"] for lease in found] == [wanted]


async def test_single_exec_takes_the_short_form_and_all_fields(harness: ServiceHarness) -> None:
    (lease_id,) = await harness.acquire()
    path = f"/v1/leases/{lease_id}/exec"

    short = (await harness.http.post(path, json={"command": "echo hi"})).json()
    full = (await harness.http.post(path, json={"lease_id": lease_id, "tool": "bash", "args": {"command": "exit 7"}, "call_id": "mine", "timeout_s": 5})).json()

    assert (short["output"], short["success"]) == ("hi\n", True)
    assert (full["exit_code"], full["call_id"]) == (7, "mine")


async def test_cancel_answers_with_the_calls_result(harness: ServiceHarness) -> None:
    (lease_id,) = await harness.acquire()
    running = asyncio.create_task(harness.http.post(f"/v1/leases/{lease_id}/exec", json={"command": "hang", "call_id": "c"}))
    while not harness.agent.ran:
        await asyncio.sleep(0)

    cancelled = (await harness.http.post("/v1/cancel", json={"lease_id": lease_id, "call_id": "c"})).json()

    assert (cancelled["reason"], cancelled["fault"], cancelled["call_id"]) == ("cancelled", "none", "c")
    assert (await running).json() == cancelled


async def test_cancelling_a_call_that_has_ended_answers_with_its_result(harness: ServiceHarness) -> None:
    (lease_id,) = await harness.acquire()
    ended = (await harness.http.post(f"/v1/leases/{lease_id}/exec", json={"command": "exit 3", "call_id": "c"})).json()

    assert (await harness.http.post("/v1/cancel", json={"lease_id": lease_id, "call_id": "c"})).json() == ended


async def test_pools_show_their_spec_and_only_admins_see_the_variables(harness: ServiceHarness) -> None:
    admin = (await harness.http.get("/v1/pools/default")).json()
    user = (await harness.http.get("/v1/pools", headers=bearer(BOB))).json()["pools"][0]

    assert set(admin) == set(CONTRACT["shapes"]["pool"])
    assert admin["spec"]["env_vars"] == {"KEY": "value"}
    assert "env_vars" not in user["spec"]
    assert {**admin["spec"], "env_vars": None} == {**user["spec"], "env_vars": None}


async def test_a_held_slot_shows_in_the_pool(harness: ServiceHarness) -> None:
    await harness.acquire(3)

    slots = (await harness.http.get("/v1/pools/default")).json()["slots"]

    assert slots == {"ready": 1, "leased": 3, "resetting": 0, "kept": 0, "quarantined": 0}


async def test_health_and_readiness_need_no_token(harness: ServiceHarness) -> None:
    await harness.acquire()
    nobody = {"Authorization": ""}

    health = await harness.http.get("/healthz", headers=nobody)
    ready = await harness.http.get("/readyz", headers=nobody)
    of_pool = await harness.http.get("/readyz", params={"pool": "default"}, headers=nobody)

    assert (health.status_code, health.json()) == (200, {"status": "ok"})
    assert (ready.status_code, ready.json()["ready"]) == (200, True)
    assert list(of_pool.json()["pools"]) == ["default"]


async def test_every_answer_carries_the_callers_request_id_or_a_new_one(harness: ServiceHarness) -> None:
    given = await harness.http.get("/v1/pools", headers={"X-Request-ID": "mine-1"})
    broken = await harness.http.get("/v1/pools", headers={"X-Request-ID": "not allowed, too {odd}"})
    missing = await harness.http.get("/nowhere")

    assert given.headers["x-request-id"] == "mine-1"
    assert broken.headers["x-request-id"] not in ("", "not allowed, too {odd}")
    assert missing.json()["request_id"] == missing.headers["x-request-id"]


async def test_files_go_in_and_come_out(harness: ServiceHarness) -> None:
    (lease_id,) = await harness.acquire()
    content = bytes(range(256)) * 4096
    url = f"/v1/leases/{lease_id}/files"

    put = await harness.http.put(url, params={"path": "a/b.bin", "mode": "0600"}, content=content)
    got = await harness.http.get(url, params={"path": "a/b.bin"})
    listed = (await harness.http.get(f"{url}/list", params={"path": ".", "recursive": "1"})).json()

    assert (put.status_code, put.content) == (204, b"")
    assert (got.status_code, got.content) == (200, content)
    assert [(entry["path"], entry["size_bytes"]) for entry in listed["entries"]] == [("a/b.bin", len(content))]


async def test_archives_go_in_and_come_out(harness: ServiceHarness) -> None:
    (lease_id,) = await harness.acquire()
    url = f"/v1/leases/{lease_id}/archive"

    put = await harness.http.put(url, params={"path": "tree"}, content=b"not really a tar")
    got = await harness.http.get(url, params={"path": "tree"})

    assert put.status_code == 204
    assert (got.headers["content-type"], got.content) == ("application/gzip", b"not really a tar")
