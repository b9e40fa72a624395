"""The arguments of `bash` and `process`."""

from __future__ import annotations

import pytest

from sandbox_server.agent.errors import InvalidArgs, UnknownTool
from sandbox_server.agent.execution.tools import process, shell, tool_registry


def test_a_short_command_is_passed_as_an_argument_and_a_long_one_as_a_file() -> None:
    short, long = shell.parse_bash({"command": "echo é"}), shell.parse_bash({"command": "x" * 200_000})

    assert short.args == (b"-c", "echo é".encode())
    assert short.script is None
    assert long.script == b"x" * 200_000
    assert len(long.args[1]) < 100


def test_bytes_that_are_not_utf8_are_passed_on() -> None:
    assert shell.parse_bash({"command": "echo \udcff"}).args[1] == b"echo \xff"


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ({"command": "\ud800"}, "command"),
        ({"command": "x", "env": []}, "env must be"),
        ({"command": "x", "env": {"A": 1}}, "env.A"),
        ({"command": "x", "env": {"": "1"}}, "env"),
        ({"command": "x", "env": {str(n): "" for n in range(2000)}}, "2000"),
        ({"command": "x", "env": {"A": "x" * (1 << 18)}}, "env.A"),
        ({"command": "x", "cwd": 1}, "cwd"),
        ({"command": None}, "command"),
    ],
)
def test_what_does_not_fit_is_named(args: dict[str, object], named: str) -> None:
    with pytest.raises(InvalidArgs, match=named):
        shell.parse_bash(args)


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ({}, "action"),
        ({"action": "start"}, "command"),
        ({"action": "poll"}, "process_id"),
        ({"action": "poll", "process_id": 1}, "process_id"),
        ({"action": "log", "process_id": "p1", "offset": -1}, "offset"),
        ({"action": "list", "command": "x"}, "command"),
        ({"action": "write", "process_id": "p1", "data": 5}, "data"),
    ],
)
def test_each_action_checks_its_arguments(args: dict[str, object], named: str) -> None:
    with pytest.raises(InvalidArgs, match=named):
        process.parse_job_action(args)


def test_a_tool_that_does_not_exist_is_named() -> None:
    with pytest.raises(UnknownTool, match="nonsense"):
        tool_registry.find_tool("nonsense")
