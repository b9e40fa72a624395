"""Pools over HTTP: made, changed, drained away, and who may do that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sandbox_server.api.limits import Limits
from tests.contract.contract import CONTRACT
from tests.support.service_harness import BOB, ServiceHarness, bearer, open_service_harness

SMALL = {"slots_per_sandbox": 1, "min_sandboxes": 0, "max_sandboxes": 1}
BOBS = bearer(BOB)
FOR_ADMINS: dict[str, Any] = {
    "local": {"local": {"expose": ["/opt"]}},
    "nomad.address": {"nomad": {"address": "http://elsewhere:4646"}},
    "nomad.driver": {"nomad": {"driver": "raw_exec"}},
    "nomad.privileged": {"nomad": {"privileged": True}},
    "nomad.singularity_image": {"nomad": {"singularity_image": "/x.sif"}},
    "nomad.job_id": {"nomad": {"job_id": "anothers"}},
    "modal.secrets": {"modal": {"secrets": ["s"]}},
    "workspace_base": {"workspace_base": "/srv/anywhere"},
    "shared": {"shared": True},
    "allow_private": {"network": "internet", "allow_private": ["10.1.2.0/24"]},
    "allow_none": {"allow_none": True},
}
CANNOT_BE: dict[str, tuple[Any, str]] = {
    "an unknown field": ({"slot_per_sandbox": 1}, "slot_per_sandbox"),
    "an unknown field below": ({"nomad": {"adress": "x"}}, "nomad.adress"),
    "a negative count": ({"min_sandboxes": -1}, "min_sandboxes"),
    "no slots": ({"slots_per_sandbox": 0}, "slots_per_sandbox"),
    "a count in words": ({"max_sandboxes": "one"}, "max_sandboxes"),
    "a minimum above the maximum": ({"min_sandboxes": 9}, "min_sandboxes"),
    "another backend": ({"backend": "ec2"}, "backend"),
    "hosts for a shared network": ({"allow_hosts": ["pypi.org"]}, "allow_hosts"),
    "hosts by no name": ({"network": "internet", "allow_hosts": ["http://pypi.org/"]}, "allow_hosts"),
    "a private network by name": ({"network": "internet", "allow_private": ["index.example"]}, "allow_private"),
    "a network of its own on another backend": ({"network": "internet", "backend": "modal"}, "network"),
    "a reserved root": ({"root": "overlay"}, "root"),
    "a dedicated local pool": ({"dedicated": True, "slots_per_sandbox": 1}, "dedicated"),
    "a variable that is no text": ({"env_vars": {"A": 1}}, "env_vars.A"),
    "a variable without a name": ({"env_vars": {"": "x"}}, "env_vars"),
    "a folder that is relative": ({"workspace_base": "data"}, "workspace_base"),
}


async def test_a_pool_is_made_used_changed_and_drained_away(harness: ServiceHarness) -> None:
    made = await harness.http.put("/v1/pools/mine", json=SMALL)
    same = await harness.http.put("/v1/pools/mine", json=SMALL)
    changed = await harness.http.put("/v1/pools/mine", json={**SMALL, "max_sandboxes": 3})
    (lease_id,) = await harness.acquire(pool="mine")
    deleted = await harness.http.delete("/v1/pools/mine")

    assert [answer.status_code for answer in (made, same, changed, deleted)] == [201, 200, 200, 202]
    draining = (await harness.http.get("/v1/pools/mine")).json()
    assert (made.json()["state"], draining["state"]) == ("ready", "draining")
    assert draining["last_error"].startswith("the pool was deleted: it is gone when its lease has ended")
    assert (changed.json()["spec"]["max_sandboxes"], changed.json()["spec"]["idle_timeout_s"]) == (3, 120)
    assert (await harness.http.get(f"/v1/leases/{lease_id}")).status_code == 200
    assert (await harness.http.delete("/v1/pools/mine", params={"force": "1"})).status_code == 202
    assert (await harness.http.get(f"/v1/leases/{lease_id}")).status_code in (404, 410)


async def test_missing_fields_are_the_defaults(harness: ServiceHarness) -> None:
    await harness.http.put("/v1/pools/mine", json={**SMALL, "idle_timeout_s": 7})

    spec = (await harness.http.put("/v1/pools/mine", json=SMALL)).json()["spec"]

    assert spec == {**CONTRACT["bodies"]["spec"], **SMALL}


@pytest.mark.parametrize("name", CANNOT_BE)
async def test_a_spec_that_cannot_be(name: str, harness: ServiceHarness) -> None:
    spec, field = CANNOT_BE[name]
    answer = await harness.http.put("/v1/pools/mine", json=spec)

    assert (answer.status_code, answer.json()["code"], answer.json()["field"]) == (422, "invalid_request", field), answer.text
    assert (await harness.http.get("/v1/pools/mine")).status_code == 404


@pytest.mark.parametrize("name", ["A", "-a", "a-", "a b", "%2e%2e", "a" * 65, "ä", "a%00"])
async def test_a_name_that_cannot_be(name: str, harness: ServiceHarness) -> None:
    answer = await harness.http.put(f"/v1/pools/{name}", json=SMALL)

    assert answer.status_code in (404, 422), answer.text
    assert answer.json()["code"] in ("not_found", "invalid_request")


@pytest.mark.parametrize("backend", ["docker", "nomad", "modal"])
async def test_backends_that_wait_say_so(backend: str, tmp_path: Path) -> None:
    async with open_service_harness(tmp_path / "state", real_backends=True) as harness:
        answer = await harness.http.put("/v1/pools/far", json={"backend": backend, **SMALL})

    assert (answer.status_code, answer.json()["code"]) == (501, "not_implemented"), answer.text


async def test_the_pools_of_the_settings_file_stay_as_they_are(harness: ServiceHarness) -> None:
    put = await harness.http.put("/v1/pools/default", json=SMALL)
    deleted = await harness.http.delete("/v1/pools/default", params={"force": "1"})

    assert [(answer.status_code, answer.json()["code"]) for answer in (put, deleted)] == [(409, "pool_conflict")] * 2


async def test_a_conflict_says_where_the_pool_is_from(tmp_path: Path) -> None:
    written = {"pools": f"file, {tmp_path / 'pools.yaml'}"}
    async with open_service_harness(tmp_path / "built-in") as built_in, open_service_harness(tmp_path / "of-the-file", sources=written) as of_the_file:
        told = [await harness.http.put("/v1/pools/default", json=SMALL) for harness in (built_in, of_the_file)]
        deleted = await built_in.http.delete("/v1/pools/default")
        origins = [(await harness.http.get("/v1/pools/default")).json()["origin"] for harness in (built_in, of_the_file)]

    assert origins == ["default", "file"]
    assert deleted.status_code == 409
    assert "built in and cannot be deleted: start the service with a settings file" in deleted.json()["detail"]
    assert [answer.status_code for answer in told] == [409, 409]
    assert [("built in" in answer.json()["detail"], "of the settings file" in answer.json()["detail"]) for answer in told] == [(True, False), (False, True)]


def test_what_is_for_admins_is_the_contracts() -> None:
    assert set(FOR_ADMINS) - {"allow_none"} == set(CONTRACT["admins"]["spec"])


@pytest.mark.parametrize("field", FOR_ADMINS)
async def test_only_admins_set_what_is_for_admins(field: str, harness: ServiceHarness) -> None:
    spec = {**SMALL, **FOR_ADMINS[field]}
    bobs = await harness.http.put("/v1/pools/mine", json=spec, headers=BOBS)
    alices = await harness.http.put("/v1/pools/mine", params={"tenant": "bob"}, json=spec)

    assert (bobs.status_code, bobs.json()["code"], bobs.json()["field"]) == (403, "forbidden", field)
    assert alices.status_code == 201
    # What an admin has set may stay, but not go. A pool that every tenant uses is the admins', whosever it was.
    changed = await harness.http.put("/v1/pools/mine", json={**spec, "max_sandboxes": 2}, headers=BOBS)
    assert changed.status_code == (403 if field == "shared" else 200)
    if field != "allow_none":
        assert (await harness.http.put("/v1/pools/mine", json=SMALL, headers=BOBS)).status_code == 403


async def test_others_make_change_and_delete_pools_but_do_not_verify_them(harness: ServiceHarness) -> None:
    made = await harness.http.put("/v1/pools/bobs", json={**SMALL, "env_vars": {"A": "nobodys-business"}}, headers=BOBS)
    changed = await harness.http.put("/v1/pools/bobs", json={**SMALL, "env_vars": {"A": "other"}}, headers=BOBS)
    blind = await harness.http.put("/v1/pools/bobs", json=SMALL, headers=BOBS)

    assert [answer.status_code for answer in (made, changed, blind)] == [201, 200, 403]
    assert all("env_vars" not in answer.json()["spec"] for answer in (made, changed))
    assert "nobodys-business" not in made.text
    for path in ("/v1/pools/bobs/verify", "/v1/sandboxes/s/drain"):
        answer = await harness.http.post(path, headers=BOBS)
        assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")
    assert (await harness.http.delete("/v1/pools/bobs", headers=BOBS)).status_code == 202


async def test_lists_come_in_pages(tmp_path: Path) -> None:
    async with open_service_harness(tmp_path / "state", limits=Limits(page_items=2)) as harness:
        for name in ("a", "b", "c"):
            await harness.http.put(f"/v1/pools/{name}", json=SMALL)
        seen: list[list[str]] = []
        cursor: dict[str, str] = {}
        while not seen or cursor:
            page = (await harness.http.get("/v1/pools", params={"limit": "2", **cursor})).json()
            seen.append([pool["name"] for pool in page["pools"]])
            cursor = {"cursor": page["next_cursor"]} if "next_cursor" in page else {}

        assert seen == [["a", "b"], ["c", "default"]]


async def test_files_come_in_pages_where_that_is_asked_for(harness: ServiceHarness) -> None:
    (lease_id,) = await harness.acquire()
    for name in ("a", "b", "c"):
        await harness.http.put(f"/v1/leases/{lease_id}/files", params={"path": name}, content=b"")
    url = f"/v1/leases/{lease_id}/files/list"

    whole = (await harness.http.get(url, params={"path": "."})).json()
    first = (await harness.http.get(url, params={"path": ".", "limit": "2"})).json()
    rest = (await harness.http.get(url, params={"path": ".", "limit": "2", "cursor": first["next_cursor"]})).json()

    assert ([entry["path"] for entry in whole["entries"]], "next_cursor" in whole) == (["a", "b", "c"], False)
    assert first["entries"] + rest["entries"] == whole["entries"]
    assert "next_cursor" not in rest


async def test_a_verify_reports_slot_by_slot_and_needs_a_free_one(harness: ServiceHarness) -> None:
    await harness.acquire(4)

    answer = await harness.http.post("/v1/pools/default/verify")

    assert (answer.status_code, answer.json()["code"]) == (503, "no_capacity")
