"""The arguments of a tool call: strict JSON, and the typed values of formats that write each argument between tags."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: The whitespace that JSON allows around a value.
_WHITESPACE = re.compile(r"[ \t\n\r]*")
#: Values that chat templates write as Python does, because they apply `str` to the value.
_PYTHON_CONSTANTS = {"True": True, "False": False, "None": None}


class InvalidJson(ValueError):
    """The text is not JSON. The message says why, and where."""


class NestedTooDeeply(InvalidJson):
    """The text is nested more deeply than Python decodes."""


@dataclass(frozen=True, slots=True)
class DecodedJson:
    """A JSON value in a text.

    Args:
        value: the value.
        start: the index of its first character.
        end: the index after its last character.
    """

    value: Any
    start: int
    end: int


def _parse_float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"the number {text} is out of range")
    return number


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value")


_DECODER = json.JSONDecoder(parse_float=_parse_float, parse_constant=_refuse_constant)


def skip_whitespace(text: str, position: int) -> int:
    """Return the index of the next character that is no whitespace, or the length of the text."""
    matched = _WHITESPACE.match(text, position)
    return matched.end() if matched else position


def decode_json_at(text: str, position: int) -> DecodedJson:
    """Decode the JSON value that starts at a position, after whitespace. Text may follow the value.

    Raises:
        InvalidJson: there is no JSON value.
        NestedTooDeeply: the value cannot be decoded.
    """
    start = skip_whitespace(text, position)
    try:
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        raise InvalidJson(f"{error.msg.removesuffix(' at')} at character {error.pos - start}") from error
    except RecursionError as error:
        raise NestedTooDeeply("the value is nested too deeply") from error
    except ValueError as error:  # a number with more digits than Python converts, or one of ours
        raise InvalidJson(str(error)) from error
    return DecodedJson(value, start, end)


def decode_json(text: str) -> Any:
    """Decode a text that is one JSON value.

    Raises:
        InvalidJson: the text is not JSON.
    """
    decoded = decode_json_at(text, 0)
    if skip_whitespace(text, decoded.end) != len(text):
        raise InvalidJson(f"text follows the JSON value at character {decoded.end - decoded.start}")
    return decoded.value


def encode_json(value: object) -> str:
    """Encode a value as JSON text with its Unicode characters, and with escapes only where UTF-8 cannot express the text."""
    text = json.dumps(value, ensure_ascii=False)
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:  # the model escaped half of a surrogate pair
        return json.dumps(value)
    return text


def encode_arguments(value: object) -> str:
    """Return the text of decoded arguments: JSON, encoded once.

    A string that already is a JSON object, or was meant to be one, is the text itself.
    """
    if isinstance(value, str) and value.lstrip().startswith("{"):
        return value
    return encode_json(value)


def decode_arguments(text: str) -> dict[str, Any]:
    """Decode the text of arguments for a format that writes each of them by name.

    Arguments that are no JSON object become one argument `input`, as which the agent loop executes them.
    """
    try:
        value = decode_json(text)
    except InvalidJson:
        value = text
    return value if isinstance(value, dict) else {"input": value}


def property_schemas(tools: Sequence[Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    """Return the schema of each argument of a tool, from OpenAI-style schemas; empty if the tool or its arguments are not described."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
            return properties if isinstance(properties, Mapping) else {}
    return {}


def _types(schema: object) -> frozenset[str]:
    """Return the JSON types that a schema allows, as far as it names them."""
    if not isinstance(schema, Mapping):
        return frozenset()
    named = schema.get("type")
    types = {named} if isinstance(named, str) else {one for one in named if isinstance(one, str)} if isinstance(named, list) else set()
    for combination in ("anyOf", "oneOf"):
        options = schema.get(combination)
        if isinstance(options, list):
            types.update(*(_types(option) for option in options))
    if not types and isinstance(schema.get("enum"), list) and all(isinstance(one, str) for one in schema["enum"]):
        types.add("string")
    return frozenset(types)


def decode_value(text: str, schema: object) -> Any:
    """Decode an argument that a format writes without quotes, by the type that the tool's schema gives it.

    Args:
        text: the argument as the model wrote it.
        schema: the schema of the argument; None if it is not known. Then a text that is JSON is decoded, unless it is a string.

    Returns:
        The value. A text that does not fit the type stays a string, so that the tool can refuse it by name.
    """
    types = _types(schema)
    if "string" in types:
        return None if "null" in types and text.strip() == "null" else text
    if text.strip() in _PYTHON_CONSTANTS:
        return _PYTHON_CONSTANTS[text.strip()]
    try:
        value = decode_json(text)
    except InvalidJson:
        return text
    return text if isinstance(value, str) and not types else value


def encode_value(value: object) -> str:
    """Write an argument as a format without quotes does: a string as it is, anything else as JSON."""
    return value if isinstance(value, str) else encode_json(value)
