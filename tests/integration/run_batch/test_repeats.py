"""Run-batches with a `request_key`: what a repeated request gets, also after the client has gone and after the service was killed."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import httpx
import pytest

from tests.integration.client.test_restarts import Restarting, restarting_service
from tests.integration.run_batch.requests import WAITING, begun, leases_of, let_go, lines, program, run, wait_for


def test_a_repeated_request_gets_the_recorded_results(http: httpx.Client) -> None:
    items = [program("date +%s%N; head -c 9 /dev/urandom > out", artifacts=["out"]), program("exit 4")]

    first = run(http, items, request_key="recorded")
    with lines(http, items, request_key="recorded") as again:
        assert sorted(again, key=lambda result: int(result["index"])) == first
    assert run(http, items, request_key="recorded") == first
    changed = http.post("/v1/run-batch", json={"items": items[:1], "request_key": "recorded"})
    assert (changed.status_code, changed.json()["code"]) == (409, "call_conflict")


def test_results_that_had_to_make_room_are_gone(http: httpx.Client) -> None:
    items = [program("head -c 50000 /dev/zero | tr '\\0' x")] * 3
    for number in range(2):
        assert len(run(http, items, request_key=f"large-{number}")) == 3

    gone = http.post("/v1/run-batch", json={"items": items, "request_key": "large-0"})
    assert (gone.status_code, gone.json()["code"]) == (410, "lease_lost")
    assert "limits.run_batch_kept_bytes" in gone.json()["detail"]
    assert len(run(http, items, request_key="large-1")) == 3
    too_large = [*items, *items]
    assert len(run(http, too_large, request_key="too-large")) == 6
    assert http.post("/v1/run-batch", json={"items": too_large, "request_key": "too-large"}).status_code == 410


def test_after_a_hang_up_running_items_finish_and_others_wait_for_the_repeat(http: httpx.Client) -> None:
    items = [program("echo at once"), *[program(WAITING)] * 4]
    header = {"request_key": "resumed", "run_id": "resumed", "max_parallel": 2}
    with lines(http, items, **header) as results:
        at_once = next(results)
        leases = begun(http, "resumed", [1, 2])
    let_go(http, [leases[1]])
    wait_for(lambda: set(leases_of(http, "resumed")) == {2}, "item 1 has ended, and no other has begun")

    with lines(http, items, **header) as results:
        found = {result["index"]: result for result in (next(results), next(results))}
        assert found[0] == at_once
        assert found[1]["lease_id"] == leases[1]
        others = begun(http, "resumed", [2, 3])
        assert others[2] == leases[2]
        let_go(http, list(others.values()))
        rest = [next(results), next(results)]
        let_go(http, list(begun(http, "resumed", [4]).values()))
        rest += results
    found |= {result["index"]: result for result in rest}
    assert sorted(found) == [0, 1, 2, 3, 4]
    assert found[2]["lease_id"] == leases[2]
    assert [found[index]["output"] for index in range(1, 5)] == ["ran\n"] * 4
    assert leases_of(http, "resumed") == {}


def test_a_released_run_stays_cancelled_for_a_repeat(http: httpx.Client) -> None:
    items, header = [program(WAITING)] * 3, {"request_key": "cancelled", "run_id": "cancelled", "max_parallel": 1}
    with lines(http, items, **header):
        begun(http, "cancelled", [0])
    http.post("/v1/release", json={"run_id": "cancelled"}).raise_for_status()

    assert [result["reason"] for result in run(http, items, **header)] == ["cancelled"] * 3


@pytest.fixture(scope="module")
def restarting() -> Iterator[Restarting]:
    with restarting_service() as made:
        yield made


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_repeat_after_a_restart_runs_no_program_twice(restarting: Restarting, how: signal.Signals) -> None:
    run_id = f"restarted-{how.name}"
    items = [program("echo at once"), program(WAITING, artifacts=["ran"]), program(WAITING), program("echo later")]
    header = {"request_key": run_id, "run_id": run_id, "max_parallel": 2}
    with restarting.service.http() as http, lines(http, items, **header) as results:
        at_once = next(results)
        leases = begun(http, run_id, [1, 2])
        restarting.again(how)

    with restarting.service.http() as http:
        let_go(http, [leases[1]])
        wait_for(lambda: set(leases_of(http, run_id)) == {2}, "item 1 has ended, and no other has begun")
        with lines(http, items, **header) as results:
            found = [next(results), next(results), next(results)]
            let_go(http, [leases[2]])
            found += results
    by_index = {result["index"]: result for result in found}
    assert by_index[0] == at_once
    assert [by_index[index]["lease_id"] for index in (1, 2)] == [leases[1], leases[2]]
    assert [by_index[index]["output"] for index in range(4)] == ["at once\n", "ran\n", "ran\n", "later\n"]
    assert by_index[1]["artifacts"] == {"ran": {"base64": "cmFuCg=="}}


def test_without_a_key_nothing_survives_a_kill_of_the_service(restarting: Restarting) -> None:
    with restarting.service.http() as http, lines(http, [program(WAITING)] * 3, run_id="killed", max_parallel=2):
        begun(http, "killed", [0, 1])
        restarting.again(signal.SIGKILL)

    with restarting.service.http() as http:
        assert leases_of(http, "killed") == {}
