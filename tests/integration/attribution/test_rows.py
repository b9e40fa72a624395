"""The rows that are decided before, beside or instead of a process."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.attribution.conftest import Open
from tests.integration.attribution.pool_harness import PoolHarness, blame, proof


@pytest.fixture(scope="module")
def lease(shared_harness: PoolHarness) -> Iterator[dict[str, Any]]:
    """A lease that all tests share whose calls change nothing in its slot."""
    with shared_harness.service.http() as http:
        (lease,) = http.post("/v1/acquire", json={"ttl_s": 600}).json()["leases"]
        yield lease
        http.post("/v1/release", json={"lease_ids": [lease["lease_id"]]})


@pytest.mark.parametrize(
    ("tool", "args", "named"),
    [
        ("bash", {}, "command"),
        ("bash", {"command": "true", "shell": "zsh"}, "shell"),
        ("nonsense", {}, "nonsense"),
        ("process", {"action": "poll", "process_id": 1}, "process_id"),
        ("read_file", {"path": 1}, "path"),
        ("write_file", {"path": "f"}, "content"),
        ("edit_file", {"path": "f", "old": "x"}, "new"),
        ("list_files", {"recursive": "yes"}, "recursive"),
        ("search_files", {"pattern": "("}, "pattern"),
    ],
)
def test_a_wrong_argument_is_named_and_the_policys(shared_harness: PoolHarness, lease: dict[str, Any], tool: str, args: dict[str, Any], named: str) -> None:
    result = shared_harness.call(lease, tool, args)

    assert blame(result) == ("invalid_args", "policy", None)
    assert named in result["error"]
    assert proof(result).get("field", "args") == ("tool" if tool == "nonsense" else "args")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"timeout_s": 3601}, "timeout_s"),
        ({"timeout_s": "soon"}, "timeout_s"),
        ({"timeout": 5}, "timeout"),
        ({"encoding": "latin-1"}, "encoding"),
        ({"output_limit_bytes": 11 << 20}, "output_limit_bytes"),
        ({"separate_streams": "yes"}, "separate_streams"),
        ({"call_id": "a b"}, "call_id"),
        ({"args": 7, "timeout_s": 0}, "timeout_s"),
    ],
)
def test_any_other_field_of_a_call_is_the_callers_mistake(shared_harness: PoolHarness, lease: dict[str, Any], fields: dict[str, Any], named: str) -> None:
    call = {"tool": "bash", "args": {"command": "true"}, **fields}
    (result,) = shared_harness.batch({"lease_id": lease["lease_id"], **call})
    alone = shared_harness.ask("POST", f"/v1/leases/{lease['lease_id']}/exec", json=call)

    assert blame(result) == blame(alone) == ("invalid_args", "infra", None)
    assert named in result["error"]
    assert proof(result)["field"] == named


def test_a_time_as_long_as_a_pool_may_give_is_no_mistake(open_pool: Open) -> None:
    harness = open_pool(max_timeout_s=31_536_000, slots_per_sandbox=1)

    assert harness.bash(harness.acquire()[0], "true", timeout_s=31_536_000)["success"]


@pytest.mark.parametrize("fields", [{"command": 7}, {"tool": 7, "args": {}}, {"tool": "bash", "args": "ls"}, {"tool": "sudo"}], ids=str)
def test_what_a_single_call_has_from_the_policy_is_the_policys(shared_harness: PoolHarness, lease: dict[str, Any], fields: dict[str, Any]) -> None:
    assert blame(shared_harness.ask("POST", f"/v1/leases/{lease['lease_id']}/exec", json=fields)) == ("invalid_args", "policy", None)


@pytest.mark.parametrize(
    ("tool", "args", "errno"),
    [
        ("read_file", {"path": "missing"}, "ENOENT"),
        ("read_file", {"path": "."}, "EISDIR"),
        ("write_file", {"path": "/usr/f", "content": "x"}, None),
        ("edit_file", {"path": "missing", "old": "a", "new": "b"}, "ENOENT"),
        ("list_files", {"path": "missing"}, "ENOENT"),
        ("search_files", {"path": "missing", "pattern": "x"}, "ENOENT"),
        ("process", {"action": "poll", "process_id": "p9"}, None),
        ("bash", {"command": "true", "cwd": "missing"}, "ENOENT"),
    ],
)
def test_what_a_tool_cannot_do_is_the_policys(shared_harness: PoolHarness, lease: dict[str, Any], tool: str, args: dict[str, Any], errno: str | None) -> None:
    result = shared_harness.call(lease, tool, args)

    assert blame(result) == ("tool_error", "policy", None)
    assert errno is None or proof(result)["errno"] == errno


def test_a_call_id_used_for_something_else_is_the_trainers_mistake_and_the_first_stays(shared_harness: PoolHarness, lease: dict[str, Any]) -> None:
    first = shared_harness.bash(lease, "echo first", call_id="c")
    other = shared_harness.bash(lease, "echo other", call_id="c")

    assert blame(other) == ("call_conflict", "infra", None)
    assert shared_harness.bash(lease, "echo first", call_id="c") == first


@pytest.mark.parametrize("by", ["cancel", "release"])
def test_who_ends_a_call_from_outside_is_not_told_that_it_failed(harness: PoolHarness, by: str) -> None:
    (lease,) = harness.acquire()
    call_id = uuid.uuid4().hex
    running = harness.begin_bash(lease, "echo part; sleep 60", call_id=call_id)
    harness.until(lambda: harness.ask("GET", f"/v1/leases/{lease['lease_id']}/calls/{call_id}")["output_bytes"] == 5)
    if by == "cancel":
        harness.ask("POST", "/v1/cancel", json={"lease_id": lease["lease_id"], "call_id": call_id})
    else:
        harness.ask("POST", "/v1/release", json={"lease_ids": [lease["lease_id"]]})
    (result,) = running.result()

    assert blame(result) == ("cancelled", "none", None)
    assert result["output"] == "part\n"


def test_a_lease_that_is_not_held_is_ambiguous_and_says_how_it_ended(harness: PoolHarness) -> None:
    released, expired = harness.acquire()[0], harness.acquire(ttl_s=1)[0]
    harness.ask("POST", "/v1/release", json={"lease_ids": [released["lease_id"]]})
    harness.until(lambda: harness.ask("GET", f"/v1/leases/{expired['lease_id']}").get("code") == "lease_lost")

    for lease, how, words in (({"lease_id": "none"}, "unknown", "there is no lease"), (released, "ended", "released"), (expired, "ended", "not renewed")):
        result = harness.bash(lease, "true")
        assert blame(result) == ("lease_lost", "ambiguous", None)
        assert words in result["error"]
        assert proof(result)["lease"] == how


def test_a_lease_does_not_expire_under_a_call(harness: PoolHarness) -> None:
    (lease,) = harness.acquire(ttl_s=1)

    result = harness.bash(lease, "sleep 1.5; echo done")

    assert blame(result) == ("exit", "none", 0)
