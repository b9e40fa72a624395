"""Run-batches with real slots: what an item gets, in which order results come, and what refuses a request."""

from __future__ import annotations

import base64
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.integration.run_batch.requests import NDJSON, WAITING, begun, leases_of, let_go, lines, program, run, wait_for


def content(artifact: dict[str, str]) -> bytes:
    return base64.b64decode(artifact["base64"])


def test_results_come_in_order_and_each_item_has_a_slot_of_its_own(http: httpx.Client) -> None:
    items = [
        program(f"cat main.py lib/data.bin > out; ls; echo {index}", files={"main.py": f"é{index}\n", "lib/data.bin": {"base64": "/wA="}}, artifacts=["out"])
        for index in range(10)
    ]
    results = run(http, items)

    assert [result["output"] for result in results] == [f"lib\nmain.py\nout\n{index}\n" for index in range(10)]
    assert [content(result["artifacts"]["out"]) for result in results] == [f"é{index}\n".encode() + b"\xff\0" for index in range(10)]
    assert [(result["index"], result["reason"], result["fault"], result["success"]) for result in results] == [(n, "exit", "none", True) for n in range(10)]
    assert len({result["lease_id"] for result in results}) == 10


@pytest.mark.parametrize("files", [{"deep/er/e": ""}, {"deep/er/e": "", "deep/other": {"base64": ""}}])
def test_files_are_written_alike_whether_one_or_several(http: httpx.Client, files: dict[str, Any]) -> None:
    (result,) = run(http, [program("stat -c %a:%s:%U deep/er/e; stat -c %a deep deep/er; id -un", files=files)])

    mode, *folders, owner = result["output"].split()
    assert mode == f"644:0:{owner}"
    assert folders == ["755", "755"]


def test_artifacts_that_cannot_be_read_say_why(http: httpx.Client) -> None:
    command = "echo yes > file; ln -s file link; ln -s /etc/passwd out; mkfifo fifo; mkdir folder; head -c 150000 /dev/zero > half; cp half more"
    paths = ["file", "link", "/tmp/nothing", "out", "fifo", "folder", "half", "more"]
    (result,) = run(http, [program(command, artifacts=paths)])

    artifacts = result["artifacts"]
    assert list(artifacts) == paths
    assert content(artifacts["file"]) == content(artifacts["link"]) == b"yes\n"
    assert len(content(artifacts["half"])) == 150_000
    codes = {path: artifacts[path]["code"] for path in paths if "error" in artifacts[path]}
    assert codes == {
        "/tmp/nothing": "file_not_found", "out": "invalid_request", "fifo": "file_error", "folder": "file_error", "more": "payload_too_large",
    }  # fmt: skip
    assert "run_batch_item_artifact_bytes" in artifacts["more"]["error"]


def test_artifacts_of_a_request_are_limited_in_all(http: httpx.Client) -> None:
    results = run(http, [program("head -c 180000 /dev/zero > a", artifacts=["a"])] * 3, max_parallel=1)

    assert [result["artifacts"]["a"].get("code") for result in results] == [None, None, "payload_too_large"]
    assert "run_batch_artifact_bytes" in results[2]["artifacts"]["a"]["error"]


def test_what_an_item_leaves_running_is_dead_before_its_artifacts_are_read(http: httpx.Client) -> None:
    command = "touch a; ln a b; (while :; do echo x >> a; done) > /dev/null 2>&1 & until [ -s a ]; do sleep 0.01; done"
    (result,) = run(http, [program(command, artifacts=["a", "b"])])

    assert result["success"]
    assert content(result["artifacts"]["a"]) == content(result["artifacts"]["b"])


def test_failures_of_programs_are_results_as_in_exec_batch(http: httpx.Client) -> None:
    items = [
        program("echo part; exit 3"),
        program("sleep 60", timeout_s=0.2),
        {"tool": "bash", "args": 7},
        program("x", args={"command": 7}),
        program("echo ok"),
    ]
    results = run(http, items)

    found = [(result["reason"], result["exit_code"], result["fault"]) for result in results]
    assert found == [("exit", 3, "none"), ("timeout", None, "policy"), ("invalid_args", None, "policy"), ("invalid_args", None, "policy"), ("exit", 0, "none")]


def test_lines_come_in_the_order_of_finishing(http: httpx.Client) -> None:
    with lines(http, [program(WAITING), program("echo first")], run_id="finishing") as results:
        first = next(results)
        let_go(http, list(begun(http, "finishing", [0]).values()))
        second = next(results)

        assert (first["index"], first["output"]) == (1, "first\n")
        assert (second["index"], second["output"]) == (0, "ran\n")
        assert list(results) == []


def overlap(results: list[dict[str, Any]]) -> int:
    """How many programs ran at one time, at most."""
    edges = sorted(edge for one in results for edge in ((one["started_at"], 1), (one["started_at"] + one["duration_s"], -1)))
    count = most = 0
    for _, step in edges:
        count += step
        most = max(most, count)
    return most


def test_half_of_the_pool_runs_at_once_or_as_many_as_the_request_says(http: httpx.Client) -> None:
    items = [program("sleep 0.05")] * 10

    assert overlap(run(http, items)) <= 4
    with lines(http, items[:4], max_parallel=1) as results:
        found = list(results)
    assert [result["index"] for result in found] == [0, 1, 2, 3]
    assert overlap(found) == 1


def test_an_item_without_network_has_none(http: httpx.Client) -> None:
    command = "ls /sys/class/net 2>/dev/null || cut -d: -f1 /proc/net/dev | tail -n +3 | tr -d ' '"
    offline, online = run(http, [program(command, allow_network=False), program(command)])

    assert offline["success"]
    assert online["success"]
    assert set(offline["output"].split()) <= {"lo"}


BAD_ITEMS: list[tuple[Any, str]] = [
    (7, "items.1"),
    ({"args": {}}, "items.1.tool"),
    (program("x", color="red"), "items.1.color"),
    ({"tool": "sudo"}, "items.1.tool"),
    (program("x", timeout_s=61), "items.1.timeout_s"),
    (program("x", timeout_s="1"), "items.1.timeout_s"),
    (program("x", output_limit_bytes=-1), "items.1.output_limit_bytes"),
    (program("x", files={"/etc/passwd": ""}), "items.1.files./etc/passwd"),
    (program("x", files={"a/../b": ""}), "items.1.files.a/../b"),
    (program("x", files={"a": 7}), "items.1.files.a"),
    (program("x", files={"a": {"base64": "%"}}), "items.1.files.a"),
    (program("x", files={"a": "", "a/b": ""}), "items.1.files.a"),
    (program("x", files={"a\ud800": ""}), "items.1.files.a\\ud800"),
    (program("x", artifacts=["a", "a"]), "items.1.artifacts"),
    (program("x", artifacts=["../a"]), "items.1.artifacts.0"),
    (program("x", allow_network="no"), "items.1.allow_network"),
]


@pytest.mark.parametrize(("item", "field"), BAD_ITEMS, ids=[field for _, field in BAD_ITEMS])
def test_a_bad_item_refuses_the_request_with_its_index(http: httpx.Client, item: Any, field: str) -> None:
    answer = http.post("/v1/run-batch", content=json.dumps({"pool": "narrow", "items": [program("touch /tmp/ran"), item]}))

    assert answer.status_code == 422, answer.text
    problem = answer.json()
    assert (problem["code"], problem["index"], problem["field"]) == ("invalid_request", 1, field)


def test_bad_requests_are_refused_as_a_whole(http: httpx.Client) -> None:
    def refusal(body: bytes, media_type: str = NDJSON) -> tuple[int, str]:
        answer = http.post("/v1/run-batch", content=body, headers={"content-type": media_type})
        return answer.status_code, answer.json()["detail"]

    assert refusal(b"")[0] == 422
    assert refusal(b"{}\n")[1].startswith("items: there is none")
    assert refusal(b'{"items": []}\n{"tool": "bash"}')[1].startswith("items: unknown field")
    assert refusal(b'{}\n{"tool": "bash"}\n{"tool"')[1].startswith("items.1: the body is not JSON")
    assert refusal(b"{}\n" + b'{"tool": "bash"}\n' * 301)[1].startswith("items: more than 300 items in one run-batch")
    assert refusal(b'{"items": []}', "application/json")[1].startswith("items: must be a list")
    assert refusal(b'{"items": [' + b",".join([b'{"tool": "bash"}'] * 1001) + b"]}", "application/json")[1].startswith("items: at most 1000")
    assert http.post("/v1/run-batch", json={"pool": "none-such", "items": [program("true")]}).json()["code"] == "pool_not_found"
    wide = [program("x", output_limit_bytes=10 << 20)] * 30
    too_much = http.post("/v1/run-batch", json={"items": wide}).json()
    assert (too_much["limit"], too_much["index"]) == ("batch_output_bytes", 25)


def test_releasing_the_run_cancels_items_that_run_and_items_that_have_not_begun(http: httpx.Client) -> None:
    with lines(http, [program(WAITING)] * 6, run_id="released", max_parallel=2) as results:
        begun(http, "released", [0, 1])
        http.post("/v1/release", json={"run_id": "released"}).raise_for_status()
        found = list(results)

    assert sorted((result["index"], result["reason"], result["fault"]) for result in found) == [(index, "cancelled", "none") for index in range(6)]
    assert leases_of(http, "released") == {}


def test_a_client_that_hangs_up_leaves_nothing(http: httpx.Client) -> None:
    with lines(http, [program("echo at once"), program(WAITING), program(WAITING), program(WAITING)], run_id="hung-up", max_parallel=2) as results:
        assert next(results)["index"] == 0
        begun(http, "hung-up", [1, 2])
    with ThreadPoolExecutor(1) as threads, httpx.Client(base_url=http.base_url, headers=http.headers, timeout=0.3, trust_env=False) as impatient:
        waiting = threads.submit(impatient.post, "/v1/run-batch", json={"items": [program("sleep 60")] * 9, "run_id": "hung-up"})
        with pytest.raises(httpx.ReadTimeout):
            waiting.result()

    wait_for(lambda: leases_of(http, "hung-up") == {}, "the leases have ended")
    wait_for(lambda: http.get("/v1/pools/default").json()["slots"]["ready"] == 8, "every slot is ready")


def test_a_gang_is_served_between_items(http: httpx.Client) -> None:
    with ThreadPoolExecutor(1) as threads, lines(http, [program("sleep 0.03")] * 20, pool="narrow", max_parallel=2) as results:
        next(results)
        gang = threads.submit(http.post, "/v1/acquire", json={"pool": "narrow", "count": 2, "run_id": "gang"}).result().raise_for_status().json()
        assert len(gang["leases"]) == 2
        http.post("/v1/release", json={"run_id": "gang"}).raise_for_status()
        last = max(result["started_at"] for result in results)

    assert last > max(lease["acquired_at"] for lease in gang["leases"])
