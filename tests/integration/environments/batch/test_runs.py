"""Whole runs: what they write, what they repeat, and what ends them."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from env_client import SandboxClient
from environments.demo.model_server import ScriptedModelServer
from tests.integration.environments.batch.runs import Runs, content_of, model_server, prompts_of, write_prompts
from tests.support.service import SMALL_POOL, Service, running_service
from tests.support.small_disk import fill_disk, mounted_disk

SLOW = {
    "match": "slow",
    "trajectories": [{"turns": [{"calls": [{"tool": "terminal", "arguments": {"command": "touch begun; sleep 60"}}]}]}, {"turns": [{"text": "Quick."}]}],
}
POLICY = {
    "match": "policy",
    "trajectories": [
        {
            "turns": [
                {"calls": [{"tool": "terminal", "arguments": {"command": "exit 3"}}]},
                {"calls": [{"tool": "invented", "arguments": {}}]},
                {"calls": [{"tool": "terminal", "arguments": {"command": "ls"}}], "fault": {"kind": "malformed_call"}},
                {"calls": [{"tool": "read_file", "arguments": {"path": "missing"}}]},
            ]
        }
    ],
}
POISONED = {"match": "poisoned", "trajectories": [{"turns": [{"text": "x", "fault": {"kind": "http_error", "status": 500, "times": None}}]}]}
TOO_LONG = {"match": "too long", "trajectories": [{"turns": [{"text": "x", "fault": {"kind": "http_error", "status": 400, "times": None}}]}]}
#: Answers after a while, so that a run can be ended in the middle.
UNHURRIED = {
    "match": "unhurried",
    "trajectories": [{"turns": [{"calls": [{"tool": "terminal", "arguments": {"command": "echo x"}}], "delay_s": 0.1}, {"text": "y"}]}],
}


#: Works in a terminal.
TYPES = {
    "match": "types",
    "trajectories": [
        {
            "turns": [
                {"calls": [{"tool": "tmux", "arguments": {"action": "send_keys", "keys": ["echo $((6 * 7))", "Enter"], "block": True}}]},
                {"text": "It is 42."},
            ]
        }
    ],
}


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedModelServer]:
    with model_server(SLOW, POLICY, POISONED, TOO_LONG, UNHURRIED, TYPES) as running:
        yield running


@pytest.fixture
def runs(tmp_path: Path, server: ScriptedModelServer, service: Service, monkeypatch: pytest.MonkeyPatch) -> Runs:
    for name, value in service.environ.items():
        monkeypatch.setenv(name, value)
    return Runs(tmp_path, server, service.environ)


def held_leases(service: Service) -> int:
    with SandboxClient(service.url, service.token) as client:
        return sum(1 for _ in client.iter_leases())


def wait_until(condition: Callable[[], bool], timeout_s: float = 50.0) -> None:
    """Wait for what another process does, of which no event tells."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.02)


def test_the_recording_of_a_terminal_is_kept_beside_its_row(runs: Runs) -> None:
    write_prompts(runs.folder, "types", "other")

    assert runs.run() == 0

    typed, other = sorted(runs.rows(), key=lambda row: row["conversations"][1]["value"], reverse=True)
    recording = typed["metadata"]["recording"]
    header, *events = [json.loads(line) for line in (runs.path / recording).read_text(encoding="utf-8").splitlines()]
    assert recording == f"recordings/{typed['prompt_id']}-0-1.cast"
    assert (header["version"], typed["metadata"]["recording_error"], typed["tool_stats"]["tmux"]["success"]) == (2, "", 1)
    assert "42\r\n" in "".join(data for _, kind, data in events if kind == "o")
    assert (other["metadata"]["recording"], other["metadata"]["recording_error"]) == ("", "")
    assert len(list((runs.path / "recordings").iterdir())) == 1


def test_a_recording_that_cannot_be_kept_costs_no_row(runs: Runs, caplog: pytest.LogCaptureFixture) -> None:
    write_prompts(runs.folder, "types")
    runs.path.mkdir(parents=True)
    (runs.path / "recordings").write_text("this is no folder")

    assert runs.run("--resume") == 0

    (row,) = runs.rows()
    error = row["metadata"]["recording_error"]
    assert row["completed"]
    assert (row["metadata"]["recording"], error[:57]) == ("", "the recording of the terminal could not be kept: data/run")
    assert error in caplog.text


def test_a_run_writes_a_row_for_each_prompt(runs: Runs, service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    large = "x" * 5_000_000
    write_prompts(runs.folder, *(f"p{number}" for number in range(6)), b"{broken", "p0", {"prompt": "p6", "score": 1}, large, "policy")

    assert runs.run("--ephemeral_system_prompt", "secret") == 0

    captured = capsys.readouterr()
    rows = runs.rows()
    assert "line 7: it is not JSON" in captured.err
    assert prompts_of(rows) == sorted([*(f"p{number}" for number in range(7)), "p0", large, "policy"])
    assert "secret" not in (runs.path / "trajectories.jsonl").read_text()
    first = next(row for row in rows if row["conversations"][1]["value"] == "p1")
    assert [turn["from"] for turn in first["conversations"]] == ["system", "human", "gpt", "tool", "gpt"]
    assert '<tool_response>\n{"name": "terminal", "content": {"output": "6\\n", "exit_code": 0}}' in first["conversations"][3]["value"]
    assert first["tool_stats"]["terminal"] == {"count": 1, "success": 1, "failure": 0}
    # What the model does wrong is a result, and is not repeated.
    policy = next(row for row in rows if row["conversations"][1]["value"] == "policy")
    assert (policy["completed"], policy["metadata"]["attempts"], policy["turns"]) == (True, 1, 5)
    assert (policy["tool_calls"]["attempted"], policy["tool_calls"]["executed_ok"], policy["tool_calls"]["policy_faults"]) == (4, 1, 3)
    statistics, checkpoint = runs.document("statistics"), runs.document("checkpoint")
    assert (statistics["completed"], statistics["broken_lines"], statistics["failed"], checkpoint["state"]) == (10, 1, 0, "finished")
    assert statistics["tools"]["terminal"]["count"] == 11
    assert "prompts per second" in captured.out
    assert held_leases(service) == 0

    assert runs.run("--ephemeral_system_prompt", "secret") == 2  # it exists already
    assert runs.run("--resume", "--ephemeral_system_prompt", "other") == 2
    assert "--ephemeral_system_prompt was 'secret' and is now 'other'" in capsys.readouterr().err
    requests = runs.server.request_count
    assert runs.run("--resume", "--ephemeral_system_prompt", "secret") == 0
    assert (len(runs.rows()), runs.server.request_count) == (10, requests)


def commands_of_children() -> Iterator[list[str]]:
    """Yield the command line of each process that this one has started, without those that have ended meanwhile."""
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # also of a process that waits to be reaped
            yield child.cmdline()


@pytest.mark.timeout(120)
def test_without_a_service_the_run_starts_one_and_ends_it(tmp_path: Path, server: ScriptedModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SANDBOX_URL", raising=False)
    write_prompts(tmp_path, *(f"p{number}" for number in range(4)))
    runs = Runs(tmp_path, server, {}, pool=None)

    assert runs.run() == 0

    assert len(runs.rows()) == 4
    assert not any("--ephemeral" in command for command in commands_of_children())


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("duplicates", "number"), [("keep", signal.SIGTERM), ("merge", signal.SIGINT)])
def test_a_run_that_is_ended_and_killed_ends_with_the_rows_of_an_undisturbed_one(
    runs: Runs, service: Service, duplicates: str, number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [f"unhurried {index}" for index in range(24)]
    write_prompts(runs.folder, *prompts, *prompts[:6])
    options = ("--duplicates", duplicates, "--batch_size", "3")

    with runs.started(*options) as process:
        wait_until(lambda: runs.whole_row_count() >= 5)
        process.send_signal(number)
        message = process.communicate(timeout=50)[1].decode()
        assert process.returncode == 128 + number, message
    assert f"ended by {number.name}" in message
    assert "--resume" in message
    assert held_leases(service) == 0
    assert runs.document("checkpoint")["state"] == "stopped"
    after_signal = runs.rows()
    assert 5 <= len(after_signal) == runs.document("checkpoint")["completed"] < 24

    with runs.started("--resume", *options) as process:
        wait_until(lambda: runs.whole_row_count() >= len(after_signal) + 5)
        process.send_signal(signal.SIGKILL)
        process.wait()
    with (runs.path / "trajectories.jsonl").open("ab") as file:
        file.write(b'{"prompt_id": "00", "conv')  # what a kill in the middle of a write leaves

    assert runs.run("--resume", *options) == 0
    resumed = runs.rows()
    assert held_leases(service) == 0  # also those of the process that was killed
    assert resumed[: len(after_signal)] == after_signal
    assert prompts_of(resumed) == sorted([*prompts, *(prompts[:6] if duplicates == "keep" else ())])
    assert "an incomplete last row of 25 bytes was removed" in capsys.readouterr().err
    assert runs.document("statistics")["completed"] == len(resumed)

    undisturbed = runs.named("undisturbed")
    assert undisturbed.run(*options) == 0
    assert content_of(undisturbed.rows()) == content_of(resumed)


def test_only_faults_of_the_infrastructure_are_repeated(tmp_path: Path, server: ScriptedModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    write_prompts(tmp_path, "slow")
    with running_service() as own, SandboxClient(own.url, own.token) as client:
        for name, value in own.environ.items():
            monkeypatch.setenv(name, value)

        def kill_sandbox() -> None:
            wait_until(lambda: any(client.exec(lease.lease_id, "bash", {"command": "test -e begun"}).success for lease in client.iter_leases()))
            for record in own.state_dir.glob("sandboxes/*/handle.json"):
                os.kill(json.loads(record.read_text(encoding="utf-8"))["data"]["pid"], signal.SIGKILL)

        runs = Runs(tmp_path, server, own.environ)
        killer = threading.Thread(target=kill_sandbox)
        killer.start()
        assert runs.run() == 0
        killer.join()

    (row,) = runs.rows()
    assert (row["conversations"][-1]["value"], row["metadata"]["attempts"]) == ("Quick.", 2)
    assert runs.document("statistics")["infra_faults_of_this_session"] == {"sandbox_lost": 1}
    assert runs.errors() == []


def test_rows_that_cannot_run_are_errors_and_the_run_goes_on(runs: Runs, service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[Any] = [{"prompt": "a", "image": "python:3.11"}, {"prompt": "b", "pool": "missing"}, {"prompt": "c", "pool": "default"}, "d", "too long"]
    write_prompts(runs.folder, *rows)

    assert runs.run() == 1

    assert prompts_of(runs.rows()) == ["c", "d"]
    by_line = {error["line"]: error for error in runs.errors()}
    assert by_line[1]["error"] == "backend 'docker' is not built yet; there is local"  # the service's own sentence
    assert by_line[2]["error"] == "there is no pool 'missing'"
    assert by_line[5]["reason"] == "model_refused"
    assert [error["infra"] for error in by_line.values()] == [False] * 3
    assert "line 1: backend 'docker' is not built yet" in capsys.readouterr().err
    assert (runs.document("statistics")["failed"], held_leases(service)) == (3, 0)

    assert runs.run("--resume") == 1  # they are tried again, and nothing else is
    assert len(runs.rows()) == 2
    assert runs.document("statistics")["failed"] == 3


def test_tools_that_the_pool_does_not_have_stop_the_run(runs: Runs, service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    write_prompts(runs.folder, *(f"p{number}" for number in range(8)))
    with SandboxClient(service.url, service.token) as client:
        client.pool_put("bare", {**SMALL_POOL, "max_sandboxes": 1, "env_vars": {"PATH": "/without/tmux"}})
        bare = Runs(runs.folder, runs.server, service.environ, pool="bare")

        assert bare.run("--distribution", "interactive") == 3
        client.pool_delete("bare")

    assert "the pool does not offer the tool set tmux" in capsys.readouterr().err
    assert (bare.rows(), bare.errors()) == ([], [])


def test_a_model_server_that_is_down_stops_the_run(runs: Runs, service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    write_prompts(runs.folder, *(f"p{number}" for number in range(20)))

    assert runs.run("--base_url", "http://127.0.0.1:9/v1", "--model_retries", "1", "--api_key", "hidden") == 3

    message = capsys.readouterr().err
    assert "the model server at http://127.0.0.1:9/v1/chat/completions does not answer (2 requests" in message
    assert "--resume" in message
    assert "hidden" not in message
    assert (runs.errors(), runs.rows(), held_leases(service)) == ([], [], 0)

    assert runs.run("--resume", "--max_samples", "3") == 2  # a changed setting, although nothing was written
    assert runs.run("--resume") == 0
    assert len(runs.rows()) == 20


def test_a_prompt_on_which_the_model_server_fails_does_not_stop_the_others(runs: Runs) -> None:
    write_prompts(runs.folder, "poisoned", *(f"unhurried {number}" for number in range(12)))

    assert runs.run("--max_attempts", "1", "--num_workers", "2") == 1

    assert len(runs.rows()) == 12
    (error,) = runs.errors()
    assert (error["line"], error["reason"], error["infra"]) == (1, "model_fault", True)


@pytest.mark.privileged
def test_on_a_disk_that_fills_nothing_that_was_written_is_lost(runs: Runs, service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = [f"{number} " + "x" * 150_000 for number in range(16)]
    with mounted_disk(tmp_path / "disk", "8m") as disk:
        write_prompts(tmp_path, *prompts)
        full = Runs(disk, runs.server, service.environ)
        (disk / "prompts.jsonl").symlink_to(tmp_path / "prompts.jsonl")
        fill_disk(disk)
        os.truncate(disk / "fill", (disk / "fill").stat().st_size - 1_200_000)

        assert full.run() == 3
        message = capsys.readouterr().err
        assert "trajectories.jsonl cannot be written: No space left on device" in message
        assert "--resume" in message
        before = full.rows()
        assert 1 <= len(before) < 16
        assert held_leases(service) == 0

        (disk / "fill").unlink()
        assert full.run("--resume") == 0
        after = full.rows()
    assert after[: len(before)] == before
    assert prompts_of(after) == sorted(prompts)
