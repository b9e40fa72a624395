"""An agent that stands still: whoever waits for it is answered in time, what it was asked is not lost, and it is given up when it stays so."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.integration.attribution.conftest import POOL
from tests.integration.attribution.pool_harness import PoolHarness, blame, check, frozen
from tests.support.service import running_service
from tests.support.service_main import ServiceParts

UNANSWERED = ("backend_error", "infra", None)
# A link is lost after a silence of 5 s. Tests that need the link of a stopped agent to stand take less.
SHORT_WAITS = ServiceParts(ping_after_s=0.4, ping_within_s=0.4, response_timeout_s=1.0, ping_interval_s=1.25, lost_after_s=0.5)
BEYOND_DEADLINE_S = SHORT_WAITS.ping_after_s + SHORT_WAITS.ping_within_s
SLACK_S = 1.5  # of this machine and its test, not of the service


class Timed:
    """Requests side by side, each with how long it took."""

    def __init__(self, harness: PoolHarness) -> None:
        self._harness = harness
        self._threads = ThreadPoolExecutor(16)

    def begin(self, method: str, path: str, **options: Any) -> Future[tuple[httpx.Response, float]]:
        """A request that is not waited for."""
        return self._threads.submit(self._ask, method, path, options)

    def _ask(self, method: str, path: str, options: dict[str, Any]) -> tuple[httpx.Response, float]:
        with self._harness.service.http() as http:
            before = time.monotonic()
            answer = http.request(method, path, **options)
            return answer, time.monotonic() - before

    def begin_lines(self, calls: list[dict[str, Any]]) -> Future[list[tuple[dict[str, Any], float]]]:
        """A streamed batch; each result with when it came."""

        def lines() -> list[tuple[dict[str, Any], float]]:
            before = time.monotonic()
            with (
                self._harness.service.http() as http,
                http.stream("POST", "/v1/exec-batch", json={"calls": calls}, headers={"Accept": "application/x-ndjson"}) as answer,
            ):
                return [(check(json.loads(line)), time.monotonic() - before) for line in answer.iter_lines() if line]

        return self._threads.submit(lines)

    def close(self) -> None:
        """No more requests."""
        self._threads.shutdown()


@pytest.fixture(scope="module")
def harness() -> Iterator[PoolHarness]:
    """Two sandboxes of three slots and the sandbox of `stays_stopped`, in a service that waits only shortly for agents that do not respond."""
    pools = {"default": {**POOL, "slots_per_sandbox": 3, "min_sandboxes": 2}, "single": {**POOL, "slots_per_sandbox": 1}}
    with running_service({"pools": pools}, env=SHORT_WAITS.environ()) as service:
        one = PoolHarness(service)
        yield one
        one.close()


@pytest.fixture(scope="module", autouse=True)
def stays_stopped(harness: PoolHarness) -> Iterator[Future[list[dict[str, Any]]]]:
    """What a call in a sandbox whose agent never goes on comes to, asked for again until it is lost and once more. It takes longest: beside the others."""
    beside = PoolHarness(harness.service)  # `release_all` of the other tests does not release its leases
    (lease,) = beside.acquire(pool="single")
    call = call_of(lease, "echo hello", "c", 1)

    def ask() -> list[dict[str, Any]]:
        with frozen(beside.agent(lease)):
            results = asked_until(beside, call, lambda result: result["reason"] == "sandbox_lost", within_s=50)
        return results + beside.batch(call)

    with ThreadPoolExecutor(1) as thread:
        yield thread.submit(ask)
    beside.close()


@pytest.fixture
def timed(harness: PoolHarness) -> Iterator[Timed]:
    requests = Timed(harness)
    yield requests
    requests.close()
    harness.release_all()


def in_two_sandboxes(harness: PoolHarness) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Three leases in one sandbox, and one in the other."""
    leases = harness.acquire(6)
    name = leases[0]["sandbox_id"]
    here, there = ([lease for lease in leases if (lease["sandbox_id"] == name) is same] for same in (True, False))
    assert len(here) == len(there) == 3
    return here, there[0]


def call_of(lease: dict[str, Any], command: str, call_id: str, timeout_s: float) -> dict[str, Any]:
    return {"lease_id": lease["lease_id"], "tool": "bash", "args": {"command": command}, "timeout_s": timeout_s, "call_id": call_id}


def in_time(wall_s: float, timeout_s: float) -> bool:
    return timeout_s <= wall_s <= timeout_s + BEYOND_DEADLINE_S + SLACK_S


def test_calls_are_answered_soon_after_their_deadlines_and_their_results_fetched_once_the_agent_goes_on(harness: PoolHarness, timed: Timed) -> None:
    (lease, streamed, third), elsewhere = in_two_sandboxes(harness)
    call = call_of(lease, "touch up; sleep 1; echo ran >> runs; cat runs", "begun", 1.5)
    running = harness.begin(call)
    harness.until_in(lease, "[ -e up ]")
    with frozen(harness.agent(lease)):
        sent = call_of(third, "echo sent >> runs; cat runs", "sent", 1)
        behind = call_of(third, "cat runs; echo behind", "behind", 30)
        lines = timed.begin_lines([sent, behind, call_of(elsewhere, "echo fine", "fine", 30)])
        events = timed.begin(
            "POST",
            f"/v1/leases/{streamed['lease_id']}/exec",
            json={"command": "echo one", "timeout_s": 1, "call_id": "e"},
            headers={"Accept": "text/event-stream"},
        )
        (begun,) = running.result()
        answer, events_s = events.result()
        (fine, fine_s), (first, first_s), (second, second_s) = lines.result()

        assert blame(begun) == UNANSWERED
        assert (fine["call_id"], fine["output"]) == ("fine", "fine\n")
        assert fine_s < 2 * BEYOND_DEADLINE_S
        assert [(result["call_id"], blame(result)) for result in (first, second)] == [("sent", UNANSWERED), ("behind", UNANSWERED)]
        assert in_time(first_s, 1)
        assert in_time(second_s, 1)  # it could have overtaken the one before it
        event = json.loads(answer.text.split("event: result\ndata: ")[1])
        assert blame(event) == UNANSWERED
        assert in_time(events_s, 1)
        assert all(result["metadata"]["may_have_run"] is True for result in (begun, first, second, event))
        assert "call_id" in first["error"]

    (ended,) = harness.batch(call)
    assert (blame(ended), ended["output"]) == (("exit", "none", 0), "ran\n")
    assert harness.batch(sent)[0]["output"] == "sent\n"
    assert harness.batch(behind)[0]["output"] == "sent\nbehind\n"
    assert harness.bash(third, "cat runs")["output"] == "sent\n"


def test_what_is_not_a_call_is_answered_too(harness: PoolHarness, timed: Timed) -> None:
    (lease, other, released), _ = in_two_sandboxes(harness)
    running = harness.begin_bash(lease, "until [ -e go ]; do sleep 0.02; done; echo done", call_id="long", timeout_s=60)
    path = f"/v1/leases/{lease['lease_id']}"
    with frozen(harness.agent(lease)):
        asked = {
            "status": timed.begin("GET", f"{path}/calls/long"),
            "wait": timed.begin("GET", f"{path}/calls/long?wait_s=0.5"),
            "output": timed.begin("GET", f"{path}/calls/long/output"),
            "cancel": timed.begin("POST", "/v1/cancel", json={"lease_id": lease["lease_id"], "call_id": "nothing"}),
            "read": timed.begin("GET", f"{path}/files?path=f"),
            "write": timed.begin("PUT", f"{path}/files?path=f", content=b"x" * (3 << 20)),
            "list": timed.begin("GET", f"{path}/files/list?path=."),
            "archive": timed.begin("GET", f"{path}/archive?path=."),
            "narrow": timed.begin("POST", f"/v1/leases/{other['lease_id']}/narrow", json={"allow_network": False}),
        }
        release, release_s = timed.begin("POST", "/v1/release", json={"lease_ids": [released["lease_id"]]}).result()
        answers = {name: future.result() for name, future in asked.items()}

        assert release.json()["released"] == [released["lease_id"]]
        assert release_s < 5
        assert {name: (answer.status_code, answer.json().get("code")) for name, (answer, _) in answers.items()} == dict.fromkeys(
            asked, (503, "backend_unavailable")
        )
        assert {name: wall_s for name, (_, wall_s) in answers.items() if wall_s > 5} == {}

    harness.until_in(lease, "touch go")
    (result,) = running.result()
    assert (blame(result), result["output"]) == (("exit", "none", 0), "done\n")


def test_an_agent_that_stays_so_is_a_lost_sandbox_as_before(stays_stopped: Future[list[dict[str, Any]]]) -> None:
    *unanswered, lost, again = stays_stopped.result()

    assert {blame(result) for result in unanswered} == {UNANSWERED}
    assert blame(lost) == ("sandbox_lost", "infra", None)
    assert again == lost


def asked_until(harness: PoolHarness, call: dict[str, Any], over: Callable[[dict[str, Any]], bool], within_s: float) -> list[dict[str, Any]]:
    """The results of a call that is asked for again and again."""
    results, deadline = [], time.monotonic() + within_s
    while not results or not over(results[-1]):
        assert time.monotonic() < deadline, results
        before = time.monotonic()
        results += harness.batch(call)
        assert time.monotonic() - before <= call["timeout_s"] + BEYOND_DEADLINE_S + SLACK_S, results[-1]
    return results
