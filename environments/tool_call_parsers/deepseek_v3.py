"""DeepSeek V3 and R1: the kind of the call and its name, then the arguments as a fenced block of JSON."""

from __future__ import annotations

import re

from environments.tool_call_parsers.base import ParsedCall, ToolSchemas
from environments.tool_call_parsers.sections import CallHead, SectionParser, SectionTokens

DEEPSEEK_TOKENS = SectionTokens(
    section_begin="<｜tool▁calls▁begin｜>",
    section_end="<｜tool▁calls▁end｜>",
    call_begin="<｜tool▁call▁begin｜>",
    separator="<｜tool▁sep｜>",
    call_end="<｜tool▁call▁end｜>",
)
_NAME_AND_FENCE = re.compile(r"\s*([^\s`]+)\s*```(?:json)?")


class DeepSeekV3Parser(SectionParser):
    """Parser of the format of DeepSeek V3: between its tokens, a call is `function<｜tool▁sep｜>terminal\\n```json\\n{"command": "ls"}\\n``` `."""

    name = "deepseek_v3"
    end_of_turn = ("<｜end▁of▁sentence｜>",)
    tokens = DEEPSEEK_TOKENS
    after_arguments = "```"
    between_calls = "\n"

    def _read_head(self, text: str, start: int, separator: int, tools: ToolSchemas) -> CallHead:
        named = _NAME_AND_FENCE.match(text, separator + len(self.tokens.separator))
        if not named:
            return CallHead("", separator, problem=f"After {self.tokens.separator}, the tool call has no name and no block of JSON.")
        return CallHead(named.group(1), named.end())

    def _write_call(self, call: ParsedCall, index: int) -> str:
        return f"function{self.tokens.separator}{call.name}\n```json\n{call.arguments}\n```"
