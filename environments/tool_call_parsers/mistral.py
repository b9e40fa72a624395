"""Mistral: `[TOOL_CALLS]` in front of a JSON array of calls, or, since the eleventh version of its tokenizer, in front of each call's name."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Sequence

from environments.tool_call_parsers.arguments import InvalidJson, decode_json_at, encode_json, skip_whitespace
from environments.tool_call_parsers.base import ParsedCall, Piece, PieceKind, ToolCallParser, ToolSchemas, find_first, markup_piece
from environments.tool_call_parsers.hermes import read_call_object

_MARKER = "[TOOL_CALLS]"
_NAMED_CALL = re.compile(r"\s*([^\s\[\]{}]+)(?:\[CALL_ID\]([^\s\[\]{}]+))?(?:\[ARGS\])?(?=\s*\{)")
_SEPARATOR = re.compile(r"[\s,]*")
_ALPHANUMERIC = string.ascii_letters + string.digits


def new_mistral_call_id() -> str:
    """Return a new identifier as Mistral's chat templates demand it: nine letters and digits."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


def _next_marker(text: str, position: int) -> int:
    return find_first(text, (_MARKER,), position)[0]


class MistralParser(ToolCallParser):
    """Parser of the formats of Mistral.

    Older models write `[TOOL_CALLS] [{"name": "terminal", "arguments": {"command": "ls"}}]`, newer ones `[TOOL_CALLS]terminal[ARGS]{"command": "ls"}`
    with or without `[CALL_ID]` and an identifier after the name, and with or without `[ARGS]`. Messages are formatted in the older form.
    """

    name = "mistral"
    end_of_turn = ("</s>",)
    reasoning_tags = ("[THINK]", "[/THINK]")

    def __init__(self, make_call_id: Callable[[], str] = new_mistral_call_id) -> None:
        super().__init__(make_call_id)

    def format_message(self, content: str, calls: Sequence[ParsedCall]) -> str:
        objects = [f'{{"name": {encode_json(call.name)}, "arguments": {call.arguments}, "id": {encode_json(call.call_id)}}}' for call in calls]
        return f"{content}{_MARKER} [{', '.join(objects)}]" if calls else content

    def _find_call(self, text: str, position: int) -> int:
        return _next_marker(text, position)

    def _read_calls(self, text: str, start: int, tools: ToolSchemas) -> list[Piece]:
        body = skip_whitespace(text, start + len(_MARKER))
        if text.startswith("[", body):
            return self._read_array(text, start, body + 1)
        if text.startswith("{", body):
            piece, _ = self._read_object(text, start, body)
            return [piece]
        named = _NAMED_CALL.match(text, body)
        if not named:
            return [self._malformed(text[start : _next_marker(text, body)], f"No name and JSON object follow {_MARKER}.")]
        name, call_id = named.group(1), named.group(2) or ""
        try:
            decoded = decode_json_at(text, named.end())
        except InvalidJson as error:
            end = _next_marker(text, named.end())
            return [self._malformed(text[start:end], f"The arguments of the tool call are not valid JSON: {error}.", name)]
        arguments = text[decoded.start : decoded.end]  # an object, in the model's own JSON text
        return [Piece(PieceKind.CALL, text[start : decoded.end], self._call(name, arguments, call_id))]

    def _read_array(self, text: str, start: int, position: int) -> list[Piece]:
        """Read the calls of an array. An array that does not end, ends with the turn."""
        pieces = [markup_piece(text[start:position])]
        while True:
            separator = _SEPARATOR.match(text, position)
            element = separator.end() if separator else position
            if text.startswith("]", element):
                return [*pieces, markup_piece(text[position : element + 1])]
            pieces.append(markup_piece(text[position:element]))
            if element == len(text):
                return pieces
            piece, decoded = self._read_object(text, element, element)
            pieces.append(piece)
            if not decoded:
                return pieces
            position = element + len(piece.text)

    def _read_object(self, text: str, start: int, body: int) -> tuple[Piece, bool]:
        """Read one call as a JSON object. The second value is False if it could not be decoded; then the piece ends at the next marker."""
        try:
            decoded = decode_json_at(text, body)
        except InvalidJson as error:
            return self._malformed(text[start : _next_marker(text, body)], f"The tool call is not valid JSON: {error}."), False
        name, arguments, problem = read_call_object(decoded.value)
        if problem:
            return self._malformed(text[start : decoded.end], problem), True
        call_id = decoded.value.get("id")
        call = self._call(name, arguments, call_id if isinstance(call_id, str) else "")
        return Piece(PieceKind.CALL, text[start : decoded.end], call), True
