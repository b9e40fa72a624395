"""Tests of the parts of `python -m environments.demo`: its command fits the environment, and an environment that fails is shown."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from environments.demo.__main__ import ENVIRONMENT, PHASES, PhaseFailed, PhaseResult, build_command, build_table, run_environment
from environments.demo.repository import DemoRepository
from environments.demo.rollouts_seen import SeenRollout
from tests.support.service import Service

REPOSITORY = DemoRepository(Path("/repositories"), "0" * 40, "1" * 40, Path("/repositories/rows.jsonl"))


def test_every_option_of_the_command_is_a_setting_of_the_environment() -> None:
    from environments.hermes_base_env import APIServerConfig
    from environments.swe_smith_oracle_env import SweSmithOracleConfig

    known = {f"--env.{name}" for name in SweSmithOracleConfig.model_fields} | {f"--openai.{name}" for name in APIServerConfig.model_fields}
    assert ENVIRONMENT.is_file()
    for phase in PHASES:
        python, script, command, *words = build_command(phase, "http://127.0.0.1:1/v1", Path("/tokenizer"), REPOSITORY, Path("/groups.jsonl"))
        assert (python, script, command) == (sys.executable, str(ENVIRONMENT), "process")
        assert set(words[::2]) <= known
        assert words[words.index("--openai.server_type") + 1] == phase.server_type


async def test_an_environment_that_fails_is_shown_with_its_output(service: Service, tmp_path: Path) -> None:
    program = "import os, sys; print(os.environ['SANDBOX_URL']); sys.exit('no rows')"
    with pytest.raises(PhaseFailed) as raised:
        await run_environment([sys.executable, "-c", program], service, tmp_path)
    first, *output = str(raised.value).splitlines()
    assert (first, sorted(output)) == ("The environment ended with exit code 1:", [service.url, "no rows"])
    await run_environment([sys.executable, "-c", "pass"], service, tmp_path)


def test_the_table_has_a_line_for_each_phase_and_rollout() -> None:
    rollouts = [SeenRollout(number, "fixes the bug", 4, 3, 1.0, 1.0, 30) for number in range(2)]
    table = build_table([PhaseResult(phase, rollouts, [], 1.0) for phase in PHASES])
    assert table.row_count == 6
