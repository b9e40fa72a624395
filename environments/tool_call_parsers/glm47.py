"""GLM 4.7: the format of GLM 4.5 without line breaks between the tags."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from environments.tool_call_parsers.base import ParsedCall
from environments.tool_call_parsers.glm45 import Glm45Parser, KeyedArgumentsReader


class Glm47Parser(Glm45Parser):
    """Parser of the format of GLM 4.7: `<tool_call>terminal<arg_key>command</arg_key><arg_value>ls</arg_value></tool_call>`."""

    name = "glm47"
    body: ClassVar[KeyedArgumentsReader] = KeyedArgumentsReader("</tool_call>", separator="")

    def format_message(self, content: str, calls: Sequence[ParsedCall]) -> str:
        return content + "".join(self.tags[0] + self.body.write(call) for call in calls)
