"""Hermes: `<tool_call>` around a JSON object with `name` and `arguments`, one pair of tags for each call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from environments.tool_call_parsers.arguments import InvalidJson, decode_json_at, encode_json, skip_whitespace
from environments.tool_call_parsers.base import ParsedCall, Piece, PieceKind, ToolCallParser, ToolSchemas, content_piece, end_of_malformed, find_first


def read_call_object(value: object, argument_names: Sequence[str] = ("arguments", "parameters")) -> tuple[str, object, str]:
    """Read a JSON object that stands for a call.

    Args:
        value: the decoded JSON value.
        argument_names: the members that may hold the arguments, in order of preference.

    Returns:
        The tool's name, its arguments, and the problem: one sentence if the value is no call, else empty.
    """
    if not isinstance(value, dict):
        return "", {}, 'A tool call is a JSON object with "name" and "arguments".'
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return "", {}, 'The tool call has no "name".'
    return name, next((value[key] for key in argument_names if key in value), {}), ""


class HermesParser(ToolCallParser):
    """Parser of the Hermes format: `<tool_call>\\n{"name": "terminal", "arguments": {"command": "ls"}}\\n</tool_call>`."""

    name = "hermes"
    end_of_turn: ClassVar[tuple[str, ...]] = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>")
    tags: ClassVar[tuple[str, str]] = ("<tool_call>", "</tool_call>")

    def format_message(self, content: str, calls: Sequence[ParsedCall]) -> str:
        opening, closing = self.tags
        written = [f'{opening}\n{{"name": {encode_json(call.name)}, "arguments": {call.arguments}}}\n{closing}' for call in calls]
        return "\n".join([content, *written] if content else written)

    def _find_call(self, text: str, position: int) -> int:
        return find_first(text, self.tags[:1], position)[0]

    def _read_calls(self, text: str, start: int, tools: ToolSchemas) -> list[Piece]:
        opening, closing = self.tags
        body = skip_whitespace(text, start + len(opening))
        if not text.startswith("{", body) and find_first(text, self.tags, body)[1] != closing:  # the text speaks of the tag
            return [content_piece(text[start:body])]
        try:
            decoded = decode_json_at(text, body)
        except InvalidJson as error:
            return [self._malformed(text[start : self._end_of_malformed(text, body)], f"The tool call is not valid JSON: {error}.")]
        end = skip_whitespace(text, decoded.end)
        if text.startswith(closing, end):
            end += len(closing)
        elif end == len(text) or text.startswith(opening, end):  # the end of the turn, or the next call, ends it as well
            end = decoded.end
        else:
            return [self._malformed(text[start : self._end_of_malformed(text, end)], f"Text follows the JSON object of the tool call, instead of {closing}.")]
        name, arguments, problem = read_call_object(decoded.value)
        if problem:
            return [self._malformed(text[start:end], problem)]
        return [Piece(PieceKind.CALL, text[start:end], self._call(name, arguments))]

    def _end_of_malformed(self, text: str, position: int) -> int:
        """Return where a call that could not be parsed ends: after its closing tag, or in front of the next call."""
        return end_of_malformed(text, position, self.tags[1], self.tags[:1])
