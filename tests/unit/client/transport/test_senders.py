"""Tests of both clients with a service that sends prepared responses: retries, uploads, downloads, streams."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from env_client import errors
from env_client.values import Call
from tests.support.scripted_responses import FakeTime, Script, a_lease, a_result, problem
from tests.unit.client.streams import CutStream

OK_ACQUIRE = {"leases": [a_lease()], "waited_s": 0.0}


def lines(*results: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(result).encode() + b"\n" for result in results)


class TestHeaders:
    def test_every_request_carries_the_token_and_what_it_accepts(self, operations: Any, script: Script) -> None:
        script.steps = [httpx.Response(200, json=OK_ACQUIRE)]

        operations.acquire()

        headers = script.requests[0].headers
        assert (headers["authorization"], headers["accept"], headers["content-type"]) == ("Bearer s3cret", "application/json", "application/json")
        assert headers["host"] == "pool.test"
        assert int(headers["content-length"]) == len(script.requests[0].content)

    def test_the_read_timeout_fits_the_call(self, operations: Any, script: Script) -> None:
        script.steps = [httpx.Response(200, json=a_result("c-1"))]

        operations.exec("l-1", "bash", {"command": "sleep 90"}, timeout_s=100)

        assert script.requests[0].extensions["timeout"]["read"] == 110


class TestRetries:
    @pytest.mark.parametrize(
        "obstacle",
        [
            httpx.ConnectError("refused"),
            httpx.ReadError("reset"),
            httpx.RemoteProtocolError("disconnected"),
            httpx.ReadTimeout("silence"),
            httpx.Response(502, text="<html>Bad Gateway</html>"),
            httpx.Response(504, text=""),
            problem(503, "storage_unavailable"),
        ],
        ids=repr,
    )
    def test_an_acquire_is_sent_again_with_its_key(self, operations: Any, script: Script, fake_time: FakeTime, obstacle: Any) -> None:
        script.steps = [obstacle, httpx.Response(200, json=OK_ACQUIRE)]

        assert operations.acquire().leases[0].lease_id == "l-1"
        first, second = script.bodies()
        assert first == second
        assert first["request_key"]
        assert fake_time.slept_s == [0.1]

    def test_a_call_is_sent_again_under_its_id(self, operations: Any, script: Script) -> None:
        script.steps = [httpx.ReadError("reset"), httpx.Response(200, json={"results": [a_result("x")]})]

        operations.exec_batch([Call(lease_id="l-1", tool="bash", args={"command": "ls"})])

        first, second = script.bodies()
        assert first == second
        assert first["calls"][0]["call_id"].startswith("c-")

    @pytest.mark.parametrize("answer", [problem(503, "no_capacity"), problem(503, "draining"), problem(503, "backend_unavailable"), problem(500, "internal")])
    def test_a_refusal_is_not_retried(self, operations: Any, script: Script, fake_time: FakeTime, answer: httpx.Response) -> None:
        script.steps = [answer]

        with pytest.raises(errors.ServiceError):
            operations.acquire(wait_s=0)
        assert (len(script.requests), fake_time.slept_s) == (1, [])

    def test_gives_up_early_if_the_service_was_never_reached(
        self, operations: Any, script: Script, fake_time: FakeTime, caplog: pytest.LogCaptureFixture
    ) -> None:
        script.steps = [httpx.ConnectError("refused")]

        with pytest.raises(errors.ConnectFailed, match="is the service running"):
            operations.acquire(wait_s=600)
        assert 5 < sum(fake_time.slept_s) < 10
        assert [record.levelname for record in caplog.records] == ["WARNING"]

    def test_gives_up_when_the_retry_budget_is_used_and_names_the_cause(self, operations: Any, script: Script, fake_time: FakeTime) -> None:
        script.steps = [httpx.Response(200, json={"pools": []}), httpx.ConnectError("refused")]
        operations.pools()

        with pytest.raises(errors.ConnectFailed, match=r"no connection for GET http://pool.test/v1/pools; is the service running\?: refused"):
            operations.pools()
        assert 50 < sum(fake_time.slept_s) < 60

    def test_the_time_of_a_running_call_does_not_count_against_the_retry_budget(self, operations: Any, script: Script, fake_time: FakeTime) -> None:
        def cut(request: httpx.Request) -> httpx.Response:
            fake_time.now_s += 1000
            raise httpx.ReadError("reset")

        script.steps = [cut, httpx.ConnectError("refused")]

        with pytest.raises(errors.ConnectFailed) as caught:
            operations.exec("l-1", "bash", {"command": "make world"}, timeout_s=1800, call_id="c-1")
        assert 50 < sum(fake_time.slept_s) < 60
        assert caught.value.extra == {"call_id": "c-1", "may_have_run": True}

    def test_a_call_that_was_never_sent_has_not_run(self, operations: Any, script: Script) -> None:
        script.steps = [httpx.ConnectError("refused")]

        with pytest.raises(errors.ConnectFailed) as caught:
            operations.exec_batch([Call(lease_id="l-1", tool="bash", call_id="a"), Call(lease_id="l-1", tool="bash", call_id="b")])
        assert caught.value.extra == {"call_ids": ["a", "b"], "may_have_run": False}

    @pytest.mark.parametrize("took_s", [0.0, 30.0])
    def test_a_service_that_takes_requests_and_answers_none_is_given_up(self, operations: Any, script: Script, fake_time: FakeTime, took_s: float) -> None:
        def cut(request: httpx.Request) -> httpx.Response:
            fake_time.now_s += took_s
            raise httpx.ReadError("reset")

        script.steps = [cut]
        began_s = fake_time.now_s

        with pytest.raises(errors.ConnectionLost):
            operations.pools()
        assert 50 < fake_time.now_s - began_s < 100

    def test_an_outage_is_logged_once_and_its_end_once(self, operations: Any, script: Script, caplog: pytest.LogCaptureFixture) -> None:
        script.steps = [*[httpx.ConnectError("refused")] * 4, httpx.Response(200, json={"pools": []})]

        operations.pools()
        operations.pools()

        assert [record.getMessage().partition(",")[0] for record in caplog.records] == [
            "no response from http://pool.test",
            "http://pool.test responds again after 1.5 s",
        ]

    def test_waits_as_long_as_the_service_asks(self, operations: Any, script: Script, fake_time: FakeTime) -> None:
        script.steps = [problem(503, "storage_unavailable", headers={"retry-after": "3"}), httpx.Response(200, json={"pools": []})]

        assert operations.pools() == ()
        assert fake_time.slept_s == [3.0]

    @pytest.mark.parametrize(("after_s", "cuts"), [(60.0, 59), (1.0, 3270)])
    def test_a_proxy_that_cuts_an_hours_call_loses_nothing(self, operations: Any, script: Script, fake_time: FakeTime, after_s: float, cuts: int) -> None:
        def cut(request: httpx.Request) -> httpx.Response:
            fake_time.now_s += after_s
            return httpx.Response(504, text="gateway time-out")

        script.steps = [*[cut] * cuts, httpx.Response(200, json=a_result("c-1"))]
        began_s = fake_time.now_s

        assert operations.exec("l-1", "bash", {"command": "make world"}, timeout_s=3600).success
        assert len(script.requests) == cuts + 1
        assert 3500 < fake_time.now_s - began_s < 3610


class TestErrors:
    def test_a_problem_is_the_error_of_its_code(self, operations: Any, script: Script) -> None:
        script.steps = [problem(503, "no_capacity", headers={"x-request-id": "r-9", "retry-after": "2"}, queue_position=4, waited_s=0.1)]

        with pytest.raises(errors.NoCapacity) as caught:
            operations.acquire(wait_s=0)
        error = caught.value
        assert (error.status, error.code, error.detail, error.request_id, error.retry_after_s) == (503, "no_capacity", "because of no_capacity", "r-9", 2.0)
        assert error.extra == {"queue_position": 4, "waited_s": 0.1}
        assert str(error) == "because of no_capacity [503 no_capacity, request r-9]"

    def test_a_code_of_a_newer_service_is_a_service_error(self, operations: Any, script: Script) -> None:
        script.steps = [problem(418, "teapot")]

        with pytest.raises(errors.ServiceError) as caught:
            operations.pools()
        assert (type(caught.value), caught.value.code) == (errors.ServiceError, "teapot")

    @pytest.mark.parametrize("body", [b"", b"<html>no</html>", b"[]", b'{"error": "other API"}', b"\xff\xfe"])
    def test_what_is_no_problem_document_is_a_bad_answer(self, operations: Any, script: Script, body: bytes) -> None:
        script.steps = [httpx.Response(404, content=body)]

        with pytest.raises(errors.BadAnswer) as caught:
            operations.pools()
        assert caught.value.status == 404


class TestUploads:
    @pytest.mark.parametrize("make", [lambda _: b"content", lambda path: path, lambda path: path.open("rb"), lambda _: [b"con", b"tent"]])
    def test_a_source_that_can_be_read_twice_is_sent_again(self, operations: Any, script: Script, tmp_path: Path, make: Any) -> None:
        (tmp_path / "f").write_bytes(b"content")
        source = make(tmp_path / "f")
        script.steps = [_read_then(httpx.ReadError("reset")), httpx.Response(204)]

        operations.put_file("l-1", "f", source, mode=0o600)

        assert [request.content for request in script.requests] == [b"content", b"content"]
        assert script.requests[0].headers["content-type"] == "application/octet-stream"
        if hasattr(source, "close"):
            source.close()

    def test_a_source_that_can_be_read_once_is_not_sent_again(self, operations: Any, script: Script) -> None:
        script.steps = [_read_then(httpx.ReadError("reset")), httpx.Response(204)]

        with pytest.raises(errors.ConnectionLost):
            operations.put_archive("l-1", ".", iter([b"con", b"tent"]))
        assert [request.content for request in script.requests] == [b"content"]

    def test_a_source_that_can_be_read_once_is_sent_again_if_it_was_not_read(self, operations: Any, script: Script) -> None:
        script.steps = [httpx.ConnectError("refused"), _read_then(None)]

        operations.put_archive("l-1", ".", iter([b"con", b"tent"]))

        assert script.requests[1].content == b"content"

    def test_a_file_is_sent_from_where_it_stands(self, operations: Any, script: Script) -> None:
        file = io.BytesIO(b"skipped content")
        file.seek(8)
        script.steps = [_read_then(httpx.ReadError("reset")), _read_then(None)]

        operations.put_file("l-1", "f", file)

        assert [request.content for request in script.requests] == [b"content", b"content"]

    def test_a_known_size_is_sent(self, operations: Any, script: Script, tmp_path: Path) -> None:
        (tmp_path / "f").write_bytes(b"content")
        script.steps = [_read_then(None)]

        operations.put_file("l-1", "f", tmp_path / "f")
        operations.put_file("l-1", "f", iter([b"content"]))

        assert [request.headers.get("content-length") for request in script.requests] == ["7", None]
        assert script.requests[1].headers["transfer-encoding"] == "chunked"

    def test_a_plain_string_is_refused(self, operations: Any) -> None:
        with pytest.raises(TypeError, match="not a str"):
            operations.put_file("l-1", "f", "content")


def _read_then(error: Exception | None) -> Any:
    """Return a step that reads the whole body before it raises or responds."""

    def step(request: httpx.Request) -> httpx.Response:
        assert request.content == b"content"
        if error is not None:
            raise error
        return httpx.Response(204)

    return step


class TestDownloads:
    def test_a_file_is_had_whole(self, operations: Any, script: Script) -> None:
        script.steps = [httpx.Response(200, stream=CutStream(b"par")), httpx.Response(200, content=b"\x00whole")]

        assert operations.get_file("l-1", "f") == b"\x00whole"

    def test_a_local_file_is_replaced_once_all_is_there(self, operations: Any, script: Script, tmp_path: Path) -> None:
        target = tmp_path / "out"
        target.write_bytes(b"old")

        def look(request: httpx.Request) -> httpx.Response:
            assert target.read_bytes() == b"old"
            return httpx.Response(200, content=b"whole")

        script.steps = [httpx.Response(200, stream=CutStream(b"par")), look]

        assert operations.get_file_to("l-1", "f", target) == 5
        assert target.read_bytes() == b"whole"
        assert list(tmp_path.iterdir()) == [target]

    def test_a_download_that_fails_leaves_nothing(self, operations: Any, script: Script, tmp_path: Path) -> None:
        script.steps = [problem(404, "file_not_found")]

        with pytest.raises(errors.FileNotFound):
            operations.get_archive_to("l-1", ".", tmp_path / "out")
        assert list(tmp_path.iterdir()) == []

    def test_a_stream_is_requested_again_only_until_it_begins(self, operations: Any, script: Script) -> None:
        script.steps = [httpx.ConnectError("refused"), httpx.Response(200, stream=CutStream(b"par"))]

        with pytest.raises(errors.ConnectionLost):
            operations.stream_archive("l-1", ".")
        assert len(script.requests) == 2

    def test_an_archive_is_not_unpacked_on_the_way(self, operations: Any, script: Script) -> None:
        packed = gzip.compress(b"tar")
        script.steps = [httpx.Response(200, content=packed, headers={"content-type": "application/gzip"})]

        assert operations.stream_archive("l-1") == [packed]


class TestStreamedBatch:
    CALLS = (Call(lease_id="l-1", tool="bash", call_id="a"), Call(lease_id="l-2", tool="bash", call_id="b"), Call(lease_id="l-2", tool="bash", call_id="c"))

    def test_results_come_in_the_order_of_finishing(self, operations: Any, script: Script) -> None:
        script.steps = [httpx.Response(200, content=b"\n" + lines(a_result("b", "l-2"), a_result("a")) + b"\n\n" + lines(a_result("c", "l-2")))]

        assert [(index, result.call_id) for index, result in operations.exec_stream(self.CALLS)] == [(1, "b"), (0, "a"), (2, "c")]
        assert script.requests[0].headers["accept"] == "application/x-ndjson"

    @pytest.mark.parametrize("cut", [lines(a_result("b", "l-2")), lines(a_result("b", "l-2")) + b'{"call_id": "a", "lea'])
    def test_a_cut_stream_goes_on_with_what_is_missing(self, operations: Any, script: Script, cut: bytes) -> None:
        script.steps = [httpx.Response(200, stream=CutStream(cut)), httpx.Response(200, content=lines(a_result("c", "l-2"), a_result("a")))]

        assert [(index, result.call_id) for index, result in operations.exec_stream(self.CALLS)] == [(1, "b"), (2, "c"), (0, "a")]
        assert [call["call_id"] for call in script.bodies()[1]["calls"]] == ["a", "c"]

    def test_an_answer_that_ends_early_is_no_end(self, operations: Any, script: Script) -> None:
        script.steps = [httpx.Response(200, content=lines(a_result("a"))), httpx.Response(200, content=lines(a_result("b", "l-2"), a_result("c", "l-2")))]

        assert [index for index, _ in operations.exec_stream(self.CALLS)] == [0, 1, 2]

    def test_a_line_may_come_in_pieces(self, operations: Any, script: Script) -> None:
        whole = lines(a_result("a", output="é\n"), a_result("b", "l-2"), a_result("c", "l-2"))

        class Pieces(CutStream):
            def __iter__(self) -> Iterator[bytes]:
                yield from (whole[i : i + 1] for i in range(len(whole)))

            async def __aiter__(self) -> AsyncIterator[bytes]:
                for i in range(len(whole)):
                    yield whole[i : i + 1]

        script.steps = [httpx.Response(200, stream=Pieces())]

        assert [result.output for _, result in operations.exec_stream(self.CALLS)] == ["é\n", "", ""]

    def test_the_same_call_twice_has_two_results(self, operations: Any, script: Script) -> None:
        script.steps = [httpx.Response(200, content=lines(a_result("a"), a_result("a")))]

        assert [index for index, _ in operations.exec_stream([self.CALLS[0], self.CALLS[0]])] == [0, 1]

    def test_a_refused_batch_is_an_error(self, operations: Any, script: Script) -> None:
        script.steps = [problem(422, "invalid_request")]

        with pytest.raises(errors.InvalidRequest):
            operations.exec_stream(self.CALLS)

    def test_a_result_of_an_unknown_call_is_a_bad_answer(self, operations: Any, script: Script) -> None:
        script.steps = [httpx.Response(200, content=lines(a_result("z")))]

        with pytest.raises(errors.BadAnswer, match="'z'"):
            operations.exec_stream(self.CALLS)


def test_leases_are_listed_page_by_page(operations: Any, script: Script) -> None:
    script.steps = [
        httpx.Response(200, json={"leases": [a_lease("l-1")], "next_cursor": "n"}),
        httpx.Response(200, json={"leases": [a_lease("l-2")], "next_cursor": None}),
    ]

    assert [info.lease_id for info in operations.iter_leases(run_id="r-1")] == ["l-1", "l-2"]
    assert [str(request.url.query, "ascii") for request in script.requests] == ["run_id=r-1", "run_id=r-1&cursor=n"]
