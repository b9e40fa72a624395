"""What bad input gets: a clear answer, and nothing else suffers."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sandbox_server.api.limits import Limits
from tests.support.service_harness import POOL, ServiceHarness, bash, open_service_harness

BODIES: dict[str, tuple[bytes, str]] = {
    "not JSON": (b"not json", "JSON"),
    "cut short": (b'{"count": 1', "JSON"),
    "empty": (b"", "empty"),
    "not UTF-8": (b'{"pool": "\xff"}', "JSON"),
    "NaN": (b'{"ttl_s": NaN}', "JSON"),
    "a lone surrogate": (b'"\\ud800"', "JSON"),
    "a list": (b"[]", "object"),
    "a number": (b"7", "object"),
    "too deep": (b'{"labels":' * 100 + b"1" + b"}" * 100, "json_depth"),
    "a key twice": (b'{"count": 1, "count": 2}', "'count' twice"),
    "a key twice in disguise": (b'{"count": 1, "\\u0063ount": 2}', "'count' twice"),
    "a key twice, deep down": (b'{"labels": {"a": "1", "b": "2", "a": "3"}}', "'a' twice"),
    "an endless number": (b'{"ttl_s": 1e99999}', "JSON"),
    "minus infinity": (b'{"ttl_s": -Infinity}', "JSON"),
    "two documents": (b"{}{}", "JSON"),
    "a byte order mark": (b"\xef\xbb\xbf{}", "JSON"),
    "far too deep": (b"[" * 90_000 + b"]" * 90_000, "JSON"),
}
ACQUIRES: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown field": ({"cuont": 1}, "cuont"),
    "no slots": ({"count": 0}, "count"),
    "a fraction of a slot": ({"count": 1.5}, "count"),
    "a count in words": ({"count": "one"}, "count"),
    "a yes for a count": ({"count": True}, "count"),
    "more than the pool can ever hold": ({"count": 5}, "count"),
    "absurdly many": ({"count": 10**30}, "count"),
    "no time to live": ({"ttl_s": 0}, "ttl_s"),
    "a day and a second": ({"ttl_s": 86_401}, "ttl_s"),
    "a negative wait": ({"wait_s": -1}, "wait_s"),
    "an infinite wait": ({"wait_s": 1e999}, "body"),
    "another cache": ({"cache": "both"}, "cache"),
    "trajectories for another count": ({"count": 2, "trajectory_ids": ["t"]}, "trajectory_ids"),
    "one trajectory for a gang": ({"count": 2, "trajectory_id": "t"}, "trajectory_id"),
    "labels of numbers": ({"labels": {"a": 1}}, "labels.a"),
    "a run with a NUL": ({"run_id": "a\0b"}, "run_id"),
    "a trajectory with a line end": ({"trajectory_id": "a\nb"}, "trajectory_id"),
    "a key with an escape": ({"request_key": "\x1b[31m"}, "request_key"),
    "a label with a NUL": ({"labels": {"a": "\0"}}, "labels.a"),
    "labels that are a list": ({"labels": []}, "labels"),
    "an empty name": ({"run_id": ""}, "run_id"),
    "a long key": ({"request_key": "k" * 1000}, "request_key"),
    "a priority beyond all": ({"priority": 10**9}, "priority"),
}
POLICYS, CALLERS = "invalid_args policy", "invalid_args infra"
ITEMS: dict[str, tuple[dict[str, Any], str, str]] = {
    "an unknown tool": ({"tool": "sudo"}, POLICYS, "sudo"),
    "an unknown field": ({"timeout": 3}, CALLERS, "timeout"),
    "arguments that are no object": ({"args": "ls"}, POLICYS, "args"),
    "arguments that are a list": ({"args": []}, POLICYS, "args"),
    "arguments and a time that are none": ({"args": "ls", "timeout_s": 0}, CALLERS, "timeout_s"),
    "no time": ({"timeout_s": 0}, CALLERS, "timeout_s"),
    "time backwards": ({"timeout_s": -5}, CALLERS, "timeout_s"),
    "a time beyond all": ({"timeout_s": 1e300}, CALLERS, "timeout_s"),
    "more than the pool's max_timeout_s": ({"timeout_s": 601}, CALLERS, "timeout_s"),
    "silence of no length": ({"no_output_timeout_s": 0}, CALLERS, "no_output_timeout_s"),
    "too much output": ({"output_limit_bytes": (10 << 20) + 1}, CALLERS, "output_limit_bytes"),
    "another encoding": ({"encoding": "latin-1"}, CALLERS, "encoding"),
    "a call_id with a space": ({"call_id": "a b"}, CALLERS, "call_id"),
    "a long call_id": ({"call_id": "c" * 129}, CALLERS, "call_id"),
    "an unknown lease": ({"lease_id": "nobodys"}, "lease_lost ambiguous", "nobodys"),
    "huge arguments": ({"args": {"command": "x" * 60_000}}, POLICYS, "call_bytes"),
}
BATCHES: dict[str, tuple[Any, str]] = {
    "no calls": ({"call": []}, "calls"),
    "no list": ({"calls": {}}, "calls"),
    "an empty list": ({"calls": []}, "calls"),
    "1,001 calls": ({"calls": [{"lease_id": "l", "tool": "bash"}] * 1001}, "1000"),
    "an item that is no object": ({"calls": ["ls"]}, "calls.0"),
    "an item without a lease": ({"calls": [{"tool": "bash"}]}, "calls.0"),
    "an item without a tool": ({"calls": [{"lease_id": "l"}]}, "calls.0"),
    "a lease that is no text": ({"calls": [{"lease_id": 7, "tool": "bash"}]}, "calls.0"),
}
OTHERS: dict[str, tuple[str, str, dict[str, Any] | None, str]] = {
    "release of nothing": ("POST", "/v1/release", {}, "lease_ids"),
    "release of both": ("POST", "/v1/release", {"lease_ids": [], "run_id": "r"}, "lease_ids"),
    "release of a run and a key": ("POST", "/v1/release", {"run_id": "r", "request_key": "k"}, "lease_ids"),
    "renew of nothing": ("POST", "/v1/renew", {}, "lease_ids"),
    "cancel without a call": ("POST", "/v1/cancel", {"lease_id": "l"}, "call_id"),
    "exec of nothing": ("POST", "/v1/leases/l/exec", {}, "tool"),
    "exec for another lease": ("POST", "/v1/leases/l/exec", {"command": "true", "lease_id": "m"}, "lease_id"),
    "a page of none": ("GET", "/v1/leases?limit=0", None, "limit"),
    "a page too long": ("GET", "/v1/leases?limit=1001", None, "limit"),
    "a page of words": ("GET", "/v1/leases?limit=all", None, "limit"),
    "an unknown parameter": ("GET", "/v1/leases?run=r", None, "run"),
    "a parameter twice": ("GET", "/v1/leases?run_id=a&run_id=b", None, "run_id"),
    "a negative page": ("GET", "/v1/leases?limit=-1", None, "limit"),
    "a page in other digits": ("GET", "/v1/leases?limit=%D9%A3", None, "limit"),
    "a page of exponents": ("GET", "/v1/leases?limit=1e3", None, "limit"),
    "a page of all digits": ("GET", f"/v1/pools?limit={'9' * 400}", None, "limit"),
    "a cursor that is garbage": ("GET", "/v1/leases?cursor=%00%FF", None, "cursor"),
    "a cursor from elsewhere": ("GET", "/v1/pools?cursor=../..", None, "cursor"),
    "a cursor that is no text": ("GET", "/v1/sandboxes?cursor=_w", None, "cursor"),
    "an endless cursor": ("GET", f"/v1/pools?cursor={'A' * 9000}", None, "cursor"),
    "a huge query": ("GET", f"/v1/leases?run_id={'r' * 20_000}", None, "query"),
    "a parameter where there is none": ("GET", "/v1/events?after=1", None, "after"),
    "a negative offset": ("GET", "/v1/leases/l/calls/c/output?offset=-1", None, "offset"),
    "an offset beyond all": ("GET", f"/v1/leases/l/calls/c/events?offset={'9' * 40}", None, "offset"),
    "a wait that is no number": ("GET", "/v1/leases/l/calls/c?wait_s=nan", None, "wait_s"),
    "a wait backwards": ("GET", "/v1/leases/l/calls/c?wait_s=-1", None, "wait_s"),
    "a wait for ever": ("GET", "/v1/leases/l/calls/c?wait_s=1e9", None, "wait_s"),
    "force by half": ("DELETE", "/v1/pools/default?force=maybe", None, "force"),
    "a narrow that takes nothing away": ("POST", "/v1/leases/l/narrow", {}, "allow_network"),
    "a narrow that gives": ("POST", "/v1/leases/l/narrow", {"allow_network": True}, "allow_network"),
    "a narrow that gives a cache": ("POST", "/v1/leases/l/narrow", {"cache": "rw"}, "cache"),
    "a narrow of more": ("POST", "/v1/leases/l/narrow", {"allow_network": False, "root": True}, "root"),
    "a narrow of no entry": ("POST", "/v1/leases/l/narrow", {"read_only": []}, "read_only"),
    "a narrow of a path": ("POST", "/v1/leases/l/narrow", {"read_only": ["tests/a"]}, "read_only.0"),
    "a narrow of the workspace": ("POST", "/v1/leases/l/narrow", {"read_only": ["."]}, "read_only.0"),
    "a narrow of its parent": ("POST", "/v1/leases/l/narrow", {"read_only": [".."]}, "read_only.0"),
    "a narrow of nothing": ("POST", "/v1/leases/l/narrow", {"read_only": [""]}, "read_only.0"),
    "a narrow of a name with a NUL": ("POST", "/v1/leases/l/narrow", {"read_only": ["a\0b"]}, "read_only.0"),
    "a narrow of a long name": ("POST", "/v1/leases/l/narrow", {"read_only": ["\u00e4" * 128]}, "read_only.0"),
    "a narrow of many entries": ("POST", "/v1/leases/l/narrow", {"read_only": [str(n) for n in range(65)]}, "read_only"),
    "a narrow of one name": ("POST", "/v1/leases/l/narrow", {"read_only": "tests"}, "read_only"),
    "a file without a path": ("GET", "/v1/leases/l/files", None, "path"),
    "a path with a NUL": ("GET", "/v1/leases/l/files?path=a%00b", None, "path"),
    "a path too long": ("GET", f"/v1/leases/l/files?path={'a' * 5000}", None, "path"),
    "a mode that is not octal": ("PUT", "/v1/leases/l/files?path=a&mode=999", None, "mode"),
    "a mode with more bits": ("PUT", "/v1/leases/l/files?path=a&mode=4755", None, "mode"),
}


async def still_well(harness: ServiceHarness) -> None:
    """That the service still does its work."""
    (lease_id,) = await harness.acquire()
    (result,) = await harness.batch(bash(lease_id, "echo well"))
    assert result["output"] == "well\n"


@pytest.mark.parametrize("name", BODIES)
async def test_a_body_that_is_not_what_is_asked_for(name: str, harness: ServiceHarness) -> None:
    body, named = BODIES[name]
    for path in ("/v1/acquire", "/v1/exec-batch", "/v1/release"):
        answer = await harness.http.post(path, content=body)

        assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")
        assert named in answer.json()["detail"]
    await still_well(harness)


@pytest.mark.parametrize("name", ACQUIRES)
async def test_an_acquire_that_cannot_be(name: str, harness: ServiceHarness) -> None:
    fields, named = ACQUIRES[name]
    answer = await harness.http.post("/v1/acquire", content=_json(fields))

    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request"), answer.text
    assert named in answer.json()["detail"] or named in answer.json().get("field", "")
    await still_well(harness)


def _json(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields).replace("Infinity", "1e999").encode()


@pytest.mark.parametrize("name", BATCHES)
async def test_a_batch_that_is_refused_as_a_whole(name: str, harness: ServiceHarness) -> None:
    body, named = BATCHES[name]
    answer = await harness.http.post("/v1/exec-batch", json=body)

    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")
    assert named in answer.json()["detail"]
    await still_well(harness)


@pytest.mark.parametrize("name", ITEMS)
async def test_what_is_wrong_with_one_item_is_that_items_result(name: str, tmp_path: Path) -> None:
    fields, blamed, named = ITEMS[name]
    async with open_service_harness(tmp_path / "state", limits=Limits(call_bytes=50_000)) as harness:
        (lease_id,) = await harness.acquire()

        before, bad, after = await harness.batch(bash(lease_id, "echo a"), {**bash(lease_id, "true"), **fields}, bash(lease_id, "echo b"))

        assert (f"{bad['reason']} {bad['fault']}", bad["success"], bad["exit_code"], bad["output"]) == (blamed, False, None, "")
        assert named in bad["error"]
        assert [before["output"], after["output"]] == ["a\n", "b\n"]


async def test_calls_that_ask_for_too_much_output_together(tmp_path: Path) -> None:
    async with open_service_harness(tmp_path / "state", limits=Limits(batch_output_bytes=250)) as harness:
        (lease_id,) = await harness.acquire()

        results = await harness.batch(*(bash(lease_id, "true", output_limit_bytes=100) for _ in range(3)))

        assert [(result["reason"], result["fault"]) for result in results] == [("exit", "none"), ("exit", "none"), ("invalid_args", "infra")]
        assert "batch_output_bytes" in results[2]["error"]


@pytest.mark.parametrize("name", OTHERS)
async def test_other_requests_that_cannot_be(name: str, harness: ServiceHarness) -> None:
    method, path, body, named = OTHERS[name]
    answer = await harness.http.request(method, path, json=body)

    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request"), answer.text
    assert answer.json()["field"] == named


async def test_a_path_that_leads_out_is_refused(harness: ServiceHarness) -> None:
    (lease_id,) = await harness.acquire()

    for method in ("GET", "PUT"):
        answer = await harness.http.request(method, f"/v1/leases/{lease_id}/files", params={"path": "../secret"}, content=b"")
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")


async def test_a_file_larger_than_the_limit(tmp_path: Path) -> None:
    async with open_service_harness(tmp_path / "state", limits=Limits(upload_bytes=1000)) as harness:
        (lease_id,) = await harness.acquire()

        answer = await harness.http.put(f"/v1/leases/{lease_id}/files", params={"path": "a"}, content=b"x" * 1001)

        assert (answer.status_code, answer.json()["limit"]) == (413, "upload_bytes")
        assert harness.agent.files == {}


async def test_shared_caches_say_that_they_are_not_built(harness: ServiceHarness) -> None:
    answer = await harness.http.post("/v1/acquire", json={"cache": "rw"})

    assert (answer.status_code, answer.json()["code"]) == (501, "not_implemented")


async def test_a_wait_longer_than_the_pools_is_the_pools(tmp_path: Path) -> None:
    async with open_service_harness(tmp_path / "state", pools={"default": replace(POOL, acquire_timeout_s=0.05)}) as harness:
        while (await harness.http.get("/v1/pools/default")).json()["slots"]["ready"] < 4:
            await asyncio.sleep(0.01)
        await harness.acquire(4)

        answer = await harness.http.post("/v1/acquire", json={"wait_s": 5000})

        assert (answer.status_code, answer.json()["code"]) == (503, "no_capacity")


IDS = (
    "%2e%2e",
    "%2e%2e%2f%2e%2e%2fetc%2fpasswd",
    "..%5c..",
    "%00",
    "%ff%fe",
    "a" * 10_000,
    "%0d%0aX-Injected:%201",
    "{lease_id}",
    "null",
    "'; drop table leases; --",
    "💥",
)


@pytest.mark.parametrize("odd", IDS)
async def test_ids_that_nobody_gave_are_simply_not_found(odd: str, harness: ServiceHarness) -> None:
    (lease_id,) = await harness.acquire()
    asked = [
        ("GET", f"/v1/leases/{odd}"), ("GET", f"/v1/leases/{odd}/files?path=a"), ("GET", f"/v1/leases/{odd}/calls/c"),
        ("GET", f"/v1/leases/{lease_id}/calls/{odd}"),
        ("GET", f"/v1/leases/{lease_id}/calls/{odd}/output"), ("GET", f"/v1/leases/{lease_id}/calls/{odd}/events"), ("GET", f"/v1/pools/{odd}"),
        ("DELETE", f"/v1/pools/{odd}"), ("POST", f"/v1/sandboxes/{odd}/drain"), ("POST", f"/v1/pools/{odd}/verify"),
    ]  # fmt: skip
    for method, path in asked:
        answer = await harness.http.request(method, path)
        assert answer.status_code in (404, 405), (method, path, answer.text)
        assert "x-injected" not in answer.headers
    await still_well(harness)


HEADERS: dict[str, dict[str, str]] = {
    "no scheme": {"Authorization": "alices-token"},
    "another scheme": {"Authorization": "Basic YWxpY2U6"},
    "an empty token": {"Authorization": "Bearer "},
    "two tokens": {"Authorization": "Bearer alices-token, Bearer bobs-token"},
    "a very long token": {"Authorization": "Bearer " + "x" * 30_000},
    "a token of other letters": {"Authorization": "Bearer \u00e4\u00f6"},
}


@pytest.mark.parametrize("name", HEADERS)
async def test_a_token_that_is_none(name: str, harness: ServiceHarness) -> None:
    answer = await harness.http.get("/v1/pools", headers={key: value.encode("latin-1") for key, value in HEADERS[name].items()})  # type: ignore[misc]

    assert (answer.status_code, answer.json()["code"]) == (401, "unauthorized")
    await still_well(harness)


@pytest.mark.parametrize("last", ["-1", "abc", "1.5", "9" * 30, "\u00e4"])
async def test_a_last_event_id_that_is_none_of_ours(last: str, harness: ServiceHarness) -> None:
    answer = await harness.http.get("/v1/events", headers={"Last-Event-ID": last.encode("latin-1")})  # type: ignore[dict-item]

    assert (answer.status_code, answer.json()["field"]) == (422, "Last-Event-ID")


@pytest.mark.parametrize(
    "raw",
    [
        b"GET /v1/pools HTTP/1.1\r\nHost: h\r\n" + b"X-A: b\r\n" * 5000 + b"\r\n",
        b"GET /v1/pools HTTP/1.1\r\nHost: h\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/acquire HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET /v1/pools HTTP/9.9\r\nHost: h\r\n\r\n",
        b"GET http://elsewhere/v1/pools HTTP/1.1\r\nHost: h\r\n\r\n",
        b"GET /v1/pools\x00 HTTP/1.1\r\nHost: h\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 64,
        b"POST /v1/acquire HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\nZZZ\r\n",
    ],
)
async def test_what_is_hardly_http_is_refused_and_nobody_else_notices(raw: bytes, port: ServiceHarness) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(port.url.rpartition(":")[2]))
    writer.write(raw)
    writer.write_eof()
    async with asyncio.timeout(20):
        answer = await reader.read(65536)
    writer.close()

    assert answer == b"" or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4"))
    await still_well(port)
