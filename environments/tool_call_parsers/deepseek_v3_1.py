"""DeepSeek V3.1: the name of the tool, then its arguments as JSON."""

from __future__ import annotations

from environments.tool_call_parsers.base import ParsedCall, ToolSchemas
from environments.tool_call_parsers.deepseek_v3 import DEEPSEEK_TOKENS
from environments.tool_call_parsers.sections import CallHead, SectionParser


class DeepSeekV31Parser(SectionParser):
    """Parser of the format of DeepSeek V3.1: between its tokens, a call is `terminal<｜tool▁sep｜>{"command": "ls"}`."""

    name = "deepseek_v3_1"
    end_of_turn = ("<｜end▁of▁sentence｜>",)
    tokens = DEEPSEEK_TOKENS

    def _read_head(self, text: str, start: int, separator: int, tools: ToolSchemas) -> CallHead:
        name = text[start:separator].strip()
        return CallHead(name, separator + len(self.tokens.separator), problem="" if name else "The tool call has no name.")

    def _write_call(self, call: ParsedCall, index: int) -> str:
        return f"{call.name}{self.tokens.separator}{call.arguments}"
