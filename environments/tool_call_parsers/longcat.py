"""LongCat Flash: the Hermes format with tags of its own. Some of its models write keys and values between tags instead of JSON."""

from __future__ import annotations

from typing import ClassVar

from environments.tool_call_parsers.arguments import skip_whitespace
from environments.tool_call_parsers.base import Piece, PieceKind, ToolSchemas
from environments.tool_call_parsers.glm45 import KeyedArgumentsReader
from environments.tool_call_parsers.hermes import HermesParser


class LongcatParser(HermesParser):
    """Parser of the format of LongCat Flash: `<longcat_tool_call>{"name": "terminal", "arguments": {"command": "ls"}}</longcat_tool_call>`."""

    name = "longcat"
    end_of_turn = ("</longcat_s>",)
    reasoning_tags = ("<longcat_think>", "</longcat_think>")
    tags = ("<longcat_tool_call>", "</longcat_tool_call>")
    keyed_body: ClassVar[KeyedArgumentsReader] = KeyedArgumentsReader("</longcat_tool_call>", prefix="longcat_")

    def _read_calls(self, text: str, start: int, tools: ToolSchemas) -> list[Piece]:
        body = skip_whitespace(text, start + len(self.tags[0]))
        if not text.startswith("{", body):
            name, arguments, end, problem = self.keyed_body.read(text, body, tools)
            if not problem:
                return [Piece(PieceKind.CALL, text[start:end], self._call(name, arguments))]
            if "<longcat_arg_key>" in text[body : self._end_of_malformed(text, body)]:
                return [self._malformed(text[start : self._end_of_malformed(text, end)], problem, name)]
        return super()._read_calls(text, start, tools)
