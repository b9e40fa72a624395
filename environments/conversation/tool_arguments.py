"""From the arguments that a model wrote to the object with which a tool is called."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from environments.tool_call_parsers.arguments import InvalidJson, decode_json, encode_json

#: The argument that a bare value stands for. All other tools get it as `input`.
_ARGUMENT_OF_BARE_VALUE = {"terminal": "command", "terminal_stateful": "command"}
# A text that was meant to be an object. It is refused rather than executed as a bare string.
_BROKEN_OBJECT = re.compile(r"\s*\{\s*(?:[\"'}]|$)")


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """The arguments of one tool call.

    Args:
        args: the arguments as an object.
        schema_valid: whether the model wrote a JSON object, so that nothing had to be coerced.
        problem: one sentence on why the arguments cannot be used; empty if they can.
    """

    args: dict[str, Any]
    schema_valid: bool
    problem: str = ""


def coerce_arguments(tool: str, arguments: object) -> ToolArguments:
    """Turn the arguments of a tool call into an object.

    A JSON object is the canonical form. The JSON text of an object within a JSON string is decoded twice, a bare string or another JSON value becomes one
    argument (`command` of `terminal`, `input` of other tools), and no arguments become an empty object. All of these count as not schema-valid.

    Args:
        tool: the name of the tool.
        arguments: the arguments as the model server returned them: JSON text, or an object that some servers have decoded already.
    """
    if isinstance(arguments, Mapping):
        return ToolArguments(dict(arguments), schema_valid=True)
    if not isinstance(arguments, str):
        return _coerce_value(tool, arguments)
    if not arguments.strip():
        return ToolArguments({}, schema_valid=False)
    try:
        value = decode_json(arguments)
    except InvalidJson as error:
        return _coerce_text(tool, arguments, error)
    if isinstance(value, dict):
        return ToolArguments(value, schema_valid=True)
    if not isinstance(value, str):
        return _coerce_value(tool, value)
    try:
        inner = decode_json(value)
    except InvalidJson as error:
        return _coerce_text(tool, value, error)
    return ToolArguments(inner, schema_valid=False) if isinstance(inner, dict) else _coerce_text(tool, value)


def _coerce_text(tool: str, text: str, error: InvalidJson | None = None) -> ToolArguments:
    if error and _BROKEN_OBJECT.match(text):
        return ToolArguments({}, schema_valid=False, problem=f"The arguments are not valid JSON: {error}.")
    return ToolArguments({_ARGUMENT_OF_BARE_VALUE.get(tool, "input"): text}, schema_valid=False)


def _coerce_value(tool: str, value: object) -> ToolArguments:
    if value is None:
        return ToolArguments({}, schema_valid=False)
    if tool in _ARGUMENT_OF_BARE_VALUE:  # a command is text
        return ToolArguments({_ARGUMENT_OF_BARE_VALUE[tool]: encode_json(value)}, schema_valid=False)
    return ToolArguments({"input": value}, schema_valid=False)
