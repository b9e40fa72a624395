"""Tests of scripts of the scripted model: which ones are valid, and which trajectory a conversation plays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from environments.demo.script import ScriptError, load_script, parse_script

TURN = {"text": "x"}
CALL = {"tool": "terminal", "arguments": {"command": "ls"}}


def script_of(*turns: dict[str, Any], **members: Any) -> dict[str, Any]:
    return {"prompts": [{"trajectories": [{"turns": list(turns)}]}], **members}


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ({}, "prompts: Field required"),
        ({"prompts": []}, "prompts: "),
        (script_of(), "prompts.0.trajectories.0.turns"),
        (script_of({"txt": "x"}), "prompts.0.trajectories.0.turns.0.txt"),
        (script_of({"raw": "x", "text": "y"}), "either `raw`"),
        (script_of({"raw": "x", "fault": {"kind": "malformed_call"}}), "malformed_call needs `calls`"),
        (script_of(TURN, tool_call_family="none"), "there is no tool_call_family 'none'; the families are"),
        (script_of({"text": "x", "fault": {"kind": "fire"}}), "fault.kind"),
        (script_of({"text": "x", "fault": {"kind": "http_error", "status": 200}}), "fault.status"),
        (script_of(TURN, faults=[{"kind": "cut"}]), "faults.0.request: Field required"),
    ],
)
def test_a_script_that_is_not_valid_is_refused_with_the_place(data: dict[str, Any], problem: str) -> None:
    with pytest.raises(ScriptError) as raised:
        parse_script(data)
    assert problem in str(raised.value)


def test_yaml_and_json_files_are_the_same_script(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("prompts:\n- trajectories:\n  - turns:\n    - calls: [{tool: terminal, arguments: {command: ls}}]\n")
    (tmp_path / "a.json").write_text('{"prompts": [{"trajectories": [{"turns": [{"calls": [{"tool": "terminal", "arguments": {"command": "ls"}}]}]}]}]}')
    assert load_script(tmp_path / "a.yaml") == load_script(tmp_path / "a.json") == parse_script(script_of({"calls": [CALL]}))
    for text, problem in (("a: [", "neither YAML nor JSON"), ("- a", "does not hold an object"), ("\x00", "neither YAML nor JSON")):
        (tmp_path / "b").write_text(text)
        with pytest.raises(ScriptError, match=problem):
            load_script(tmp_path / "b")


@pytest.mark.parametrize(("after_last", "names"), [("last", "abccc"), ("first", "abcaa"), ("cycle", "abcab")])
def test_which_trajectory_comes_after_the_last_one(after_last: str, names: str) -> None:
    trajectories = [{"name": name, "turns": [TURN]} for name in "abc"]
    (prompt,) = parse_script({"prompts": [{"trajectories": trajectories, "after_last": after_last}]}).prompts
    assert "".join(prompt.trajectory(number).name for number in range(5)) == names
