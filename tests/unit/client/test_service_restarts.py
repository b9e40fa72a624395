"""Both clients when an end comes in between: the service's, or their own; and what is asked of them in the wrong way."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from env_client import errors
from env_client.values import Call
from tests.support.scripted_service import FakeTime, Script, a_result, problem
from tests.unit.client.test_senders import OK_ACQUIRE, lines

STOPPED: dict[str, Any] = {"success": False, "exit_code": None, "reason": "backend_error", "fault": "infra", "metadata": {"stopping": True}}


class TestStops:
    """A service that is told to stop, and started again."""

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

    def test_a_streamed_batch_asks_for_what_was_not_done(self, operations: Any, script: Script) -> None:
        script.steps = [httpx.Response(200, content=lines(a_result("a"), a_result("b", **STOPPED))), httpx.Response(200, content=lines(a_result("b")))]

        results = operations.exec_stream([Call(lease_id="l-1", tool="bash", call_id=call_id) for call_id in ("a", "b")])
        assert [(index, result.success) for index, result in results] == [(0, True), (1, True)]
        assert [call["call_id"] for call in script.bodies()[1]["calls"]] == ["b"]

    def test_what_it_said_is_the_answer_when_it_does_not_come_back(self, operations: Any, script: Script, fake_time: FakeTime) -> None:
        script.steps = [httpx.Response(200, json=a_result("c-1", **STOPPED)), httpx.ConnectError("refused")]

        assert operations.exec("l-1", "bash", {"command": "ls"}, call_id="c-1").reason == "backend_error"
        assert 50 < sum(fake_time.slept_s) < 60

    def test_so_it_is_in_a_streamed_batch(self, operations: Any, script: Script) -> None:
        stopped = httpx.Response(200, content=lines(a_result("a"), a_result("b", **STOPPED), a_result("b", **STOPPED)))
        script.steps = [stopped, httpx.ConnectError("refused")]

        results = operations.exec_stream([Call(lease_id="l-1", tool="bash", call_id=call_id) for call_id in ("a", "b", "b")])
        assert [(index, result.reason) for index, result in results] == [(0, "exit"), (1, "backend_error"), (2, "backend_error")]

    def test_an_acquire_is_sent_again_with_its_key(self, operations: Any, script: Script) -> None:
        script.steps = [problem(503, "draining", stopping=True), problem(503, "draining", stopping=True), httpx.Response(200, json=OK_ACQUIRE)]

        assert operations.acquire().leases[0].lease_id == "l-1"
        first, second, third = script.bodies()
        assert first == second == third

    def test_a_backend_error_of_another_kind_is_the_answer(self, operations: Any, script: Script) -> None:
        script.steps = [httpx.Response(200, json=a_result("c-1", **{**STOPPED, "metadata": {}}))]

        assert operations.exec("l-1", "bash", {"command": "ls"}, call_id="c-1").reason == "backend_error"
        assert len(script.requests) == 1


def test_what_is_no_call_is_refused_by_name(operations: Any) -> None:
    with pytest.raises(TypeError, match="item 0 is 'x'"):
        operations.exec_batch(["x"])
    with pytest.raises(TypeError, match="item 1 is 7"):
        operations.exec_stream([Call(lease_id="l-1", tool="bash"), 7])


def test_a_mode_is_a_number(operations: Any) -> None:
    with pytest.raises(TypeError, match="0o644, not '0644'"):
        operations.put_file("l-1", "f", b"", mode="0644")


@pytest.mark.parametrize("verb", ["lease", "gang"])
def test_a_lease_without_its_block_says_how(client: Any, verb: str) -> None:
    made = getattr(client.inner, verb)(*[2] * (verb == "gang"))

    with pytest.raises(AttributeError, match=rf"no 'bash'.*with client.{verb}\("):
        made.bash("ls")


def test_a_closed_client_says_so(client: Any, script: Script) -> None:
    script.steps = [httpx.Response(200, json={"pools": []})]
    assert client.pools() == ()
    getattr(client, "close" if hasattr(client.inner, "close") else "aclose")()

    with pytest.raises(errors.ClientClosed, match="closed"):
        client.pools()
    with pytest.raises(errors.ClientClosed):
        client.acquire()
    assert len(script.requests) == 1
