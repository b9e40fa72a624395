"""Tests of what watches a run: its progress lines, the model server that goes away, and the tokenizer that is not there."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from huggingface_hub import constants

from environments.model_access.model_watch import ModelServerGone, ModelServerWatch
from environments.model_access.tokenizer_source import TokenizerUnavailable, check_tokenizer
from environments.rollouts.statistics import RolloutStatistics, Tally
from environments.run_progress import RunProgress, describe_progress


async def test_lines_are_written_while_a_run_goes_on_and_at_its_end() -> None:
    written: asyncio.Queue[str] = asyncio.Queue()
    statistics = RolloutStatistics()
    progress = RunProgress("env", statistics, write=written.put_nowait, min_interval_s=0.0, max_interval_s=0.05)
    progress.total_count = 3
    with progress.reporting():
        assert (await written.get()).startswith("env: 0/3 groups done, 0 rollouts scored, 0 not scored, after 0 s")
        statistics.count(rewarded_count=2)
        assert "0 rollouts scored and 2 more of groups that still run" in await written.get()
        statistics.count(lost_group_count=1)
        statistics.count(lost_group_count=1)  # changes in quick succession have one line
    assert written.qsize() == 1
    statistics.count(lost_group_count=1)
    assert written.qsize() == 1


async def test_a_run_in_which_nothing_has_ended_has_no_last_line() -> None:
    written: list[str] = []
    with RunProgress("env", RolloutStatistics(), write=written.append).reporting():
        pass
    assert written == []


def test_a_line_has_all_counts() -> None:
    tally = Tally(rewarded_count=3, group_count=1)
    tally.faults["infra", "sandbox_lost"] += 2
    for reward in (0.0, 1.0):
        tally.rewards.add(reward)
    expected = "env: 1/4 items done, 2 rollouts scored and 1 more of groups that still run, 2 not scored, mean reward 0.500, after 61 s"
    assert describe_progress("env", tally, 4, "items", 61.2) == expected


async def test_a_request_is_given_up_when_the_model_server_is_gone() -> None:
    problems, cancelled = [None, "refused"], []

    async def find_problem(base_url: str) -> str | None:
        return problems.pop(0) if len(problems) > 1 else problems[0]

    async def request() -> str:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(True)
        return ""

    watch = ModelServerWatch("http://m/v1", 0.02, find_problem=find_problem)
    with pytest.raises(ModelServerGone, match="the model server at http://m/v1 has accepted no connection for 0 s: refused"):
        await watch.wait_for_answer(request())
    assert cancelled == [True]


async def test_a_model_server_that_is_there_may_take_its_time() -> None:
    checks: asyncio.Queue[str] = asyncio.Queue()

    async def find_problem(base_url: str) -> str | None:
        checks.put_nowait(base_url)
        return None

    async def request() -> str:
        for _ in range(3):
            await checks.get()
        return "answer"

    assert await ModelServerWatch("http://m/v1", 0.01, find_problem=find_problem).wait_for_answer(request()) == "answer"


def test_a_tokenizer_that_cannot_be_had_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    check_tokenizer(str(tmp_path), "env")
    assert capsys.readouterr().err == ""
    with pytest.raises(TokenizerUnavailable, match="it was not downloaded before, and HF_HUB_OFFLINE forbids the download; name a local folder"):
        check_tokenizer("nobody/nothing", "env")
    assert capsys.readouterr().err.startswith("env: loading the tokenizer 'nobody/nothing' (tokenizer_name) from the Hugging Face Hub")
    with pytest.raises(TokenizerUnavailable, match="no repository can have that name"):
        check_tokenizer(str(tmp_path / "missing"), "env")
