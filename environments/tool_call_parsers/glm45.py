"""GLM 4.5 and 4.6: the tool's name after `<tool_call>`, then each argument as a key and a value between tags of their own."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from environments.tool_call_parsers.arguments import decode_arguments, decode_value, encode_value, property_schemas, skip_whitespace
from environments.tool_call_parsers.base import ParsedCall, Piece, PieceKind, ToolCallParser, ToolSchemas, content_piece, end_of_malformed, find_first

_NAME = re.compile(r"[^\s<>{}]+")


class KeyedArgumentsReader:
    """Reads and writes the body of a call whose arguments are pairs of tagged keys and values.

    A value ends at its closing tag, if a further key or the end of the call follows. So a value may hold the tag itself.

    Args:
        closing: the tag that ends the call.
        prefix: what stands in front of the names of the tags, such as `longcat_`.
        separator: the text that the chat template writes in front of each key, of each value and of the closing tag.
    """

    def __init__(self, closing: str, prefix: str = "", separator: str = "\n") -> None:
        self._closing = closing
        self._separator = separator
        self._key = (f"<{prefix}arg_key>", f"</{prefix}arg_key>")
        self._value = (f"<{prefix}arg_value>", f"</{prefix}arg_value>")
        opening, key_end, value = (re.escape(tag) for tag in (*self._key, self._value[0]))
        self._pair = re.compile(rf"\s*{opening}([^<]*){key_end}\s*{value}")
        self._value_end = re.compile(rf"{re.escape(self._value[1])}(?=\s*(?:{opening}|{re.escape(closing)}))")

    def read(self, text: str, position: int, tools: ToolSchemas) -> tuple[str, dict[str, Any], int, str]:
        """Read the name and the arguments of a call, and its closing tag.

        Returns:
            The name, the arguments, the index after the closing tag, and the problem: one sentence, or empty.
        """
        named = _NAME.match(text, skip_whitespace(text, position))
        if not named:
            return "", {}, position, "The tool call has no name."
        name, position = named.group(), named.end()
        schemas: Mapping[str, Any] = property_schemas(tools, name)
        arguments: dict[str, Any] = {}
        while pair := self._pair.match(text, position):
            ended = self._value_end.search(text, pair.end())
            if not ended:
                return name, {}, position, f"The argument {pair.group(1).strip()} does not end with {self._value[1]}."
            key = pair.group(1).strip()
            arguments[key] = decode_value(text[pair.end() : ended.start()], schemas.get(key))
            position = ended.end()
        position = skip_whitespace(text, position)
        if not text.startswith(self._closing, position):
            return name, {}, position, f"After its arguments, the tool call does not end with {self._closing}."
        return name, arguments, position + len(self._closing), ""

    def write(self, call: ParsedCall) -> str:
        """Write the name and the arguments of a call, and its closing tag."""
        pairs = [
            f"{self._key[0]}{key}{self._key[1]}{self._separator}{self._value[0]}{encode_value(value)}{self._value[1]}"
            for key, value in decode_arguments(call.arguments).items()
        ]
        return self._separator.join([call.name, *pairs, self._closing])


class Glm45Parser(ToolCallParser):
    """Parser of the format of GLM 4.5 and 4.6: `<tool_call>terminal\\n<arg_key>command</arg_key>\\n<arg_value>ls</arg_value>\\n</tool_call>`."""

    name = "glm45"
    end_of_turn = ("<|observation|>", "<|user|>", "<|endoftext|>")
    tags: ClassVar[tuple[str, str]] = ("<tool_call>", "</tool_call>")
    body: ClassVar[KeyedArgumentsReader] = KeyedArgumentsReader("</tool_call>")

    def format_message(self, content: str, calls: Sequence[ParsedCall]) -> str:
        written = [self.tags[0] + self.body.write(call) for call in calls]
        return "\n".join([content, *written] if content else written)

    def _find_call(self, text: str, position: int) -> int:
        return find_first(text, self.tags[:1], position)[0]

    def _read_calls(self, text: str, start: int, tools: ToolSchemas) -> list[Piece]:
        opening, closing = self.tags
        body = start + len(opening)
        name, arguments, end, problem = self.body.read(text, body, tools)
        if not problem:
            return [Piece(PieceKind.CALL, text[start:end], self._call(name, arguments))]
        if find_first(text, (closing, "<arg_key>", opening), body)[1] in ("", opening):  # the text speaks of the tag
            return [content_piece(text[start:body])]
        return [self._malformed(text[start : end_of_malformed(text, end, closing, (opening,))], problem, name)]
