"""What the command line refuses before anything runs: one clear message, exit code 2, and no folder."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

import pytest

from environments.batch.command_line import main
from environments.toolsets import list_distributions


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder with a dataset, whose line 7 is broken."""
    monkeypatch.chdir(tmp_path)
    for name in ("OPENAI_BASE_URL", "ATROPOS_SERVER_BASE_URL", "ATROPOS_SERVER_MODEL", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    lines = [json.dumps({"prompt": f"prompt {number}"}) for number in range(1, 11)]
    (tmp_path / "good.jsonl").write_text("\n".join(lines))
    (tmp_path / "broken.jsonl").write_text("\n".join([*lines[:6], "{broken", *lines[7:]]))
    (tmp_path / "empty.jsonl").touch()
    return tmp_path


def refusal(capsys: pytest.CaptureFixture[str], *changes: str) -> str:
    """Run the command line with options after the usual ones; return what it printed."""
    usual = ["--dataset_file", "good.jsonl", "--batch_size", "10", "--run_name", "run", "--model", "m", "--base_url", "http://127.0.0.1:9/v1"]
    assert main([*usual, *changes]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    return captured.err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--run_name", "a/b"], "--run_name: 'a/b' cannot be the name of a folder"),
        (["--dataset_file", "empty.jsonl"], "empty.jsonl is empty"),
        (["--dataset_file", "missing.jsonl"], "missing.jsonl cannot be read: No such file"),
        (["--dataset_file", "broken.jsonl", "--broken_lines", "stop"], "line 7: it is not JSON"),
        (["--distribution", "odd"], "--distribution: there is no 'odd'"),
        (["--base_url", "here"], "'here' is no address"),
        (["--base_url", "http://"], "is no address"),
        (["--base_url", ""], "OPENAI_BASE_URL"),
        (["--model", ""], "--model: no model is named"),
        (["--image_backend", "local"], "--image_backend: sandboxes of the backend local have no image"),
        (["--num_workers", "0"], "--num_workers"),
        (["--duplicates", "odd"], "--duplicates"),
        (["--odd_option"], "--odd_option"),
    ],
)
def test_what_cannot_run_is_refused(folder: Path, capsys: pytest.CaptureFixture[str], changes: list[str], message: str) -> None:
    assert message in refusal(capsys, *changes)
    assert not (folder / "data").exists()


def test_missing_options_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "--dataset_file" in capsys.readouterr().err


def test_a_second_process_on_the_same_run_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "data" / "run").mkdir(parents=True)
    with (folder / "data" / "run" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "another process works on the run data/run" in refusal(capsys, "--resume")


def test_an_existing_run_is_refused_without_resume(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "data" / "run").mkdir(parents=True)
    assert "exists already\n  continue it with --resume" in refusal(capsys)


def test_a_pool_of_a_service_that_is_not_named(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDBOX_URL", "")
    message = refusal(capsys, "--pool", "gpu")
    assert "--pool names the pool 'gpu' of a service: set SANDBOX_URL" in message
    assert list((folder / "data").iterdir()) == []


def test_the_distributions_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list_distributions"]) == 0
    printed = capsys.readouterr().out
    assert [one.name for one in list_distributions() if one.name not in printed or one.description not in printed] == []
