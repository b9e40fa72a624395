"""Both clients and the command line with run-batches: results as they come, lost connections, and errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from env_client import AsyncSandboxClient, InvalidRequest, LeaseLost, Program, SandboxClient
from tests.integration.cli.sandbox_command import SandboxCommand
from tests.integration.run_batch.requests import WAITING, begun, leases_of, let_go, wait_for
from tests.support.both_clients import KINDS, Face
from tests.support.cutting_proxy import CuttingProxy
from tests.support.service import Service


@pytest.fixture(params=KINDS)
def client(request: pytest.FixtureRequest, service: Service) -> Iterator[Face]:
    with asyncio.Runner() as runner:
        kind = SandboxClient if request.param == "sync" else AsyncSandboxClient
        face = Face(kind(service.url, service.token), runner)
        yield face
        if request.param == "sync":
            face.close()
        else:
            face.aclose()


def test_results_have_their_places_and_artifacts(client: Face) -> None:
    programs = [
        Program(command=f"cat in; echo {index} > out", files={"in": f"{index}".encode() if index % 2 else f"{index}"}, artifacts=["out", "no"])
        for index in range(6)
    ]
    results = {result.index: result for result in client.run_many(programs, max_parallel=3)}

    assert [results[index].output for index in range(6)] == [str(index) for index in range(6)]
    assert [results[index].artifacts["out"].content for index in range(6)] == [f"{index}\n".encode() for index in range(6)]
    assert {(result.artifacts["no"].content, result.artifacts["no"].code) for result in results.values()} == {(None, "file_not_found")}
    assert client.run_many([]) == []


def test_a_wrong_program_is_raised_with_its_index(client: Face) -> None:
    with pytest.raises(InvalidRequest) as caught:
        client.run_many([Program(command="true"), {"tool": "sudo"}])

    assert caught.value.extra["index"] == 1
    with pytest.raises(InvalidRequest, match="give command, or tool and args"):
        Program(command="true", tool="bash")
    with pytest.raises(TypeError, match="item 0"):
        client.run_many(["true"])


def test_results_that_are_not_kept_are_an_error(client: Face, request: pytest.FixtureRequest) -> None:
    programs, key = [Program(command="head -c 45000 /dev/zero | tr '\\0' x")] * 6, f"client-large-{request.node.name}"
    assert len(client.run_many(programs, request_key=key)) == 6

    with pytest.raises(LeaseLost, match="not kept any more"):
        client.run_many(programs, request_key=key)


@pytest.mark.parametrize("kind", KINDS)
def test_a_lost_connection_is_resumed_without_a_second_run(service: Service, kind: str) -> None:
    programs = [Program(command="echo ran; head -c 3000 /dev/zero | tr '\\0' x")] * 12
    proxy = CuttingProxy(service.url, [9000, 15_000])
    with proxy.running(), asyncio.Runner() as runner:
        client = Face((SandboxClient if kind == "sync" else AsyncSandboxClient)(proxy.url, service.token), runner)
        results = client.run_many(programs, run_id=f"cut-{kind}")
        client.close() if kind == "sync" else client.aclose()

    assert proxy.cut_count == 2
    assert sorted(result.index for result in results) == list(range(12))
    assert len({result.lease_id for result in results}) == 12
    assert all(result.success and result.output.startswith("ran\n") for result in results)


def test_leaving_the_loop_lets_no_further_program_begin(service: Service) -> None:
    with SandboxClient(service.url, service.token) as client, service.http() as http:
        results = client.run_many([Program(command="true"), *[Program(command=WAITING)] * 4], run_id="left", max_parallel=2)
        assert next(results).index == 0
        leases = begun(http, "left", [1, 2])
        results.close()
        let_go(http, list(leases.values()))
        wait_for(lambda: leases_of(http, "left") == {}, "the programs that ran have ended, and no other has begun")


def test_the_command_line_writes_a_line_for_each_result(service: Service, tmp_path: Path) -> None:
    sandbox = SandboxCommand(service.environ, tmp_path)
    lines = [{"tool": "bash", "args": {"command": f"exit {code}"}} for code in (0, 0, 3)]
    (tmp_path / "programs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")

    done = sandbox("run-many", "programs.jsonl")
    assert done.returncode == 1, done.stderr
    assert sorted((json.loads(line)["index"], json.loads(line)["exit_code"]) for line in done.stdout.splitlines()) == [(0, 0), (1, 0), (2, 3)]
    assert done.stderr.decode() == "2 of 3 programs succeeded; 1 exit code 3\n"
    assert sandbox.out("run-many", "-", "--output", "results", stdin=json.dumps(lines[0]).encode()) == ""
    assert json.loads((tmp_path / "results").read_text(encoding="utf-8"))["success"] is True
    document = json.loads(sandbox("run-many", "--json", "programs.jsonl").stdout)
    assert (document["count"], document["succeeded"], document["failed"]) == (3, 2, {"exit code 3": 1})
    assert [result["index"] for result in document["results"]] == [0, 1, 2]


@pytest.mark.parametrize(
    ("content", "message"),
    [("{}", "program 1: items.0.tool: missing"), ("7", "program 1 is not a JSON object"), ("{", "program 1 is not JSON"), ("", "has no programs")],
)
def test_the_command_line_says_which_program_is_wrong(service: Service, tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "wrong.jsonl").write_text(content, encoding="utf-8")
    done = SandboxCommand(service.environ, tmp_path)("run-many", "wrong.jsonl")

    assert done.returncode == 125
    assert message in done.stderr.decode()
