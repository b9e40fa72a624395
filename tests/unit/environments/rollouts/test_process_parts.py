"""Tests of what surrounds a run: waiting despite cancellation, the end at a failure, and the argument that switches Weights & Biases off."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from env_client import ExecutionResult
from environments.process_control import check_arguments, remove_if_empty, run_cli, run_until_failure, wandb_argument
from environments.rollouts.cancellation import finish_despite_cancellation
from environments.rollouts.pool_spec import SettingsError
from environments.rollouts.tool_handler import reply_of_result
from tests.support.users import ROOT


async def test_work_is_finished_despite_several_cancellations() -> None:
    may_end, ended = asyncio.Event(), []

    async def work() -> str:
        await may_end.wait()
        ended.append(True)
        return "value"

    task = asyncio.create_task(finish_despite_cancellation(work()))
    for _ in range(3):
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [True]
    assert await finish_despite_cancellation(work()) == "value"


async def test_an_error_of_the_work_is_raised() -> None:
    async def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await finish_despite_cancellation(fail())


async def test_a_run_ends_at_a_failure_that_a_worker_reports() -> None:
    failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    cancelled = []

    async def work() -> None:
        failure.set_exception(KeyError("reported"))
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(True)

    with pytest.raises(KeyError, match="reported"):
        await run_until_failure(work(), failure)
    assert cancelled == [True]


async def test_a_run_that_ends_by_itself() -> None:
    async def work() -> None:
        raise KeyError("own")

    with pytest.raises(KeyError, match="own"):
        await run_until_failure(work(), asyncio.get_running_loop().create_future())


def test_wandb_is_off_unless_somebody_decides(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("env: {use_wandb: true}")
    other = tmp_path / "other.yaml"
    other.write_text("env: {}")
    assert wandb_argument(["process"]) == wandb_argument(["evaluate", "--config", str(other)]) == ["--env.use_wandb=false"]
    for arguments in (["serve"], [], ["process", "--env.use_wandb", "true"], ["process", "--config", str(config)], ["process", f"--config={config}"]):
        assert wandb_argument(arguments) == []


def test_only_an_empty_file_is_removed(tmp_path: Path) -> None:
    empty, full = tmp_path / "empty", tmp_path / "full"
    empty.touch()
    full.write_text("x")
    for path in (empty, full, tmp_path / "missing"):
        remove_if_empty(path)
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_an_exit_code_is_no_error_of_a_tool() -> None:
    failed = ExecutionResult(False, "no\n", "", {"reason": "exit", "fault": "none", "exit_code": 1})
    late = ExecutionResult(False, "", "the call took longer than 3 s", {"reason": "timeout", "fault": "policy", "exit_code": None})
    assert reply_of_result("terminal", failed).ok
    reply = reply_of_result("terminal", late)
    assert (reply.ok, reply.error, reply.fault, reply.reason) == (False, "the call took longer than 3 s", "policy", "timeout")


def test_a_command_line_without_a_command_or_with_a_bad_file_is_refused(tmp_path: Path) -> None:
    broken, text, good = tmp_path / "broken.yaml", tmp_path / "text.yaml", tmp_path / "good.yaml"
    broken.write_text("a: [")
    text.write_text("only a text")
    good.write_text("env: {group_size: 2}")
    unknown = tmp_path / "unknown.yaml"
    unknown.write_text("evn: {group_size: 2}")
    for arguments, sentence in (
        ([], "name a command: serve, process or evaluate"),
        (["process", "--config", str(tmp_path / "none.yaml")], "--config: the file .*none.yaml cannot be read: No such file"),
        (["process", f"--config={broken}"], "--config: the file .*broken.yaml is not YAML"),
        (["process", "--config", str(text)], "--config: the file .*text.yaml must have settings"),
        (["process", "--config", str(unknown)], "--config: the file .*unknown.yaml has the unknown name 'evn'; there are env, openai"),
        (["process", "--env.total_steps", "-1"], "write a negative value with an equals sign: --env.total_steps=-1"),
    ):
        with pytest.raises(SettingsError, match=sentence) as refused:
            check_arguments(arguments)
        assert "\n" not in str(refused.value)
    check_arguments(["process", "--config", str(good)])
    check_arguments(["process", "--env.total_steps=-1"])
    check_arguments(["--help"])


@pytest.mark.parametrize(
    ("error", "exit_code", "sentence"),
    [
        (SettingsError("group_size: too small"), 1, "env: group_size: too small\n"),
        (KeyboardInterrupt(), 130, "env: interrupted\n"),
        (asyncio.CancelledError(), 143, "env: terminated; all slots are released\n"),
    ],
)
def test_a_process_ends_with_a_sentence(
    error: BaseException, exit_code: int, sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def cli() -> None:
        if isinstance(error, asyncio.CancelledError):
            error.add_note("all slots are released")
        raise error

    monkeypatch.setattr(sys, "argv", ["env", "--help"])
    with pytest.raises(SystemExit) as ended:
        run_cli(cli, "env")
    assert (ended.value.code, capsys.readouterr().err) == (exit_code, sentence)


def test_a_reward_function_that_never_returns_does_not_hold_up_the_end_of_the_process() -> None:
    program = """
import sys, threading, time
from environments import process_control
process_control._THREADS_END_S = 0.1
threading.Thread(target=time.sleep, args=(60,), name=process_control.SCORING_THREAD_PREFIX + "_0").start()
sys.argv = ["env", "--help"]
def cli():
    raise KeyboardInterrupt
process_control.run_cli(cli, "env")
"""
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=40, check=False)
    assert (ended.returncode, ended.stderr) == (130, "env: interrupted\n")
