"""Items of a batch that come to a result without running: each says when it was refused, and that it took no time."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from sandbox_server.api.limits import Limits
from tests.support.service_harness import ServiceHarness, bash, open_service_harness

Item = dict[str, Any]
Refuse = Callable[[ServiceHarness, str], Awaitable[Item]]
REFUSED: dict[str, tuple[str, Refuse]] = {}


def refused(name: str, reason: str) -> Callable[[Refuse], Refuse]:
    """Register how an item is provoked, and the reason it comes to."""

    def register(provoke: Refuse) -> Refuse:
        REFUSED[name] = (reason, provoke)
        return provoke

    return register


@refused("a field out of range", "invalid_args")
async def _field(harness: ServiceHarness, lease_id: str) -> Item:
    return bash(lease_id, "true", timeout_s=-1)


@refused("more time than the pool gives", "invalid_args")
async def _timeout(harness: ServiceHarness, lease_id: str) -> Item:
    return bash(lease_id, "true", timeout_s=601)


@refused("an unknown lease", "lease_lost")
async def _unknown(harness: ServiceHarness, lease_id: str) -> Item:
    return bash("nobodys", "true")


@refused("a lease that was released", "lease_lost")
async def _released(harness: ServiceHarness, lease_id: str) -> Item:
    await harness.http.post("/v1/release", json={"lease_ids": [lease_id]})
    return bash(lease_id, "true")


@refused("another command under the same id", "call_conflict")
async def _conflict(harness: ServiceHarness, lease_id: str) -> Item:
    await harness.batch(bash(lease_id, "echo 1", call_id="c"))
    return bash(lease_id, "echo 2", call_id="c")


@refused("another command under the same id, after the sandbox", "call_conflict")
async def _late_conflict(harness: ServiceHarness, lease_id: str) -> Item:
    await harness.batch(bash(lease_id, "echo 1", call_id="c"))
    harness.backend.kill(harness.agent.sandbox_id)
    await harness.batch(bash(lease_id, "true"))
    return bash(lease_id, "echo 2", call_id="c")


@refused("a lost sandbox", "sandbox_lost")
async def _lost(harness: ServiceHarness, lease_id: str) -> Item:
    harness.backend.kill(harness.agent.sandbox_id)
    await harness.batch(bash(lease_id, "true"))
    return bash(lease_id, "true", call_id="later")


@refused("what is not built", "not_implemented")
async def _not_built(harness: ServiceHarness, lease_id: str) -> Item:
    return bash(lease_id, "refuse not_implemented")


@refused("more calls than a lease may have", "backend_error")
async def _too_many(harness: ServiceHarness, lease_id: str) -> Item:
    await harness.batch(*(bash(lease_id, "true") for _ in range(5)))
    return bash(lease_id, "true")


@pytest.mark.parametrize("name", REFUSED)
async def test_a_refused_item_says_when(name: str, tmp_path: Path) -> None:
    reason, provoke = REFUSED[name]
    async with open_service_harness(tmp_path / "state", limits=Limits(lease_calls=5)) as harness:
        (lease_id,) = await harness.acquire()
        item = await provoke(harness, lease_id)
        before = time.time()
        (result,) = await harness.batch(item)
        after = time.time()

    assert result["reason"] == reason
    assert before <= result["started_at"] <= after
    assert result["duration_s"] == 0.0


async def test_a_single_call_that_conflicts_says_when_too(harness: ServiceHarness) -> None:
    (lease_id,) = await harness.acquire()
    item = await _late_conflict(harness, lease_id)
    before = time.time()

    result = (await harness.http.post(f"/v1/leases/{lease_id}/exec", json=item)).json()

    assert (result["reason"], result["duration_s"]) == ("call_conflict", 0.0)
    assert before <= result["started_at"] <= time.time()


async def test_what_was_refused_for_good_says_the_same_when_asked_again(harness: ServiceHarness) -> None:
    (lease_id,) = await harness.acquire()
    item = await _lost(harness, lease_id)

    first, again = [(await harness.batch(item))[0] for _ in range(2)]

    assert first == again


@pytest.mark.parametrize(
    ("fields", "fault", "field"),
    [
        ({"args": {"command": "echo \ud83d"}}, "policy", "args"),
        ({"args": {"command": "true", "\ude00": 1}}, "policy", "args"),
        ({"tool": "ba\ud83dsh"}, "policy", "tool"),
        ({"call_id": "c\ud83d"}, "infra", "call_id"),
        ({"\ud83d": 1}, "infra", "body"),
    ],
)
async def test_half_a_surrogate_pair_costs_only_its_own_call(tmp_path: Path, fields: Item, fault: str, field: str) -> None:
    async with open_service_harness(tmp_path / "state") as harness:
        (lease_id,) = await harness.acquire()
        calls = [bash(lease_id, "echo \U0001f600", timeout_s=5), {**bash(lease_id, "true"), **fields}]
        answer = await harness.http.post("/v1/exec-batch", content=json.dumps({"calls": calls}), headers={"content-type": "application/json"})

        good, bad = answer.json()["results"]
        assert good["reason"] == "exit"
        assert (bad["reason"], bad["fault"], bad["metadata"]["evidence"]["field"]) == ("invalid_args", fault, field)
        assert len(harness.agent.ran) == 1


async def test_half_a_surrogate_pair_in_the_short_form_is_the_commands_fault(tmp_path: Path) -> None:
    async with open_service_harness(tmp_path / "state") as harness:
        (lease_id,) = await harness.acquire()
        answer = await harness.http.post(f"/v1/leases/{lease_id}/exec", content=json.dumps({"command": "echo \ud83d"}))

        assert (answer.json()["reason"], answer.json()["fault"]) == ("invalid_args", "policy")
        assert harness.agent.ran == []


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", "9" * 400])
async def test_what_is_no_json_stays_so_beside_half_a_surrogate_pair(tmp_path: Path, number: str) -> None:
    async with open_service_harness(tmp_path / "state") as harness:
        answer = await harness.http.post("/v1/exec-batch", content=f'{{"calls": ["\\ud83d", {number}]}}')

        assert answer.status_code == 422
        assert "not JSON" in answer.json()["detail"]


async def test_half_a_surrogate_pair_in_a_lease_id_refuses_the_batch(tmp_path: Path) -> None:
    async with open_service_harness(tmp_path / "state") as harness:
        answer = await harness.http.post("/v1/exec-batch", content=json.dumps({"calls": [bash("l\ud83d", "true")]}))

        assert (answer.status_code, answer.json()["field"]) == (422, "calls.0")
