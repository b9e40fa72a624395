"""Parsers of tool calls, one for each family of models: from the model's text to content and calls, and back to the same text.

`get_parser("hermes").parse(text)` returns a `ParsedMessage`. No text makes a parser raise: a call that cannot be parsed is a call with a `problem`.
"""

from __future__ import annotations

from environments.tool_call_parsers.base import MALFORMED_CALL, ParsedCall, ParsedMessage, Piece, PieceKind, ToolCallParser, ToolSchemas
from environments.tool_call_parsers.deepseek_v3 import DeepSeekV3Parser
from environments.tool_call_parsers.deepseek_v3_1 import DeepSeekV31Parser
from environments.tool_call_parsers.glm45 import Glm45Parser
from environments.tool_call_parsers.glm47 import Glm47Parser
from environments.tool_call_parsers.hermes import HermesParser
from environments.tool_call_parsers.kimi_k2 import KimiK2Parser
from environments.tool_call_parsers.llama3_json import Llama3JsonParser
from environments.tool_call_parsers.longcat import LongcatParser
from environments.tool_call_parsers.mistral import MistralParser
from environments.tool_call_parsers.qwen import QwenParser
from environments.tool_call_parsers.qwen3_coder import Qwen3CoderParser

__all__ = ["MALFORMED_CALL", "PARSERS", "ParsedCall", "ParsedMessage", "Piece", "PieceKind", "ToolCallParser", "ToolSchemas", "UnknownParser", "get_parser"]

_FAMILIES: tuple[type[ToolCallParser], ...] = (
    DeepSeekV3Parser, DeepSeekV31Parser, Glm45Parser, Glm47Parser, HermesParser, KimiK2Parser, Llama3JsonParser, LongcatParser, MistralParser, QwenParser,
    Qwen3CoderParser,
)  # fmt: skip
#: The parsers by the name of their family.
PARSERS: dict[str, type[ToolCallParser]] = {family.name: family for family in _FAMILIES}


class UnknownParser(ValueError):
    """No family has the name. The message lists the names."""


def get_parser(name: str) -> ToolCallParser:
    """Return a new parser of a family.

    Args:
        name: one of `PARSERS`, such as `hermes`.

    Raises:
        UnknownParser: no family has the name.
    """
    if name not in PARSERS:
        raise UnknownParser(f"There is no tool call parser {name!r}. The parsers are: {', '.join(sorted(PARSERS))}.")
    return PARSERS[name]()
