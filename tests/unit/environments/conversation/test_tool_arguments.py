"""The object with which a tool is called, from what the model wrote."""

from __future__ import annotations

import json
from typing import Any

import pytest

from environments.conversation.tool_arguments import coerce_arguments

OBJECT = {"command": 'echo "ü"'}


@pytest.mark.parametrize("arguments", [OBJECT, json.dumps(OBJECT), json.dumps(OBJECT, ensure_ascii=False), f" {json.dumps(OBJECT)}\n"])
def test_an_object_is_canonical(arguments: Any) -> None:
    coerced = coerce_arguments("terminal", arguments)

    assert (coerced.args, coerced.schema_valid, coerced.problem) == (OBJECT, True, "")


@pytest.mark.parametrize(
    ("tool", "arguments", "args"),
    [
        ("terminal", json.dumps(json.dumps(OBJECT)), OBJECT),
        ("terminal", "5", {"command": "5"}),
        ("terminal", '["ls", "-l"]', {"command": '["ls", "-l"]'}),
        ("terminal", '"5"', {"command": "5"}),
        ("terminal", "{ ls; }", {"command": "{ ls; }"}),
        ("terminal", "[ -f x ] && ls", {"command": "[ -f x ] && ls"}),
        ("terminal", '"$HOME/x" --y', {"command": '"$HOME/x" --y'}),
        ("web_search", "true", {"input": True}),
        ("web_search", "cats", {"input": "cats"}),
        ("terminal", "null", {}),
        ("terminal", None, {}),
        ("terminal", "  ", {}),
        ("web_search", [1], {"input": [1]}),
    ],
)
def test_anything_else_is_coerced_and_not_schema_valid(tool: str, arguments: Any, args: dict[str, Any]) -> None:
    coerced = coerce_arguments(tool, arguments)

    assert (coerced.args, coerced.schema_valid, coerced.problem) == (args, False, "")


@pytest.mark.parametrize(
    "arguments",
    ['{"command": "ls', '{"command": ls}', "{'command': 'ls'}", "{", '{"a": 1}}', '{"a": NaN}', json.dumps('{"command": "ls'), '{"a": ' + "[" * 100_000],
)
def test_a_broken_object_has_a_problem(arguments: str) -> None:
    coerced = coerce_arguments("terminal", arguments)

    assert coerced.problem.startswith("The arguments are not valid JSON: ")
    assert (coerced.args, coerced.schema_valid) == ({}, False)
