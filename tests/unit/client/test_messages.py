"""Tests of the messages: the requests that are built, and how responses are parsed."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from env_client import errors
from env_client.messages import calls, files, leases, service
from env_client.messages.message import Message, Response
from env_client.values import AcquireOptions, Call, Result
from tests.support.scripted_responses import a_lease, a_result


def body(message: Message[Any]) -> Any:
    assert message.body is not None
    return json.loads(message.body)


def answer(document: Any, status: int = 200) -> Response:
    return Response(status, json.dumps(document).encode())


class TestAcquire:
    def test_options_that_are_not_given_are_not_sent(self) -> None:
        asked = body(leases.acquire_message(None, 1))

        assert asked.pop("request_key").startswith("k-")
        assert asked == {"count": 1}

    def test_options_are_sent(self) -> None:
        asked: AcquireOptions = {"trajectory_ids": ["a", "b"], "run_id": "r", "ttl_s": 60, "wait_s": 0, "allow_network": False}
        asked |= {"cache": "rw", "priority": 2, "labels": {"x": "y"}}

        assert body(leases.acquire_message("p", 2, request_key="mine", **asked)) == {"pool": "p", "count": 2, "request_key": "mine", **asked}

    def test_each_has_a_key_of_its_own(self) -> None:
        assert body(leases.acquire_message(None, 1))["request_key"] != body(leases.acquire_message(None, 1))["request_key"]

    def test_waits_as_long_as_it_may_queue(self) -> None:
        assert leases.acquire_message(None, 1, wait_s=100).read_timeout_s == 110
        assert leases.acquire_message(None, 1).read_timeout_s > 600
        assert leases.acquire_message(None, 1, wait_s=1e300).read_timeout_s < 100_000

    def test_reads_the_leases(self) -> None:
        acquired = leases.acquire_message(None, 1).parse(answer({"leases": [a_lease("l-1"), a_lease("l-2")], "waited_s": 0.5, "newer": True}))

        assert [info.lease_id for info in acquired.leases] == ["l-1", "l-2"]
        assert (acquired.waited_s, acquired.leases[0].epoch, acquired.leases[0].workspace) == (0.5, 7, "/workspace")


class TestExec:
    def test_a_call_is_sent_with_its_id_and_options(self) -> None:
        message = calls.exec_batch_message([(Call(lease_id="l-1", tool="bash", args={"command": "ls"}, timeout_s=5, encoding="base64"), "c-1")])

        assert body(message) == {
            "calls": [{"call_id": "c-1", "lease_id": "l-1", "tool": "bash", "args": {"command": "ls"}, "timeout_s": 5, "encoding": "base64"}]
        }

    def test_waits_as_long_as_the_slowest_lease(self) -> None:
        batch = [Call(lease_id=lease_id, tool="bash", timeout_s=timeout_s) for lease_id, timeout_s in (("a", 30), ("a", 60), ("b", 50))]

        message = calls.exec_batch_message(calls.assign_call_ids(batch))

        assert (message.response_timeout_s, message.read_timeout_s) == (100, 100)

    def test_the_request_of_a_long_call_is_repeated_to_rejoin_it(self) -> None:
        message = calls.exec_message(Call(lease_id="a", tool="bash", timeout_s=3000))

        assert (message.response_timeout_s, message.read_timeout_s) == (3010, calls.REJOIN_INTERVAL_S)

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("lease_id", None),
            ("tool", 7),
            ("call_id", 7),
            ("timeout_s", "soon"),
            ("timeout_s", True),
            ("no_output_timeout_s", [1]),
            ("output_limit_bytes", 1.5),
            ("separate_streams", 1),
            ("encoding", b"utf-8"),
        ],
    )
    def test_what_a_program_itself_says_is_of_its_type(self, field: str, value: Any) -> None:
        with pytest.raises(errors.InvalidRequest, match=f"^{field}: must be ") as raised:
            Call(**{"lease_id": "a", "tool": "bash", field: value})

        assert raised.value.extra["field"] == field

    @pytest.mark.parametrize("args", [[], "ls", 0, {"command": 7}, {"nonsense": None}])
    def test_arguments_may_be_whatever_a_model_says(self, args: Any) -> None:
        assert body(calls.exec_message(calls.make_call("a", "bash", args)))["args"] == args

    def test_one_call_has_its_lease_in_the_path(self) -> None:
        message = calls.exec_message(calls.make_call("l/1 ?", "bash", {"command": "ls"}, call_id="c-1"))

        assert message.path == "/v1/leases/l%2F1%20%3F/exec"
        assert body(message) == {"call_id": "c-1", "tool": "bash", "args": {"command": "ls"}}

    def test_results_are_read_in_order(self) -> None:
        message = calls.exec_batch_message(calls.assign_call_ids([Call(lease_id="l-1", tool="bash"), Call(lease_id="l-1", tool="bash")]))

        results = message.parse(answer({"results": [a_result("c-1", output="ä"), a_result("c-2", reason="of_the_future")]}))

        assert [result.call_id for result in results] == ["c-1", "c-2"]
        assert (results[0].raw_output(), results[1].reason) == ("ä".encode(), "of_the_future")

    def test_exact_bytes_come_back(self) -> None:
        coded = base64.b64encode(b"\xff\x00").decode()
        message = calls.exec_message(Call(lease_id="l-1", tool="bash"))

        assert message.parse(answer(a_result("c-1", output=coded, encoding="base64"))).raw_output() == b"\xff\x00"

    @pytest.mark.parametrize("args", [{"x": float("nan")}, {"x": b"bytes"}, {"x": "\ud800"}])
    def test_what_is_no_json_is_refused_before_it_is_sent(self, args: dict[str, Any]) -> None:
        with pytest.raises(errors.InvalidRequest, match="cannot be written as JSON"):
            calls.exec_message(Call(lease_id="l-1", tool="bash", args=args))


@pytest.mark.parametrize(
    ("message", "method", "path", "asked"),
    [
        (leases.release_message(["l-1"], None, True), "POST", "/v1/release", {"lease_ids": ["l-1"], "reset_workspace": True}),
        (leases.release_message(None, "r-1", False), "POST", "/v1/release", {"run_id": "r-1", "reset_workspace": False}),
        (leases.release_message(None, None, True, "k"), "POST", "/v1/release", {"request_key": "k", "reset_workspace": True}),
        (leases.release_cancelled_message("k"), "POST", "/v1/release", {"request_key": "k", "reset_workspace": True}),
        (leases.renew_message(("l-1",), 60), "POST", "/v1/renew", {"lease_ids": ["l-1"], "ttl_s": 60}),
        (calls.cancel_message("l-1", "c-1"), "POST", "/v1/cancel", {"lease_id": "l-1", "call_id": "c-1"}),
        (leases.get_lease_message("l-1"), "GET", "/v1/leases/l-1", None),
        (leases.list_leases_message("r 1", None, 10, None), "GET", "/v1/leases?run_id=r%201&limit=10", None),
        (leases.list_leases_message(None, None, None, None), "GET", "/v1/leases", None),
        (files.get_file_message("l-1", "a b/ä&c"), "GET", "/v1/leases/l-1/files?path=a%20b%2F%C3%A4%26c", None),
        (files.put_file_message("l-1", "a", 0o644), "PUT", "/v1/leases/l-1/files?path=a&mode=0644", None),
        (files.put_file_message("l-1", "a", None), "PUT", "/v1/leases/l-1/files?path=a", None),
        (files.list_files_message("l-1", ".", True), "GET", "/v1/leases/l-1/files/list?path=.&recursive=1", None),
        (files.list_files_message("l-1", ".", False), "GET", "/v1/leases/l-1/files/list?path=.", None),
        (files.get_archive_message("l-1", "."), "GET", "/v1/leases/l-1/archive?path=.", None),
        (files.put_archive_message("l-1", "."), "PUT", "/v1/leases/l-1/archive?path=.", None),
        (service.list_pools_message(), "GET", "/v1/pools", None),
        (service.get_pool_message("a/b"), "GET", "/v1/pools/a%2Fb", None),
        (service.list_pools_message("n"), "GET", "/v1/pools?cursor=n", None),
        (service.put_pool_message("p", {"min_sandboxes": 2}), "PUT", "/v1/pools/p", {"min_sandboxes": 2}),
        (service.delete_pool_message("p", False), "DELETE", "/v1/pools/p", None),
        (service.delete_pool_message("p", True), "DELETE", "/v1/pools/p?force=1", None),
        (service.verify_pool_message("p"), "POST", "/v1/pools/p/verify", None),
        (service.list_sandboxes_message(5, "n"), "GET", "/v1/sandboxes?limit=5&cursor=n", None),
        (service.drain_sandbox_message("s-1"), "POST", "/v1/sandboxes/s-1/drain", None),
        (service.events_message(None), "GET", "/v1/events", None),
        (service.metrics_message(), "GET", "/metrics", None),
        (service.agent_pyz_message(), "GET", "/v1/agent.pyz", None),
        (leases.narrow_message("l-1", False, None), "POST", "/v1/leases/l-1/narrow", {"allow_network": False}),
        (leases.narrow_message("l-1", None, "none"), "POST", "/v1/leases/l-1/narrow", {"cache": "none"}),
        (leases.narrow_message("l-1", None, None, ("tests", "a")), "POST", "/v1/leases/l-1/narrow", {"read_only": ["tests", "a"]}),
        (calls.call_status_message("l-1", "c:1", None), "GET", "/v1/leases/l-1/calls/c%3A1", None),
        (calls.call_status_message("l-1", "c-1", 2.5), "GET", "/v1/leases/l-1/calls/c-1?wait_s=2.5", None),
        (calls.call_events_message("l-1", "c-1", 7, 60), "GET", "/v1/leases/l-1/calls/c-1/events?offset=7", None),
        (calls.call_output_message("l-1", "c-1", 0), "GET", "/v1/leases/l-1/calls/c-1/output", None),
        (calls.call_output_message("l-1", "c-1", 7), "GET", "/v1/leases/l-1/calls/c-1/output?offset=7", None),
        (service.healthz_message(), "GET", "/healthz", None),
        (service.readyz_message("p"), "GET", "/readyz?pool=p", None),
    ],
)
def test_each_message_has_its_method_path_and_body(message: Message[Any], method: str, path: str, asked: Any) -> None:
    assert (message.method, message.path) == (method, path)
    assert (None if message.body is None else json.loads(message.body)) == asked


def test_lost_leases_are_errors_of_their_code() -> None:
    renewed = leases.renew_message(["l-1", "l-2"], None).parse(
        answer({"leases": [a_lease("l-1")], "lost": [{"lease_id": "l-2", "code": "sandbox_lost", "detail": "its agent died"}]})
    )

    assert [info.lease_id for info in renewed.leases] == ["l-1"]
    assert isinstance(renewed.lost["l-2"], errors.SandboxLost)
    assert renewed.lost["l-2"].detail == "its agent died"


def test_not_ready_is_an_answer() -> None:
    readiness = service.readyz_message(None).parse(answer({"status": "starting"}, 503))

    assert (readiness.ready, readiness.report) == (False, {"status": "starting"})


@pytest.mark.parametrize(
    ("message", "document"),
    [
        (leases.acquire_message(None, 1), []),
        (leases.acquire_message(None, 1), {"leases": 3}),
        (leases.acquire_message(None, 1), {"leases": [{"pool": "no id"}]}),
        (calls.exec_batch_message(calls.assign_call_ids([Call(lease_id="l-1", tool="bash")])), {"results": []}),
        (calls.exec_message(Call(lease_id="l-1", tool="bash")), {"call_id": "c-1"}),
        (calls.exec_message(Call(lease_id="l-1", tool="bash")), "text"),
        (leases.release_message(["l-1"], None, True), {"released": None}),
        (leases.renew_message(["l-1"], None), {"leases": [], "lost": [{}]}),
        (files.list_files_message("l-1", ".", False), {"entries": [{"type": "file"}]}),
        (service.list_pools_message(), {"pools": [1]}),
    ],
)
def test_an_answer_of_another_shape_is_a_bad_answer(message: Message[Any], document: Any) -> None:
    with pytest.raises(errors.BadAnswer):
        message.parse(answer(document))


def test_an_answer_that_is_no_json_is_a_bad_answer() -> None:
    with pytest.raises(errors.BadAnswer, match="not JSON"):
        service.list_pools_message().parse(Response(200, b"<html>"))


def test_a_result_says_what_it_lacks() -> None:
    with pytest.raises(errors.BadAnswer, match="Result without fault, reason"):
        calls.parse_result_line(b'{"call_id":"c","lease_id":"l","success":true}')


def test_fields_have_the_contracts_defaults() -> None:
    result = calls.parse_result_line(json.dumps(a_result("c-1")).encode())

    assert result == Result(call_id="c-1", lease_id="l-1", success=True, exit_code=0, reason="exit", fault="none")
