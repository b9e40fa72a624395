"""The page of the batch runner lists the options with their defaults, and the columns of a row."""

from __future__ import annotations

import dataclasses
import re

from environments.agent_loop import AgentResult, LoopEnd
from environments.batch.files.prompt_file import Prompt
from environments.batch.rows.trajectory_row import Rollout, make_trajectory_row
from environments.batch.settings import COMPARED_SETTINGS, BatchSettings
from tests.support.users import ROOT

PAGE = (ROOT / "docs" / "batch.md").read_text(encoding="utf-8")
OPTIONS = re.findall(r"^\| `--(\w+)` \| ([^|]*?) ?\| (`=`)?", PAGE, re.MULTILINE)


def test_every_option_is_listed_with_its_default() -> None:
    fields = {field.name: field.default for field in dataclasses.fields(BatchSettings)}

    assert sorted(name for name, _, _ in OPTIONS) == sorted([*fields, "resume", "list_distributions"])
    shown = {name: default for name, default, _ in OPTIONS if default and not default.startswith("`")}
    has_default = {name: str(value) for name, value in fields.items() if value not in (None, "", dataclasses.MISSING)}
    assert shown == has_default


def test_the_settings_that_must_stay_the_same_are_marked() -> None:
    assert {name for name, _, mark in OPTIONS if mark} == set(COMPARED_SETTINGS)


def test_every_column_is_listed() -> None:
    prompt = Prompt(line=1, text="x", pool=None, image=None, other_members="{}", prompt_id="00", occurrence=0)
    result = AgentResult(messages=[], end=LoopEnd.ANSWERED, turns_used=0, reasoning_per_turn=(), calls=(), model_time_s=0.0, tool_time_s=0.0)
    rollout = Rollout(result=result, end="answered", system_message="", toolsets=("terminal",), pool="default", attempts=1, duration_s=0.0)
    row = make_trajectory_row(prompt, rollout, run_name="run", model="m")

    section = PAGE.partition("## Columns")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == list(row)
    assert [name for name in (*row["tool_calls"], *row["metadata"]) if f"`{name}`" not in section and not name.endswith(("_s", "_at"))] == []
