"""Qwen 3 Coder: `<function=NAME>` with one `<parameter=NAME>` for each argument, inside `<tool_call>`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from environments.tool_call_parsers.arguments import decode_arguments, decode_value, encode_value, property_schemas, skip_whitespace
from environments.tool_call_parsers.base import ParsedCall, Piece, PieceKind, ToolCallParser, ToolSchemas, content_piece, end_of_malformed, find_first

_WRAPPER = "<tool_call>"
_WRAPPER_END = "</tool_call>"
_FUNCTION_END = "</function>"
_FUNCTION = re.compile(r"<function=([^<>\s]+)\s*>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>")
# A value ends where the next parameter or the end of the function follows, so it may hold the tag itself.
_PARAMETER_END = re.compile(r"</parameter>(?=\s*(?:<parameter=|</function>))")
_PARAMETER_IN_VALUE = re.compile(r"^<parameter=([^<>\n]+)>$", re.MULTILINE)


class Qwen3CoderParser(ToolCallParser):
    """Parser of the format of Qwen 3 Coder.

    A call is `<tool_call>\\n<function=terminal>\\n<parameter=command>\\nls\\n</parameter>\\n</function>\\n</tool_call>`.
    Models sometimes leave out the outer tags, and such calls are parsed, too.
    """

    name = "qwen3_coder"
    end_of_turn = ("<|im_end|>", "<|endoftext|>")

    def format_message(self, content: str, calls: Sequence[ParsedCall]) -> str:
        written = [_write_call(call) for call in calls]
        return "\n".join([content, *written] if content else written)

    def _find_call(self, text: str, position: int) -> int:
        return find_first(text, (_WRAPPER, "<function="), position)[0]

    def _read_calls(self, text: str, start: int, tools: ToolSchemas) -> list[Piece]:
        wrapped = text.startswith(_WRAPPER, start)
        body = skip_whitespace(text, start + len(_WRAPPER)) if wrapped else start
        function = _FUNCTION.match(text, body)
        if not function and find_first(text, (_WRAPPER_END, _WRAPPER), body)[1] != _WRAPPER_END:  # the text speaks of the tag
            return [content_piece(text[start : max(body, start + 1)])]
        if not function:
            return [self._malformed(text[start : _end_of_malformed(text, max(body, start + 1))], "The tool call does not start with <function=NAME>.")]
        name = function.group(1)
        arguments, end, problem = _read_parameters(text, function.end(), property_schemas(tools, name))
        if problem:
            return [self._malformed(text[start : _end_of_malformed(text, end)], problem, name)]
        after = skip_whitespace(text, end)
        if wrapped and text.startswith(_WRAPPER_END, after):
            end = after + len(_WRAPPER_END)
        return [Piece(PieceKind.CALL, text[start:end], self._call(name, arguments))]


def _write_call(call: ParsedCall) -> str:
    parameters = [f"<parameter={key}>\n{encode_value(value)}\n</parameter>\n" for key, value in decode_arguments(call.arguments).items()]
    return f"{_WRAPPER}\n<function={call.name}>\n{''.join(parameters)}{_FUNCTION_END}\n{_WRAPPER_END}"


def _read_parameters(text: str, position: int, schemas: Mapping[str, Any]) -> tuple[dict[str, Any], int, str]:
    """Read the parameters of a function and its closing tag.

    Returns:
        The arguments, the index after the closing tag, and the problem: one sentence, or empty.
    """
    arguments: dict[str, Any] = {}
    while parameter := _PARAMETER.match(text, position):
        key = parameter.group(1).strip()
        ended = _PARAMETER_END.search(text, parameter.end())
        value = text[parameter.end() : ended.start()] if ended else ""
        swallowed = {name for name in _PARAMETER_IN_VALUE.findall(value) if name in schemas and name not in arguments and name != key}
        if not ended or swallowed:
            return {}, position, f"The parameter {key} does not end with </parameter>."
        arguments[key] = decode_value(value.removeprefix("\n").removesuffix("\n"), schemas.get(key))
        position = ended.end()
    position = skip_whitespace(text, position)
    if not text.startswith(_FUNCTION_END, position):
        return {}, position, f"After its parameters, the function does not end with {_FUNCTION_END}."
    return arguments, position + len(_FUNCTION_END), ""


def _end_of_malformed(text: str, position: int) -> int:
    """Return where a call that could not be parsed ends: after its last closing tag, or in front of the next call."""
    end = end_of_malformed(text, position, _FUNCTION_END, (_WRAPPER_END, _WRAPPER, "<function="))
    after = skip_whitespace(text, end)
    return after + len(_WRAPPER_END) if text.startswith(_WRAPPER_END, after) else end
