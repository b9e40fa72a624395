"""What the formats of DeepSeek and Kimi share: special tokens around the section of all calls, around each call, and in front of its arguments."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from environments.tool_call_parsers.arguments import InvalidJson, decode_json_at, skip_whitespace
from environments.tool_call_parsers.base import ParsedCall, Piece, PieceKind, ToolCallParser, ToolSchemas, end_of_malformed, find_first, markup_piece


@dataclass(frozen=True, slots=True)
class SectionTokens:
    """The special tokens of a format.

    Args:
        section_begin: stands in front of all calls.
        section_end: stands after all calls.
        call_begin: stands in front of each call.
        separator: stands between what names a call and its arguments.
        call_end: stands after each call.
    """

    section_begin: str
    section_end: str
    call_begin: str
    separator: str
    call_end: str


@dataclass(frozen=True, slots=True)
class CallHead:
    """What stands in front of the arguments of a call.

    Args:
        name: the tool.
        arguments_start: the index at which the JSON text of the arguments starts.
        call_id: the identifier that the model gave the call; empty if it gave none.
        problem: one sentence if the tool could not be found out, else empty.
    """

    name: str
    arguments_start: int
    call_id: str = ""
    problem: str = ""


class SectionParser(ToolCallParser):
    """Parses calls between special tokens, whose arguments are JSON text. Special tokens within the strings of the JSON text are part of it."""

    tokens: ClassVar[SectionTokens]
    #: What the format writes between the arguments and the end of the call.
    after_arguments: ClassVar[str] = ""
    between_calls: ClassVar[str] = ""

    @abstractmethod
    def _read_head(self, text: str, start: int, separator: int, tools: ToolSchemas) -> CallHead:
        """Read what names a call.

        Args:
            text: the text of the model.
            start: the index after the token that begins the call.
            separator: the index of the separator.
            tools: the schemas of the tools.
        """

    @abstractmethod
    def _write_call(self, call: ParsedCall, index: int) -> str:
        """Write one call between its tokens.

        Args:
            call: the call.
            index: its index in the message.
        """

    def format_message(self, content: str, calls: Sequence[ParsedCall]) -> str:
        if not calls:
            return content
        written = [f"{self.tokens.call_begin}{self._write_call(call, index)}{self.tokens.call_end}" for index, call in enumerate(calls)]
        return f"{content}{self.tokens.section_begin}{self.between_calls.join(written)}{self.tokens.section_end}"

    def _find_call(self, text: str, position: int) -> int:
        return find_first(text, (self.tokens.section_begin, self.tokens.section_end, self.tokens.call_begin), position)[0]

    def _read_calls(self, text: str, start: int, tools: ToolSchemas) -> list[Piece]:
        tokens = self.tokens
        if text.startswith(tokens.call_begin, start):
            return [self._read_call(text, start, tools)]
        if text.startswith(tokens.section_end, start):
            return [markup_piece(tokens.section_end)]
        end = skip_whitespace(text, start + len(tokens.section_begin))
        if end == len(text) or text.startswith((tokens.call_begin, tokens.section_end), end):
            return [markup_piece(text[start:end])]
        stop, _ = find_first(text, (tokens.call_begin, tokens.section_end), end)
        return [self._malformed(text[start:stop], f"The tool call does not start with {tokens.call_begin}.")]

    def _read_call(self, text: str, start: int, tools: ToolSchemas) -> Piece:
        tokens = self.tokens
        head_start = start + len(tokens.call_begin)
        separator, found = find_first(text, (tokens.separator, tokens.call_begin, tokens.call_end, tokens.section_end), head_start)
        if found != tokens.separator:
            return self._malformed(text[start : self._end_of_malformed(text, head_start)], f"The tool call has no {tokens.separator}.")
        head = self._read_head(text, head_start, separator, tools)
        if head.problem:
            return self._malformed(text[start : self._end_of_malformed(text, head_start)], head.problem, head.name)
        try:
            decoded = decode_json_at(text, head.arguments_start)
        except InvalidJson as error:
            end = self._end_of_malformed(text, head.arguments_start)
            return self._malformed(text[start:end], f"The arguments of the tool call are not valid JSON: {error}.", head.name)
        end = self._end_of_call(text, decoded.end)
        if end < 0:
            end = self._end_of_malformed(text, decoded.end)
            return self._malformed(text[start:end], f"After its arguments, the tool call does not end with {tokens.call_end}.", head.name)
        # The model's own JSON text, so that numbers and escapes stay as they are.
        arguments = text[decoded.start : decoded.end] if isinstance(decoded.value, dict) else decoded.value
        return Piece(PieceKind.CALL, text[start:end], self._call(head.name, arguments, head.call_id))

    def _end_of_call(self, text: str, position: int) -> int:
        """Return the index after the call, or -1 if something else follows its arguments. The end of the turn ends a call as well."""
        tokens = self.tokens
        end = skip_whitespace(text, position)
        if self.after_arguments and text.startswith(self.after_arguments, end):
            end = skip_whitespace(text, end + len(self.after_arguments))
        if text.startswith(tokens.call_end, end):
            return end + len(tokens.call_end)
        return end if end == len(text) or text.startswith((tokens.call_begin, tokens.section_end), end) else -1

    def _end_of_malformed(self, text: str, position: int) -> int:
        """Return where a call that could not be parsed ends: after its token, or in front of the next call or the end of the section."""
        return end_of_malformed(text, position, self.tokens.call_end, (self.tokens.call_begin, self.tokens.section_end))
