"""Tests of the gatherer with a service that sends prepared responses."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from env_client import errors
from env_client.backend import ExecutionResult
from env_client.client import AsyncSandboxClient
from env_client.gatherer import MAX_REQUEST_BYTES, CallGatherer
from env_client.messages.calls import make_call
from env_client.retry import RetryPolicy
from env_client.values import Call
from tests.support.scripted_responses import URL, Script, ScriptedTransport, a_result, problem


class HeldService(httpx.AsyncBaseTransport):
    """A service whose responses wait until the test sends them."""

    def __init__(self) -> None:
        self.batches: list[list[dict[str, Any]]] = []
        self.cancelled: list[str] = []
        self.answered: list[asyncio.Event] = []
        self.unknown_cancels = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        if request.url.path == "/v1/cancel":
            self.cancelled.append(body["call_id"])
            if self.unknown_cancels:
                self.unknown_cancels -= 1
                return problem(404, "call_not_found")
            return httpx.Response(200, json=a_result(body["call_id"], reason="cancelled", success=False))
        self.batches.append(body["calls"])
        self.answered.append(asyncio.Event())
        return httpx.Response(200, stream=Answer(body["calls"], self.answered[-1]))

    def commands(self) -> list[list[str]]:
        return [[call["args"]["command"] for call in batch] for batch in self.batches]

    async def wait_for_batches(self, count: int) -> None:
        async with asyncio.timeout(5):
            while len(self.batches) < count:
                await asyncio.sleep(0)


class Answer(httpx.AsyncByteStream):
    def __init__(self, calls: list[dict[str, Any]], answered: asyncio.Event) -> None:
        self._calls, self._answered = calls, answered

    async def __aiter__(self) -> Any:
        await self._answered.wait()
        yield b"".join(json.dumps(a_result(call["call_id"], call["lease_id"], output=call["args"]["command"])).encode() + b"\n" for call in self._calls)


def client(transport: httpx.AsyncBaseTransport) -> AsyncSandboxClient:
    return AsyncSandboxClient(URL, "s3cret", retry=RetryPolicy(total_s=0.0), transport=transport)


def bash(command: Any, lease_id: str | None = None, **options: Any) -> Call:
    return make_call(lease_id or f"l-{command}", "terminal", {"command": command}, **options)


def answer_all(request: httpx.Request) -> httpx.Response:
    calls = json.loads(request.content)["calls"]
    return httpx.Response(200, content=b"".join(json.dumps(a_result(call["call_id"], call["lease_id"])).encode() + b"\n" for call in calls))


async def finish(*tasks: asyncio.Task[ExecutionResult]) -> list[str]:
    async with asyncio.timeout(5):
        return [result.output for result in await asyncio.gather(*tasks)]


def start(gatherer: CallGatherer, *commands: str, lease_id: str | None = None) -> list[asyncio.Task[ExecutionResult]]:
    return [asyncio.ensure_future(gatherer.execute(bash(command, lease_id))) for command in commands]


async def test_a_call_goes_at_once_and_the_next_ones_when_it_is_answered() -> None:
    held = HeldService()
    async with CallGatherer(client(held), window_ms=60_000) as gatherer:
        tasks = start(gatherer, "a", "b", "c")
        await held.wait_for_batches(1)
        await asyncio.sleep(0.01)
        assert held.commands() == [["a"]]

        held.answered[0].set()
        await held.wait_for_batches(2)
        assert held.commands() == [["a"], ["b", "c"]]
        held.answered[1].set()

        assert await finish(*tasks) == ["a", "b", "c"]
        assert (gatherer.statistics.call_count, gatherer.statistics.request_count, gatherer.statistics.cancelled_count) == (3, 2, 0)
        assert gatherer.statistics.waited_s >= 0.02


async def test_a_call_waits_no_longer_than_the_window() -> None:
    held = HeldService()
    async with CallGatherer(client(held), window_ms=20) as gatherer:
        tasks = start(gatherer, "a", "b")
        async with asyncio.timeout(5):
            await held.wait_for_batches(2)
        assert not any(event.is_set() for event in held.answered)
        for event in held.answered:
            event.set()
        assert await finish(*tasks) == ["a", "b"]


async def test_a_call_does_not_wait_for_calls_that_were_sent_long_ago() -> None:
    held = HeldService()
    async with CallGatherer(client(held), window_ms=20) as gatherer:
        tasks = start(gatherer, "slow")
        await held.wait_for_batches(1)
        await asyncio.sleep(0.03)
        tasks += start(gatherer, "quick")
        await asyncio.sleep(0)
        assert gatherer.statistics.sent_count == 2
        await held.wait_for_batches(2)
        for event in held.answered:
            event.set()
        assert await finish(*tasks) == ["slow", "quick"]


async def test_a_full_batch_goes_at_once() -> None:
    held = HeldService()
    async with CallGatherer(client(held), window_ms=60_000, max_batch_size=3) as gatherer:
        tasks = start(gatherer, "a", "b", "c", "d", "e")
        await held.wait_for_batches(2)
        assert held.commands() == [["a"], ["b", "c", "d"]]
        held.answered[0].set()
        held.answered[1].set()
        await held.wait_for_batches(3)
        held.answered[2].set()
        assert await finish(*tasks) == ["a", "b", "c", "d", "e"]


async def test_without_a_window_nothing_waits() -> None:
    held = HeldService()
    async with CallGatherer(client(held), window_ms=0) as gatherer:
        tasks = start(gatherer, "a", "b")
        await held.wait_for_batches(2)
        for event in held.answered:
            event.set()
        assert await finish(*tasks) == ["a", "b"]


async def test_no_request_has_two_calls_of_one_lease() -> None:
    held = HeldService()
    async with CallGatherer(client(held), window_ms=60_000) as gatherer:
        tasks = start(gatherer, "a") + start(gatherer, "b", "c", lease_id="l-same") + start(gatherer, "d", "e")
        await held.wait_for_batches(1)
        held.answered[0].set()
        await held.wait_for_batches(3)
        assert held.commands() == [["a"], ["b", "d", "e"], ["c"]]
        for event in held.answered:
            event.set()
        assert await finish(*tasks) == ["a", "b", "c", "d", "e"]


async def test_long_and_deep_arguments_have_a_request_of_their_own() -> None:
    held, deep = HeldService(), json.loads("[" * 20 + "]" * 20)
    async with CallGatherer(client(held), window_ms=60_000) as gatherer:
        first = start(gatherer, "a")
        await held.wait_for_batches(1)
        tasks = [asyncio.ensure_future(gatherer.execute(bash(command, f"l-{number}"))) for number, command in enumerate(["b", "x" * 100_000, deep, "c"])]
        await asyncio.sleep(0)
        held.answered[0].set()
        await held.wait_for_batches(4)
        assert held.commands()[1:] == [["b", "c"], ["x" * 100_000], [deep]]
        for event in held.answered:
            event.set()
        await finish(*first, *tasks)


async def test_large_requests_are_divided() -> None:
    held, text = HeldService(), "x" * 60_000
    async with CallGatherer(client(held), window_ms=60_000, max_batch_size=1000) as gatherer:
        tasks = start(gatherer, "a") + [asyncio.ensure_future(gatherer.execute(bash(text, f"l-{number}"))) for number in range(100)]
        tasks += [asyncio.ensure_future(gatherer.execute(bash("y", f"m-{number}", output_limit_bytes=10 << 20))) for number in range(15)]
        await held.wait_for_batches(1)
        held.answered[0].set()
        await held.wait_for_batches(3)
        for event in held.answered:
            event.set()
        await finish(*tasks)

    sizes = [sum(len(json.dumps(call["args"])) for call in batch) for batch in held.batches[1:]]
    outputs = [sum(call.get("output_limit_bytes", 50_000) for call in batch) for batch in held.batches[1:]]
    assert max(sizes) <= MAX_REQUEST_BYTES
    assert max(outputs) <= 128 << 20
    assert sum(len(batch) for batch in held.batches) == 116


async def test_a_cancelled_call_that_waits_is_never_sent() -> None:
    held = HeldService()
    async with CallGatherer(client(held), window_ms=60_000) as gatherer:
        first, second, third = start(gatherer, "a", "b", "c")
        await held.wait_for_batches(1)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        held.answered[0].set()
        await held.wait_for_batches(2)
        held.answered[1].set()

        assert await finish(first, third) == ["a", "c"]
        assert (held.commands(), held.cancelled) == ([["a"], ["c"]], [])
        assert gatherer.statistics.cancelled_count == 1


async def test_a_cancelled_call_that_runs_is_ended_at_the_service_and_the_others_run_on() -> None:
    held = HeldService()
    held.unknown_cancels = 2  # the request that carries the call arrives after the cancellation
    async with CallGatherer(client(held), window_ms=60_000) as gatherer:
        (first,) = start(gatherer, "a")
        await held.wait_for_batches(1)
        tasks = start(gatherer, "b", "c")
        await asyncio.sleep(0)
        held.answered[0].set()
        await held.wait_for_batches(2)
        tasks[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        async with asyncio.timeout(5):
            while len(held.cancelled) < 3:
                await asyncio.sleep(0.005)
        held.answered[1].set()

        assert await finish(first, tasks[1]) == ["a", "c"]
    assert held.cancelled == [held.batches[1][0]["call_id"]] * 3


async def test_a_call_whose_answer_is_there_is_not_cancelled_at_the_service() -> None:
    held = HeldService()
    async with CallGatherer(client(held)) as gatherer:
        (task,) = start(gatherer, "a")
        await held.wait_for_batches(1)
        held.answered[0].set()
        while not gatherer.statistics.answered_count:
            await asyncio.sleep(0)
        task.cancel()  # before the task has taken its result
        await asyncio.gather(task, return_exceptions=True)

    assert (held.cancelled, gatherer.statistics.cancelled_count) == ([], 0)


async def test_close_ends_what_waits_and_runs() -> None:
    held = HeldService()
    gatherer = CallGatherer(client(held), window_ms=60_000)
    running, waiting = start(gatherer, "a", "b")
    await held.wait_for_batches(1)
    closing = asyncio.ensure_future(gatherer.aclose())
    for task in (running, waiting):
        with pytest.raises(errors.ClientClosed, match="gatherer was closed"):
            await task
    held.answered[0].set()
    await closing

    assert (held.commands(), held.cancelled) == ([["a"]], [held.batches[0][0]["call_id"]])
    with pytest.raises(errors.ClientClosed):
        await gatherer.execute(bash("c"))
    await gatherer.aclose()


async def test_close_does_not_wait_for_a_service_that_does_not_answer() -> None:
    held = HeldService()
    gatherer = CallGatherer(client(held))
    (running,) = start(gatherer, "a")
    await held.wait_for_batches(1)
    async with asyncio.timeout(5):
        await gatherer.aclose(timeout_s=0.05)

    with pytest.raises(errors.ClientClosed):
        await running


async def test_a_gatherer_belongs_to_one_event_loop() -> None:
    held = HeldService()
    async with CallGatherer(client(held)) as gatherer:
        (task,) = start(gatherer, "a")
        await held.wait_for_batches(1)
        with pytest.raises(RuntimeError, match="one for each event loop"):
            await asyncio.to_thread(asyncio.run, gatherer.execute(bash("b")))
        held.answered[0].set()
        assert await finish(task) == ["a"]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"window_ms": -1}, "window_ms"), ({"window_ms": math.nan}, "window_ms"), ({"max_batch_size": 0}, "1 to"), ({"max_batch_size": 1001}, "1 to")],
)
async def test_settings_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CallGatherer(client(HeldService()), **options)


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("args", [{"command": json.loads('"\\ud83d"')}, {"command": math.nan}, {"command": -math.inf}, {"command": nested(20_000)}])
async def test_arguments_that_cannot_be_sent_are_the_models_mistake_and_nothing_is_sent(script: Script, args: Any) -> None:
    async with CallGatherer(client(ScriptedTransport(script))) as gatherer:
        result = await gatherer.execute(make_call("l-1", "terminal", args))

    assert (result.success, result.reason, result.fault, script.requests) == (False, "invalid_args", "policy", [])
    assert result.error.startswith("args: ")


async def test_arguments_that_no_model_can_write_are_the_programs_mistake(script: Script) -> None:
    script.steps = [answer_all]
    async with CallGatherer(client(ScriptedTransport(script))) as gatherer:
        with pytest.raises(errors.InvalidRequest, match="bytes"):
            await gatherer.execute(bash(b"ls"))
        assert (await gatherer.execute(bash("ls"))).success

    assert len(script.requests) == 1


def refusing(status: int, code: str, refused: str) -> Callable[[httpx.Request], httpx.Response]:
    """A service that refuses each request with a call of this command as a whole."""

    def respond(request: httpx.Request) -> httpx.Response:
        commands = {call["args"]["command"] for call in json.loads(request.content)["calls"]}
        return problem(status, code) if refused in commands else answer_all(request)

    return respond


@pytest.mark.parametrize(("status", "code"), [(422, "invalid_request"), (413, "payload_too_large")])
async def test_a_request_that_is_refused_is_divided_until_the_call_is_alone(script: Script, status: int, code: str) -> None:
    script.steps = [refusing(status, code, "11")]
    async with CallGatherer(client(ScriptedTransport(script))) as gatherer:
        results = await asyncio.gather(*(gatherer.execute(bash(str(number))) for number in range(20)))

    assert [number for number, result in enumerate(results) if not result.success] == [11]
    assert (results[11].reason, results[11].fault) == ("invalid_args", "policy")
    assert f"because of {code}" in results[11].error
    assert len(script.requests) < 14


@pytest.mark.parametrize(("status", "code"), [(401, "unauthorized"), (403, "forbidden")])
async def test_a_token_that_is_refused_is_an_error_of_every_call(script: Script, status: int, code: str) -> None:
    script.steps = [problem(status, code)]
    async with CallGatherer(client(ScriptedTransport(script))) as gatherer:
        found = await asyncio.gather(*(gatherer.execute(bash(str(number))) for number in range(5)), return_exceptions=True)

    assert {type(one) for one in found} == {errors.CLASS_OF_CODE[code]}
    assert len({id(one) for one in found}) == 5


@pytest.mark.parametrize(
    ("step", "may_have_run"),
    [
        (problem(503, "draining"), False),
        (problem(429, "quota_exceeded"), False),
        (problem(500, "internal"), False),
        (httpx.Response(502, text="a proxy"), True),
        (httpx.ConnectError("refused"), False),
        (httpx.ReadError("cut"), True),
    ],
)
async def test_failures_of_the_service_are_results_with_the_fault_infra(script: Script, step: Any, may_have_run: bool) -> None:
    script.steps = [step]
    async with CallGatherer(client(ScriptedTransport(script))) as gatherer:
        results = await asyncio.gather(*(gatherer.execute(bash(str(number))) for number in range(5)))

    assert {(result.success, result.reason, result.fault) for result in results} == {(False, "backend_error", "infra")}
    assert {result.metadata["may_have_run"] for result in results} == {may_have_run}


async def test_a_mistake_of_the_program_is_an_error_of_its_own_call_alone(script: Script) -> None:
    def respond(request: httpx.Request) -> httpx.Response:
        calls = json.loads(request.content)["calls"]
        evidence = {
            "success": False,
            "reason": "invalid_args",
            "fault": "infra",
            "error": "timeout_s: too long",
            "metadata": {"evidence": {"field": "timeout_s"}},
        }
        results = [a_result(call["call_id"], call["lease_id"], **(evidence if call.get("timeout_s") == 99 else {})) for call in calls]
        return httpx.Response(200, content=b"".join(json.dumps(one).encode() + b"\n" for one in results))

    script.steps = [respond]
    async with CallGatherer(client(ScriptedTransport(script))) as gatherer:
        found = await asyncio.gather(
            gatherer.execute(bash("0")),
            gatherer.execute(bash("a")),
            gatherer.execute(bash("b", timeout_s=99)),
            gatherer.execute(bash("c")),
            return_exceptions=True,
        )

    assert [type(one) for one in found] == [ExecutionResult, ExecutionResult, errors.InvalidRequest, ExecutionResult]


async def test_a_failure_of_the_client_itself_reaches_every_caller(script: Script) -> None:
    def broken(request: httpx.Request) -> httpx.Response:
        raise ZeroDivisionError("a bug")

    script.steps = [broken]
    async with CallGatherer(client(ScriptedTransport(script))) as gatherer:
        found = await asyncio.gather(*(gatherer.execute(bash(str(number))) for number in range(3)), return_exceptions=True)

    assert [str(one) for one in found] == ["a bug"] * 3
