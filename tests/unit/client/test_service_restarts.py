"""Tests of both clients when the service or the client itself stops, and when a client is used wrongly."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from env_client import errors
from env_client.values import Call
from tests.support.scripted_responses import FakeTime, Script, a_result, problem
from tests.unit.client.transport.test_senders import OK_ACQUIRE, lines

STOPPED: dict[str, Any] = {"success": False, "exit_code": None, "reason": "backend_error", "fault": "infra", "metadata": {"stopping": True}}


class TestStops:
    """The service stops and is started again."""

    def test_a_call_is_sent_again_under_its_id(self, operations: Any, script: Script) -> None:
        script.steps = [httpx.Response(200, json=a_result("c-1", **STOPPED)), httpx.ConnectError("refused"), httpx.Response(200, json=a_result("c-1"))]

        assert operations.exec("l-1", "bash", {"command": "ls"}, call_id="c-1").success
        first, _, third = [request.content for request in script.requests]
        assert first == third

    def test_a_batch_is_sent_again(self, operations: Any, script: Script) -> None:
        script.steps = [
            httpx.Response(200, json={"results": [a_result("a"), a_result("b", **STOPPED)]}),
            httpx.Response(200, json={"results": [a_result("a"), a_result("b")]}),
        ]

        results = operations.exec_batch([Call(lease_id="l-1", tool="bash", call_id=call_id) for call_id in ("a", "b")])
        assert [result.success for result in results] == [True, True]

    def test_a_streamed_batch_requests_the_unfinished_calls_again(self, operations: Any, script: Script) -> None:
        script.steps = [httpx.Response(200, content=lines(a_result("a"), a_result("b", **STOPPED))), httpx.Response(200, content=lines(a_result("b")))]

        results = operations.exec_stream([Call(lease_id="l-1", tool="bash", call_id=call_id) for call_id in ("a", "b")])
        assert [(index, result.success) for index, result in results] == [(0, True), (1, True)]
        assert [call["call_id"] for call in script.bodies()[1]["calls"]] == ["b"]

    def test_the_unfinished_result_is_returned_if_the_service_stays_stopped(self, operations: Any, script: Script, fake_time: FakeTime) -> None:
        script.steps = [httpx.Response(200, json=a_result("c-1", **STOPPED)), httpx.ConnectError("refused")]

        assert operations.exec("l-1", "bash", {"command": "ls"}, call_id="c-1").reason == "backend_error"
        assert 50 < sum(fake_time.slept_s) < 60

    def test_unfinished_results_of_a_streamed_batch_are_returned_if_the_service_stays_stopped(self, operations: Any, script: Script) -> None:
        stopped = httpx.Response(200, content=lines(a_result("a"), a_result("b", **STOPPED), a_result("b", **STOPPED)))
        script.steps = [stopped, httpx.ConnectError("refused")]

        results = operations.exec_stream([Call(lease_id="l-1", tool="bash", call_id=call_id) for call_id in ("a", "b", "b")])
        assert [(index, result.reason) for index, result in results] == [(0, "exit"), (1, "backend_error"), (2, "backend_error")]

    def test_an_acquire_is_sent_again_with_its_key(self, operations: Any, script: Script) -> None:
        script.steps = [problem(503, "draining", stopping=True), problem(503, "draining", stopping=True), httpx.Response(200, json=OK_ACQUIRE)]

        assert operations.acquire().leases[0].lease_id == "l-1"
        first, second, third = script.bodies()
        assert first == second == third

    def test_another_backend_error_is_not_retried(self, operations: Any, script: Script) -> None:
        script.steps = [httpx.Response(200, json=a_result("c-1", **{**STOPPED, "metadata": {}}))]

        assert operations.exec("l-1", "bash", {"command": "ls"}, call_id="c-1").reason == "backend_error"
        assert len(script.requests) == 1


def test_an_item_that_is_not_a_call_is_refused_with_its_index(operations: Any) -> None:
    with pytest.raises(TypeError, match="item 0 is 'x'"):
        operations.exec_batch(["x"])
    with pytest.raises(TypeError, match="item 1 is 7"):
        operations.exec_stream([Call(lease_id="l-1", tool="bash"), 7])


def test_a_mode_is_a_number(operations: Any) -> None:
    with pytest.raises(TypeError, match="0o644, not '0644'"):
        operations.put_file("l-1", "f", b"", mode="0644")


@pytest.mark.parametrize("verb", ["lease", "gang"])
def test_using_a_lease_without_a_with_block_explains_the_usage(client: Any, verb: str) -> None:
    made = getattr(client.inner, verb)(*[2] * (verb == "gang"))

    with pytest.raises(AttributeError, match=rf"no 'bash'.*with client.{verb}\("):
        made.bash("ls")


def test_a_closed_client_raises_client_closed(client: Any, script: Script) -> None:
    script.steps = [httpx.Response(200, json={"pools": []})]
    assert client.pools() == ()
    getattr(client, "close" if hasattr(client.inner, "close") else "aclose")()

    with pytest.raises(errors.ClientClosed, match="closed"):
        client.pools()
    with pytest.raises(errors.ClientClosed):
        client.acquire()
    assert len(script.requests) == 1
