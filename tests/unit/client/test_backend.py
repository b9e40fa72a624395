"""Tests of `RemoteToolBackend` with a service that sends prepared responses."""

from __future__ import annotations

import json
import math
from typing import Any

import httpx
import pytest

from env_client import errors
from env_client.backend import RemoteToolBackend
from env_client.retry import RetryPolicy
from tests.support.scripted_responses import URL, Script, ScriptedTransport, a_lease, a_result, problem

RELEASED = httpx.Response(200, json={"released": ["l-1"], "unknown": []})


def backend(script: Script, **options: Any) -> RemoteToolBackend:
    return RemoteToolBackend(URL, "s3cret", run_id="r-1", retry=RetryPolicy(total_s=0.0), transport=ScriptedTransport(script), **options)


def granted(*leases: dict[str, Any]) -> httpx.Response:
    return httpx.Response(200, json={"leases": list(leases), "waited_s": 0.0})


def ran(request: httpx.Request) -> httpx.Response:
    calls = json.loads(request.content)["calls"]
    results = [a_result(call["call_id"], call["lease_id"], output=call["args"]["command"]) for call in reversed(calls)]
    return httpx.Response(200, content=b"".join(json.dumps(one).encode() + b"\n" for one in results))


async def test_a_trajectory_has_a_slot_until_it_is_released(script: Script) -> None:
    script.steps = [granted(a_lease("l-1", trajectory_id="t-1")), ran, RELEASED]
    async with backend(script, pool="p", acquire_timeout_s=5, cache="rw") as held:
        slot = await held.acquire("t-1")
        (result,) = await held.execute_batch([(slot, "bash", {"command": "ls"})])
        await held.release(slot, reset_workspace=False)

    asked, _, released, ended = script.bodies()
    assert (slot.trajectory_id, slot.slot_id, slot.workspace, slot.lost) == ("t-1", "s-1/0", "/workspace", None)
    assert (result.success, result.output, result.error, result.reason, result.fault) == (True, "ls", "", "exit", "none")
    assert asked.pop("request_key")
    assert asked == {"pool": "p", "count": 1, "trajectory_ids": ["t-1"], "run_id": "r-1", "ttl_s": 300.0, "wait_s": 5, "cache": "rw"}
    assert released == {"lease_ids": ["l-1"], "reset_workspace": False}
    assert ended == {"run_id": "r-1", "reset_workspace": True}


async def test_results_are_in_the_order_of_the_calls(script: Script) -> None:
    script.steps = [granted(a_lease("l-1"), a_lease("l-2")), ran, RELEASED]
    async with backend(script) as held:
        one, other = await held.acquire_group(["t-1", "t-2"])
        results = await held.execute_batch([(one, "bash", {"command": "a"}), (other, "bash", {"command": "b"}), (one, "bash", {"command": "c"})], timeout_s=9)

    assert [result.output for result in results] == ["a", "b", "c"]
    assert {call["timeout_s"] for call in script.bodies()[1]["calls"]} == {9}


async def test_more_calls_than_one_request_takes_are_several(script: Script) -> None:
    script.steps = [granted(a_lease("l-1")), ran, ran, RELEASED]
    async with backend(script) as held:
        slot = await held.acquire("t-1")
        results = await held.execute_batch([(slot, "bash", {"command": str(number)}) for number in range(1200)])

    assert [result.output for result in results] == [str(number) for number in range(1200)]
    assert [len(body["calls"]) for body in script.bodies()[1:3]] == [1000, 200]


async def test_a_service_that_is_gone_is_a_fault_of_ours(script: Script) -> None:
    def half(request: httpx.Request) -> httpx.Response:
        first = json.loads(request.content)["calls"][0]
        return httpx.Response(200, content=json.dumps(a_result(first["call_id"], output="there")).encode() + b"\n")

    script.steps = [granted(a_lease("l-1")), half, RELEASED]
    async with backend(script) as held:
        slot = await held.acquire("t-1")
        first, second = await held.execute_batch([(slot, "bash", {"command": "a"}), (slot, "bash", {"command": "b"})])

    assert (first.success, first.output) == (True, "there")
    assert (second.success, second.reason, second.fault, second.metadata["may_have_run"]) == (False, "backend_error", "infra", True)
    assert "results missing" in second.error


async def test_a_batch_that_is_refused_is_an_error(script: Script) -> None:
    script.steps = [granted(a_lease("l-1")), problem(401, "unauthorized"), RELEASED]
    async with backend(script) as held:
        slot = await held.acquire("t-1")
        with pytest.raises(errors.Unauthorized):
            await held.execute(slot, "bash", {"command": "ls"})


def refused(fault: str, field: str) -> Any:
    def answer(request: httpx.Request) -> httpx.Response:
        (call,) = json.loads(request.content)["calls"]
        said = {"success": False, "exit_code": None, "reason": "invalid_args", "fault": fault, "error": f"{field}: no"}
        result = a_result(call["call_id"], call["lease_id"], **said, metadata={"evidence": {"field": field}})
        return httpx.Response(200, content=json.dumps(result).encode() + b"\n")

    return answer


async def test_what_a_model_got_wrong_is_a_result_and_what_the_environment_did_is_raised(script: Script) -> None:
    script.steps = [granted(a_lease("l-1")), refused("policy", "tool"), refused("policy", "args"), refused("infra", "timeout_s"), RELEASED]
    async with backend(script) as held:
        slot = await held.acquire("t-1")
        results = [await held.execute(slot, "sudo", {}), await held.execute(slot, "bash", "ls")]  # type: ignore[arg-type]
        with pytest.raises(errors.InvalidRequest, match="timeout_s: no"):
            await held.execute(slot, "bash", {"command": "ls"}, timeout_s=10**6)
        with pytest.raises(errors.InvalidRequest, match="timeout_s: must be a number"):
            await held.execute(slot, "bash", {"command": "ls"}, timeout_s="10")  # type: ignore[arg-type]

    assert [(result.reason, result.fault) for result in results] == [("invalid_args", "policy")] * 2


async def test_half_a_surrogate_pair_is_the_models_mistake_and_other_calls_run(script: Script) -> None:
    script.steps = [granted(a_lease("l-1")), ran, RELEASED]
    async with backend(script) as held:
        slot = await held.acquire("t-1")
        commands = ["one", json.loads('"echo \\ud83d"'), "two"]
        results = await held.execute_batch([(slot, "bash", {"command": command}) for command in commands])
        with pytest.raises(errors.InvalidRequest, match="JSON"):
            await held.execute(slot, "bash", {"command": b"bytes"})

    assert [result.output for result in results] == ["one", "", "two"]
    assert (results[1].reason, results[1].fault) == ("invalid_args", "policy")
    assert "UTF-8" in results[1].error


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("value", [math.nan, math.inf, nested(20_000)])
async def test_what_json_does_not_have_is_the_models_mistake_and_other_calls_run(script: Script, value: Any) -> None:
    script.steps = [granted(a_lease("l-1")), ran, RELEASED]
    async with backend(script) as held:
        slot = await held.acquire("t-1")
        results = await held.execute_batch([(slot, "bash", {"command": command}) for command in ("one", value, "two")])

    assert [result.output for result in results] == ["one", "", "two"]
    assert (results[1].reason, results[1].fault) == ("invalid_args", "policy")
    assert results[1].error.startswith("args: ")


async def test_artifacts_come_from_the_slot(script: Script) -> None:
    entries = {"entries": [{"path": "/workspace/a"}]}
    script.steps = [
        granted(a_lease("l-1")),
        httpx.Response(200, content=b"x"),
        httpx.Response(200, json=entries),
        httpx.Response(200, content=b"tar"),
        RELEASED,
    ]
    async with backend(script) as held:
        slot = await held.acquire("t-1")
        assert await held.read_artifact(slot, "a") == b"x"
        assert [entry.path for entry in await held.list_artifacts(slot, recursive=True)] == ["/workspace/a"]
        assert await held.archive_artifacts(slot) == b"tar"


async def test_rights_are_taken_away(script: Script) -> None:
    script.steps = [granted(a_lease("l-1")), httpx.Response(200, json=a_lease("l-1", allow_network=False)), RELEASED]
    async with backend(script) as held:
        slot = await held.acquire("t-1")
        await held.narrow(slot, allow_network=False, cache="none")

    assert not slot.info.allow_network
    assert script.bodies()[1] == {"allow_network": False, "cache": "none"}


async def test_a_group_is_named_as_a_whole(script: Script) -> None:
    script.steps = [RELEASED]
    async with backend(script) as held:
        with pytest.raises(ValueError, match="either all"):
            await held.acquire_group(["t-1", None])


async def test_what_went_wrong_first_is_what_is_raised(script: Script) -> None:
    script.steps = [problem(500, "internal")]

    with pytest.raises(LookupError) as caught:
        async with backend(script):
            raise LookupError("the environment's own")
    assert "could not be released" in caught.value.__notes__[0]


async def test_a_backend_that_has_ended_refuses(script: Script) -> None:
    script.steps = [granted(a_lease("l-1")), RELEASED]
    async with backend(script) as held:
        slot = await held.acquire("t-1")
    await held.close()

    with pytest.raises(errors.ClientClosed, match="r-1 is closed"):
        await held.acquire("t-2")
    with pytest.raises(errors.ClientClosed):
        await held.execute(slot, "bash", {"command": "ls"})
    assert len(script.requests) == 2


async def test_a_call_that_a_stop_cut_off_is_run_by_the_next_service(script: Script) -> None:
    def stopped(request: httpx.Request) -> httpx.Response:
        call = json.loads(request.content)["calls"][0]
        one = a_result(call["call_id"], success=False, reason="backend_error", fault="infra", metadata={"stopping": True})
        return httpx.Response(200, content=json.dumps(one).encode() + b"\n")

    script.steps = [granted(a_lease("l-1")), stopped, ran, RELEASED]
    patient = RetryPolicy(base_s=0.001)
    async with RemoteToolBackend(URL, "s3cret", run_id="r-1", retry=patient, transport=ScriptedTransport(script)) as held:
        slot = await held.acquire("t-1")
        result = await held.execute(slot, "bash", {"command": "ls"})

    _, first, second, _ = script.bodies()
    assert (result.success, result.output) == (True, "ls")
    assert first == second


async def test_slots_that_come_while_the_backend_ends_are_given_back(script: Script) -> None:
    held = backend(script)

    def late(request: httpx.Request) -> httpx.Response:
        held._closed = True  # what `close` does before it releases the run
        return granted(a_lease("l-1"))

    script.steps = [late, RELEASED]
    with pytest.raises(errors.ClientClosed, match="given back"):
        await held.acquire("t-1")
    await held.client.aclose()

    assert script.bodies()[1] == {"lease_ids": ["l-1"], "reset_workspace": True}


async def test_slots_that_come_after_the_end_are_not_renewed(script: Script) -> None:
    held = backend(script)

    def late(request: httpx.Request) -> httpx.Response:
        held.client._sender.core.state.client_closed = True
        return granted(a_lease("l-1"))

    script.steps = [late]
    with pytest.raises(errors.ClientClosed):
        await held.acquire("t-1")

    assert held.client._heartbeat._schedule.next_due_s() is None
