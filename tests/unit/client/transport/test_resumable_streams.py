"""Tests of both clients: streams are resumed where their connection was cut."""

from __future__ import annotations

import base64
import json
from typing import Any

import httpx
import pytest

from env_client import errors
from env_client.values import Event, Output, Result
from tests.support.scripted_responses import FakeTime, Script, a_result, problem
from tests.unit.client.streams import CutStream


def output(text: str, offset: int, **more: Any) -> bytes:
    return f"id: {offset}\nevent: output\ndata: {json.dumps({'data': text, **more})}\n\n".encode()


def result(call_id: str = "c-1", **fields: Any) -> bytes:
    return f"event: result\ndata: {json.dumps(a_result(call_id, **fields))}\n\n".encode()


def streamed(*chunks: bytes) -> httpx.Response:
    return httpx.Response(200, content=b"".join(chunks), headers={"content-type": "text/event-stream"})


STOPPED: dict[str, Any] = {
    "success": False,
    "exit_code": None,
    "reason": "backend_error",
    "fault": "infra",
    "metadata": {"stopping": True, "may_have_run": True},
}


def exec_events(operations: Any, **options: Any) -> list[Any]:
    return list(operations.exec_events("l-1", "bash", {"command": "ls"}, call_id="c-1", **options))


class TestExecEvents:
    def test_gives_output_as_it_comes_and_then_the_result(self, operations: Any, script: Script) -> None:
        script.steps = [streamed(b":\n\n", output("a", 1), output("bä", 4), result())]

        *pieces, last = exec_events(operations)

        assert pieces == [Output(data=b"a", offset=1), Output(data="bä".encode(), offset=4)]
        assert isinstance(last, Result)
        assert script.requests[0].headers["accept"] == "text/event-stream"

    def test_a_cut_is_taken_up_at_its_byte(self, operations: Any, script: Script) -> None:
        script.steps = [httpx.Response(200, stream=CutStream(output("abc", 3), b"id: 9\nevent: out")), streamed(output("def", 6), result())]

        pieces = exec_events(operations)

        assert b"".join(piece.data for piece in pieces[:-1]) == b"abcdef"
        assert [(request.method, request.url.path, request.url.query) for request in script.requests] == [
            ("POST", "/v1/leases/l-1/exec", b""),
            ("GET", "/v1/leases/l-1/calls/c-1/events", b"offset=3"),
        ]

    def test_a_cut_before_the_first_event_asks_for_the_same_call(self, operations: Any, script: Script) -> None:
        script.steps = [httpx.Response(200, stream=CutStream(b":\n\n")), httpx.ReadError("reset"), streamed(result())]

        exec_events(operations)

        assert [request.method for request in script.requests] == ["POST"] * 3
        assert script.bodies()[0] == script.bodies()[2]

    def test_an_answer_that_ends_early_is_no_end(self, operations: Any, script: Script) -> None:
        script.steps = [streamed(output("a", 1)), streamed(result())]

        assert len(exec_events(operations)) == 2

    def test_what_came_already_is_not_given_twice(self, operations: Any, script: Script) -> None:
        script.steps = [httpx.Response(200, stream=CutStream(output("abc", 3))), streamed(output("abc", 3), output("d", 4), result())]

        assert [piece.data for piece in exec_events(operations)[:-1]] == [b"abc", b"d"]

    def test_exact_bytes_come_as_base64(self, operations: Any, script: Script) -> None:
        coded = base64.b64encode(b"\xff\x00").decode()
        script.steps = [streamed(output(coded, 2, encoding="base64"), output("text", 6, encoding="utf-8"), output("late", 10), result())]

        assert [piece.data for piece in exec_events(operations, encoding="base64")[:-1]] == [b"\xff\x00", b"text", b"late"]

    @pytest.mark.parametrize("coded", ["nonsense!", "ä", "YQ"])
    def test_what_is_not_the_base64_it_says_is_a_bad_answer(self, operations: Any, script: Script, coded: str) -> None:
        script.steps = [streamed(output(coded, 2, encoding="base64"))]

        with pytest.raises(errors.BadAnswer, match="base64"):
            exec_events(operations, encoding="base64")
        with pytest.raises(errors.BadAnswer, match="base64"):
            Result(call_id="c", lease_id="l", success=True, reason="exit", fault="none", output=coded, encoding="base64").raw_output()

    @pytest.mark.parametrize("block", [b"event: output\ndata: {}\n\n", b'event: output\ndata: {"data": "a"}\n\n', b"id: 1\nevent: output\ndata: nonsense\n\n"])
    def test_an_event_of_another_shape_is_a_bad_answer(self, operations: Any, script: Script, block: bytes) -> None:
        script.steps = [streamed(block)]

        with pytest.raises(errors.BadAnswer):
            exec_events(operations)

    def test_a_lease_that_has_ended_is_an_error(self, operations: Any, script: Script) -> None:
        script.steps = [httpx.Response(200, stream=CutStream(output("a", 1))), problem(410, "lease_lost")]

        with pytest.raises(errors.LeaseLost):
            exec_events(operations)

    def test_a_service_that_is_gone_is_given_up(self, operations: Any, script: Script, fake_time: FakeTime) -> None:
        script.steps = [httpx.Response(200, stream=CutStream(output("a", 1))), httpx.ConnectError("refused")]

        with pytest.raises(errors.ConnectFailed):
            exec_events(operations, timeout_s=10)
        assert 50 < sum(fake_time.slept_s) < 60

    def test_a_call_that_a_stopping_service_did_not_finish_is_sent_again(self, operations: Any, script: Script) -> None:
        script.steps = [streamed(output("abc", 3), result(**STOPPED)), httpx.ConnectError("refused"), streamed(output("d", 4), result())]

        *pieces, last = exec_events(operations)

        assert (b"".join(piece.data for piece in pieces), last.success) == (b"abcd", True)
        assert [(request.method, request.headers.get("last-event-id")) for request in script.requests] == [("POST", None), ("POST", "3"), ("POST", "3")]
        assert script.bodies()[0] == script.bodies()[2]

    def test_the_unfinished_result_is_returned_if_the_service_stays_stopped(self, operations: Any, script: Script) -> None:
        script.steps = [streamed(output("abc", 3), result(**STOPPED)), httpx.ConnectError("refused")]

        _, last = exec_events(operations)

        assert (last.reason, last.metadata["may_have_run"]) == ("backend_error", True)


class TestCallOutput:
    def test_is_taken_up_at_its_byte(self, operations: Any, script: Script) -> None:
        script.steps = [httpx.Response(200, stream=CutStream(b"ab")), httpx.Response(200, content=b"cd")]

        assert b"".join(operations.call_output("l-1", "c-1", offset=5)) == b"abcd"
        assert [request.url.query for request in script.requests] == [b"offset=5", b"offset=7"]


class TestCallStatus:
    def test_running_and_done(self, operations: Any, script: Script) -> None:
        script.steps = [
            httpx.Response(200, json={"state": "running", "output_bytes": 3, "started_at": 1.5}),
            httpx.Response(200, json={"state": "done", "result": a_result("c-1")}),
        ]

        running, done = operations.call_status("l-1", "c-1"), operations.call_status("l-1", "c-1", wait_s=5)

        assert (running.state, running.output_bytes, running.result) == ("running", 3, None)
        assert done.result.call_id == "c-1"

    def test_done_without_a_result_is_a_bad_answer(self, operations: Any, script: Script) -> None:
        script.steps = [httpx.Response(200, json={"state": "done"})]

        with pytest.raises(errors.BadAnswer):
            operations.call_status("l-1", "c-1")


class TestEvents:
    def test_go_on_after_the_last_one(self, operations: Any, script: Script) -> None:
        block = b'id: 7\nevent: lease.acquired\ndata: {"at": 2.5, "lease_id": "l-1"}\n\n'
        script.steps = [httpx.Response(200, stream=CutStream(block)), problem(403, "forbidden")]

        with pytest.raises(errors.Forbidden):
            operations.events(after="3")
        assert [request.headers["last-event-id"] for request in script.requests] == ["3", "7"]

    def test_are_read(self, script: Script) -> None:
        from env_client.transport.resumable_streams import ServiceEventStream

        block = b'id: 7\nevent: lease.acquired\ndata: {"at": 2.5, "lease_id": "l-1"}\n\n'

        assert list(ServiceEventStream(None).feed(block)) == [Event(kind="lease.acquired", id="7", at=2.5, data={"lease_id": "l-1"})]


def test_lists_are_read_page_by_page(operations: Any, script: Script) -> None:
    script.steps = [
        httpx.Response(200, json={"pools": [{"name": "a"}], "next_cursor": "n"}),
        httpx.Response(200, json={"pools": [{"name": "b"}], "next_cursor": None}),
        httpx.Response(200, json={"sandboxes": [{"sandbox_id": "s-1"}], "next_cursor": "m"}),
        httpx.Response(200, json={"sandboxes": [{"sandbox_id": "s-2"}]}),
    ]

    assert [pool.name for pool in operations.pools()] == ["a", "b"]
    assert [info.sandbox_id for info in operations.iter_sandboxes()] == ["s-1", "s-2"]


def test_a_pool_is_made_or_changed(operations: Any, script: Script) -> None:
    script.steps = [httpx.Response(201, json={"name": "p"}), httpx.Response(200, json={"name": "p"}), httpx.Response(202)]

    assert [operations.pool_put("p", {}).created for _ in range(2)] == [True, False]
    assert operations.pool_delete("p", force=True) is None


def test_an_admin_names_the_tenant_on_every_page_and_verb(operations: Any, script: Script) -> None:
    pool = {"name": "p", "tenant": "bob", "shared": False}
    script.steps = [
        httpx.Response(200, json={"pools": [pool], "next_cursor": "n"}),
        httpx.Response(200, json={"pools": []}),
        httpx.Response(200, json=pool),
        httpx.Response(201, json=pool),
        httpx.Response(202),
        httpx.Response(200, json={"pool": "p", "slots": [], "clean": True}),
    ]

    assert [found.tenant for found in operations.pools(tenant="*")] == ["bob"]
    assert operations.pool("p", tenant="bob").tenant == "bob"
    assert operations.pool_put("p", {}, tenant="bob").pool.tenant == "bob"
    operations.pool_delete("p", tenant="bob", force=True)
    operations.pool_verify("p", tenant="bob")

    assert [request.url.params.get("tenant") for request in script.requests] == ["*", "*", *["bob"] * 4]


def test_a_verify_is_read(operations: Any, script: Script) -> None:
    check = {"slot_id": "s-1/0", "planted": [{"kind": "file", "detail": "x"}], "found": ["file"], "left": [], "clean": True, "duration_s": 0.5}
    script.steps = [httpx.Response(200, json={"pool": "p", "slots": [check], "clean": True}), httpx.Response(200, json={"pool": "p", "slots": [check]})]

    report = operations.pool_verify("p")

    assert (report.clean, report.slots[0].found) == (True, ["file"])
    with pytest.raises(errors.BadAnswer):
        operations.pool_verify("p")


def test_figures_and_the_agent_come_as_they_are(operations: Any, script: Script) -> None:
    script.steps = [httpx.Response(200, text="sandbox_slots 3\n"), httpx.Response(200, content=b"PK")]

    assert (operations.metrics(), operations.agent_pyz()) == ("sandbox_slots 3\n", b"PK")
