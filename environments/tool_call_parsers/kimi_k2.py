"""Kimi K2: an identifier that holds the name of the tool, then its arguments as JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from environments.tool_call_parsers.base import ParsedCall, ToolSchemas
from environments.tool_call_parsers.sections import CallHead, SectionParser, SectionTokens

_CALL_ID = re.compile(r"(?:functions\.)?(?P<name>[^\s:]+?)(?P<index>:\d+)?")


class KimiK2Parser(SectionParser):
    """Parser of the format of Kimi K2: between its tokens, a call is `functions.terminal:0<|tool_call_argument_begin|>{"command": "ls"}`.

    The identifier is kept, because the chat template repeats it in front of the result. Models use the same identifier again in later messages.
    """

    name = "kimi_k2"
    end_of_turn = ("<|im_end|>", "[EOS]")
    tokens = SectionTokens(
        section_begin="<|tool_calls_section_begin|>",
        section_end="<|tool_calls_section_end|>",
        call_begin="<|tool_call_begin|>",
        separator="<|tool_call_argument_begin|>",
        call_end="<|tool_call_end|>",
    )

    def _read_head(self, text: str, start: int, separator: int, tools: ToolSchemas) -> CallHead:
        call_id = text[start:separator].strip()
        arguments_start = separator + len(self.tokens.separator)
        matched = _CALL_ID.fullmatch(call_id)
        if not matched:
            return CallHead("", arguments_start, problem=f"{call_id!r} is not an identifier such as functions.NAME:0.")
        name = matched.group("name")
        if name.isdecimal() and not matched.group("index"):  # the index alone
            names = _tool_names(tools)
            if len(names) != 1:
                return CallHead("", arguments_start, problem=f"The identifier {call_id} does not name a tool, as functions.NAME:{call_id} does.")
            name = names[0]
        return CallHead(name, arguments_start, call_id if matched.group("index") or call_id.isdecimal() else "")

    def _write_call(self, call: ParsedCall, index: int) -> str:
        matched = _CALL_ID.fullmatch(call.call_id)
        own = matched and matched.group("index") and matched.group("name") == call.name
        return f"{call.call_id if own else f'functions.{call.name}:{index}'}{self.tokens.separator}{call.arguments}"


def _tool_names(tools: ToolSchemas) -> list[str]:
    functions: list[Mapping[str, Any]] = [tool.get("function", tool) for tool in tools]
    return [str(function["name"]) for function in functions if "name" in function]
