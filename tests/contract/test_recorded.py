"""Calls looked at again: while they run, when they have ended, after a cut."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from sandbox_server.api.limits import Limits
from sandbox_server.dispatch.runner.decisions import CallTimings
from tests.support.service_harness import ServiceHarness, bash, open_service_harness, open_service_harness_on_port

EVENTS = {"Accept": "text/event-stream"}


@dataclass(frozen=True)
class Told:
    """One server-sent event."""

    event: str
    data: dict[str, Any]
    id: str | None


async def events(answer: httpx.Response) -> AsyncIterator[Told]:
    """The events of a stream, comments left out."""
    fields: dict[str, str] = {}
    async for line in answer.aiter_lines():
        if not line and fields:
            yield Told(fields["event"], json.loads(fields["data"]), fields.get("id"))
            fields = {}
        elif line and not line.startswith(":"):
            name, _, value = line.partition(": ")
            fields[name] = value


@contextlib.asynccontextmanager
async def running(harness: ServiceHarness, **fields: Any) -> AsyncIterator[tuple[str, AsyncIterator[Told]]]:
    """A `live` call under an event stream; the stream hangs up at the end."""
    (lease_id,) = await harness.acquire()
    call = {"command": "live", "call_id": "c", **fields}
    async with harness.http.stream("POST", f"/v1/leases/{lease_id}/exec", json=call, headers=EVENTS) as answer:
        assert (answer.status_code, answer.headers["content-type"].split(";")[0]) == (200, "text/event-stream")
        while not harness.agent.ran:
            await asyncio.sleep(0)
        found = events(answer)
        try:
            yield lease_id, found
        finally:
            await found.aclose()  # type: ignore[attr-defined]


async def test_output_comes_while_the_call_runs_then_its_result(port: ServiceHarness) -> None:
    async with running(port) as (_, found):
        port.agent.write("c", b"one ")
        first = await anext(found)
        port.agent.write("c", b"two")
        second = await anext(found)
        port.agent.finish("c", 3)
        last = await anext(found)

    assert [(told.event, told.data, told.id) for told in (first, second)] == [("output", {"data": "one "}, "4"), ("output", {"data": "two"}, "7")]
    assert (last.event, last.data["exit_code"], last.data["output"]) == ("result", 3, "one two")


async def test_a_character_that_is_cut_waits_for_its_rest(port: ServiceHarness) -> None:
    async with running(port) as (_, found):
        port.agent.write("c", b"a\xc3")
        first = await anext(found)
        port.agent.write("c", b"\xa4\xff")
        second = await anext(found)
        port.agent.finish("c")

    assert (first.data, first.id) == ({"data": "a"}, "1")
    assert (second.data, second.id) == ({"data": "ä\N{REPLACEMENT CHARACTER}"}, "4")


async def test_base64_gives_the_bytes_as_they_are(port: ServiceHarness) -> None:
    async with running(port, encoding="base64") as (_, found):
        port.agent.write("c", b"\xff\x00")
        told = await anext(found)
        port.agent.finish("c")

    assert (base64.b64decode(told.data["data"]), told.data["encoding"]) == (b"\xff\x00", "base64")


async def test_a_hang_up_ends_no_call_and_the_stream_goes_on_where_it_was_left(port: ServiceHarness) -> None:
    async with running(port) as (lease_id, found):
        port.agent.write("c", b"before ")
        left_at = (await anext(found)).id
    port.agent.write("c", b"between ")
    url = f"/v1/leases/{lease_id}/calls/c"
    assert (await port.http.get(url)).json() == {"state": "running", "output_bytes": 15, "started_at": 1.0}

    async with port.http.stream("GET", f"{url}/events", headers={"Last-Event-ID": str(left_at)}) as answer:
        again = events(answer)
        assert (await anext(again)).data == {"data": "between "}
        port.agent.write("c", b"after")
        port.agent.finish("c")
        rest = [told async for told in again]

    assert [told.event for told in rest] == ["output", "result"]
    assert (rest[0].data, rest[0].id, rest[1].data["output"]) == ({"data": "after"}, "20", "before between after")
    whole = await port.http.get(f"{url}/events", params={"offset": "7"})
    assert '"between after"' in whole.text


async def test_waiting_for_a_call_ends_with_it(port: ServiceHarness) -> None:
    async with running(port) as (lease_id, _):
        url = f"/v1/leases/{lease_id}/calls/c"
        early = await port.http.get(url, params={"wait_s": "0.05"})
        waiting = asyncio.create_task(port.http.get(url, params={"wait_s": "20"}))
        await asyncio.sleep(0)
        port.agent.finish("c", 5)
        done = (await waiting).json()

    assert early.json()["state"] == "running"
    assert (done["state"], done["result"]["exit_code"]) == ("done", 5)


async def test_a_call_that_waits_for_its_turn_is_running_too(port: ServiceHarness) -> None:
    (lease_id,) = await port.acquire()
    batch = asyncio.create_task(port.batch(bash(lease_id, "live", call_id="c"), bash(lease_id, "echo next", call_id="d")))
    while not port.agent.ran:
        await asyncio.sleep(0)

    queued = (await port.http.get(f"/v1/leases/{lease_id}/calls/d")).json()
    async with port.http.stream("GET", f"/v1/leases/{lease_id}/calls/d/events") as answer:
        port.agent.finish("c")
        told = [one async for one in events(answer)]
    await batch

    assert queued == {"state": "running", "output_bytes": 0, "started_at": None}
    assert [(one.event, one.data.get("data")) for one in told] == [("output", "next\n"), ("result", None)]


async def test_a_result_that_is_not_recorded_is_not_found_again(harness: ServiceHarness) -> None:
    (lease_id,) = await harness.acquire()
    await harness.batch(bash(lease_id, "refuse not_implemented", call_id="c"))
    harness.agent.calls.clear()

    assert (await harness.http.get(f"/v1/leases/{lease_id}/calls/c", params={"wait_s": "1"})).json()["code"] == "call_not_found"


async def test_the_whole_output_is_there_where_the_result_is_cut(harness: ServiceHarness) -> None:
    (lease_id,) = await harness.acquire()
    (result,) = await harness.batch(bash(lease_id, "big 3000", call_id="c", output_limit_bytes=100))
    url = f"/v1/leases/{lease_id}/calls/c/output"

    whole = await harness.http.get(url)
    rest = await harness.http.get(url, params={"offset": "2999"})

    assert (result["truncated"], result["output_bytes"]) == (True, 3000)
    assert (whole.content, whole.headers["x-output-bytes"]) == (b"x" * 3000, "3000")
    assert (rest.content, (await harness.http.get(url, params={"offset": "3000"})).content) == (b"x", b"")


@pytest.mark.parametrize("what", ["events", "output"])
async def test_an_offset_beyond_the_end_is_refused_and_the_end_itself_is_not(port: ServiceHarness, what: str) -> None:
    async with running(port) as (lease_id, found):
        port.agent.write("c", b"so far")
        await anext(found)
        url = f"/v1/leases/{lease_id}/calls/c/{what}"
        early = await port.http.get(url, params={"offset": "7"})
        port.agent.finish("c")
        await anext(found)
    late = await port.http.get(url, params={"offset": "7"})
    at_the_end = await port.http.get(url, params={"offset": "6"})

    assert [(answer.status_code, answer.json()["field"], answer.json()["detail"]) for answer in (early, late)] == [
        (422, "offset", "offset: beyond the 6 bytes of output")
    ] * 2
    assert at_the_end.status_code == 200
    assert "event: output" not in at_the_end.text
    if what == "events":
        named = (await port.http.get(url, headers={"Last-Event-ID": "7"})).json()
        assert (named["code"], named["field"]) == ("invalid_request", "Last-Event-ID")


async def test_of_a_lost_sandbox_the_stream_ends_wherever_it_was_left(port: ServiceHarness) -> None:
    async with running(port) as (lease_id, found):
        port.agent.write("c", b"last words")
        left_at = (await anext(found)).id
        port.backend.kill(port.agent.sandbox_id)
        await anext(found)
    url = f"/v1/leases/{lease_id}/calls/c"
    async with port.http.stream("GET", f"{url}/events", headers={"Last-Event-ID": str(left_at)}) as answer:
        told = [one async for one in events(answer)]

    assert [(one.event, one.data["reason"]) for one in told] == [("result", "sandbox_lost")]
    assert (await port.http.get(f"{url}/output", params={"offset": "1"})).status_code == 422


async def test_an_output_that_made_room_says_so(harness: ServiceHarness) -> None:
    (lease_id,) = await harness.acquire()
    await harness.batch(bash(lease_id, "big 10", call_id="c"))
    harness.agent.live("c").is_evicted = True

    answer = await harness.http.get(f"/v1/leases/{lease_id}/calls/c/output")

    assert (answer.status_code, answer.json()["code"]) == (404, "call_not_found")
    assert "made room" in answer.json()["detail"]


async def test_when_the_sandbox_is_gone_what_is_recorded_is_still_said(harness: ServiceHarness) -> None:
    (lease_id,) = await harness.acquire()
    (result,) = await harness.batch(bash(lease_id, "echo kept", call_id="c"))
    harness.backend.kill(harness.agent.sandbox_id)
    await harness.batch(bash(lease_id, "true", call_id="d"))
    url = f"/v1/leases/{lease_id}/calls/c"

    assert (await harness.http.get(url)).json() == {"state": "done", "result": result}
    assert (await harness.http.get(f"{url}/output")).content == b"kept\n"
    assert (await harness.http.get(f"/v1/leases/{lease_id}/calls/never")).json()["code"] == "sandbox_lost"


async def test_a_sandbox_that_dies_under_a_stream_is_its_result(port: ServiceHarness) -> None:
    async with running(port) as (_, found):
        port.agent.write("c", b"last words")
        assert (await anext(found)).data == {"data": "last words"}
        port.backend.kill(port.agent.sandbox_id)
        last = await anext(found)

    assert (last.event, last.data["reason"]) == ("result", "sandbox_lost")


async def test_a_release_under_a_stream_is_cancelled(port: ServiceHarness) -> None:
    async with running(port) as (lease_id, found):
        await port.http.post("/v1/release", json={"lease_ids": [lease_id]})
        last = await anext(found)

    assert (last.event, last.data["reason"]) == ("result", "cancelled")


@pytest.fixture
async def impatient_port(tmp_path: Path) -> AsyncIterator[ServiceHarness]:
    """A service that hardly waits for the pool to find out why an agent refuses a slot."""
    async with open_service_harness_on_port(tmp_path / "state", call_timings=CallTimings(refused_slot_wait_s=0.1)) as running:
        yield running


@pytest.mark.parametrize(
    ("command", "reason"),
    [("refuse not_implemented", "not_implemented"), ("refuse stale_epoch", "backend_error"), ("nonsense", "backend_error"), ("exit 4", "exit")],
)
async def test_every_end_of_a_call_is_the_last_event(impatient_port: ServiceHarness, command: str, reason: str) -> None:
    port = impatient_port
    (lease_id,) = await port.acquire()

    answer = await port.http.post(f"/v1/leases/{lease_id}/exec", json={"command": command}, headers=EVENTS)

    blocks = [block for block in answer.text.split("\n\n") if block.startswith("event: result")]
    assert len(blocks) == 1
    assert json.loads(blocks[0].partition("data: ")[2])["reason"] == reason


async def test_a_call_that_cannot_be_is_its_own_event(harness: ServiceHarness) -> None:
    (lease_id,) = await harness.acquire()
    answer = await harness.http.post(f"/v1/leases/{lease_id}/exec", json={"command": "true", "timeout_s": -1}, headers=EVENTS)

    assert '"reason":"invalid_args"' in answer.text


async def test_before_the_first_event_errors_are_errors(harness: ServiceHarness) -> None:
    unknown = await harness.http.post("/v1/leases/nobodys/exec", json={"command": "true"}, headers=EVENTS)
    (lease_id,) = await harness.acquire()
    missing = await harness.http.get(f"/v1/leases/{lease_id}/calls/missing/events")
    odd = await harness.http.get(f"/v1/leases/{lease_id}/calls/a%20b")

    assert [(answer.status_code, answer.json()["code"]) for answer in (unknown, missing, odd)] == [
        (404, "lease_not_found"),
        (404, "call_not_found"),
        (404, "call_not_found"),
    ]


async def test_a_lease_has_so_many_calls_and_no_more(tmp_path: Path) -> None:
    async with open_service_harness(tmp_path / "state", limits=Limits(lease_calls=3)) as harness:
        (lease_id,) = await harness.acquire()
        first = await harness.batch(*(bash(lease_id, "true", call_id=f"c{n}") for n in range(4)))
        again = await harness.batch(bash(lease_id, "true", call_id="c1"), bash(lease_id, "true", call_id="c9"))
        single = await harness.http.post(f"/v1/leases/{lease_id}/exec", json={"command": "true"})
        known = await harness.http.post(f"/v1/leases/{lease_id}/exec", json={"command": "true", "call_id": "c1"})

    assert [result["reason"] for result in first] == ["exit", "exit", "exit", "backend_error"]
    assert [result["reason"] for result in again] == ["exit", "backend_error"]
    assert "limits.lease_calls" in again[1]["error"]
    assert again[1]["metadata"]["may_have_run"] is False
    assert (single.status_code, single.json()["code"], single.json()["limit"]) == (429, "quota_exceeded", "lease_calls")
    assert (known.status_code, known.json()["reason"]) == (200, "exit")


async def test_event_streams_have_a_limit(tmp_path: Path) -> None:
    async with open_service_harness_on_port(tmp_path / "state", limits=Limits(streams=1)) as harness, harness.http.stream("GET", "/v1/events") as first:
        assert first.status_code == 200
        second = await harness.http.get("/v1/events")
        (lease_id,) = await harness.acquire()
        call = await harness.http.post(f"/v1/leases/{lease_id}/exec", json={"command": "true"}, headers=EVENTS)

        assert [(answer.status_code, answer.json()["limit"]) for answer in (second, call)] == [(429, "streams")] * 2
        assert harness.agent.ran == []
