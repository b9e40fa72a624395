"""Llama 3.1 and later: a JSON object with `name` and `parameters`; several of them are separated by semicolons."""

from __future__ import annotations

import re
from collections.abc import Sequence

from environments.tool_call_parsers.arguments import InvalidJson, NestedTooDeeply, decode_json_at, encode_json
from environments.tool_call_parsers.base import ParsedCall, Piece, PieceKind, ToolCallParser, ToolSchemas, content_piece, markup_piece
from environments.tool_call_parsers.hermes import read_call_object

_PYTHON_TAG = "<|python_tag|>"
_ARGUMENT_NAMES = ("parameters", "arguments")
_CALL_START = re.compile(rf'{re.escape(_PYTHON_TAG)}|\{{\s*"(?:name|type|id|parameters|arguments)"\s*:')
_NAMED_CALL = re.compile(r'\{\s*"name"\s*:\s*"[^"]*"\s*,\s*"(?:parameters|arguments)"')
_NEXT_CALL = re.compile(rf"{re.escape(_PYTHON_TAG)}|{_NAMED_CALL.pattern}")
_SEPARATOR = re.compile(r"\s*;\s*(?=\{)")


class Llama3JsonParser(ToolCallParser):
    """Parser of the JSON format of Llama 3.1, 3.2 and 3.3: `{"name": "terminal", "parameters": {"command": "ls"}}`.

    `<|python_tag|>` in front of a call belongs to it. A JSON object without a name or without arguments is content.
    """

    name = "llama3_json"
    end_of_turn = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")

    def format_message(self, content: str, calls: Sequence[ParsedCall]) -> str:
        return content + "; ".join(f'{{"name": {encode_json(call.name)}, "parameters": {call.arguments}}}' for call in calls)

    def _find_call(self, text: str, position: int) -> int:
        found = _CALL_START.search(text, position)
        return found.start() if found else len(text)

    def _read_calls(self, text: str, start: int, tools: ToolSchemas) -> list[Piece]:
        tagged = text.startswith(_PYTHON_TAG, start)
        body = start + len(_PYTHON_TAG) if tagged else start
        try:
            decoded = decode_json_at(text, body)
        except InvalidJson as error:
            if tagged or _NAMED_CALL.match(text, body):
                following = _NEXT_CALL.search(text, body + 1)
                stop = following.start() if following else len(text)
                return [self._malformed(text[start:stop], f"The tool call is not valid JSON: {error}.")]
            return [content_piece(text[start:] if isinstance(error, NestedTooDeeply) else text[start : start + 1])]
        name, arguments, problem = read_call_object(decoded.value, _ARGUMENT_NAMES)
        if not problem and not any(key in decoded.value for key in _ARGUMENT_NAMES):
            problem = 'The tool call has no "parameters".'
        if problem and tagged:
            return [self._malformed(text[start : decoded.end], problem)]
        if problem:
            return [content_piece(text[start : decoded.end])]
        pieces = [Piece(PieceKind.CALL, text[start : decoded.end], self._call(name, arguments))]
        if separator := _SEPARATOR.match(text, decoded.end):
            pieces.append(markup_piece(separator.group()))
        return pieces
