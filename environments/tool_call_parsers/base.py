"""What every parser of tool calls shares: the parsed message, whose pieces cover the model's text, and the scan for calls."""

from __future__ import annotations

import enum
import functools
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from environments.tool_call_parsers.arguments import encode_arguments

#: The tool that stands in OpenAI-style messages for a call that could not be parsed. Its arguments are `problem`, `tool` and `text`; the agent loop
#: answers with the problem.
MALFORMED_CALL = "malformed_tool_call"
_NAME_IN_JSON = re.compile(r'"name"\s*:\s*"([^"\\\n]*)"')
#: OpenAI-style schemas of tools.
ToolSchemas = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A tool call of a model.

    Args:
        call_id: the identifier that the model gave the call, or a new one.
        name: the tool. Empty if the model did not name one.
        arguments: the arguments as JSON text. Of a call that could not be parsed, the text as the model wrote it.
        problem: one sentence on why the call could not be parsed; empty if it could. Such a call must not be executed.
    """

    call_id: str
    name: str
    arguments: str
    problem: str = ""


class PieceKind(enum.Enum):
    """What a piece of a model's text is."""

    #: Text for the reader, such as the answer or the reasoning.
    CONTENT = "content"
    #: Text of the format around and between calls.
    MARKUP = "markup"
    #: One call.
    CALL = "call"


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a model's text.

    Args:
        kind: what the part is.
        text: the part as the model wrote it.
        call: the call that the part holds, if its kind is `CALL`.
    """

    kind: PieceKind
    text: str
    call: ParsedCall | None = None


@dataclass(frozen=True, slots=True)
class ParsedMessage:
    """A model's text, divided into its pieces.

    Args:
        pieces: the pieces in order; together they are the whole text.
    """

    pieces: tuple[Piece, ...]

    @property
    def text(self) -> str:
        """The text as the model wrote it."""
        return "".join(piece.text for piece in self.pieces)

    @property
    def calls(self) -> tuple[ParsedCall, ...]:
        """The calls in order, also those that could not be parsed."""
        return tuple(piece.call for piece in self.pieces if piece.call)

    @property
    def content(self) -> str:
        """The text around the calls. Without calls it is the whole text; with calls it has no whitespace at its ends."""
        content = "".join(piece.text for piece in self.pieces if piece.kind is PieceKind.CONTENT)
        return content.strip() if self.calls else content


def new_call_id() -> str:
    """Return a new identifier of a tool call, as OpenAI-style servers make them."""
    return f"call_{uuid.uuid4().hex[:24]}"


def content_piece(text: str) -> Piece:
    """Return a piece of text for the reader."""
    return Piece(PieceKind.CONTENT, text)


def markup_piece(text: str) -> Piece:
    """Return a piece of text of the format."""
    return Piece(PieceKind.MARKUP, text)


@functools.cache
def _any_of(needles: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, needles)))


def find_first(text: str, needles: tuple[str, ...], position: int) -> tuple[int, str]:
    """Find whichever string comes first.

    Returns:
        Its index and the string, or the length of the text and an empty string.
    """
    found = _any_of(needles).search(text, position)  # one search, which a string that does not occur does not make slow
    return (found.start(), found.group()) if found else (len(text), "")


def end_of_malformed(text: str, position: int, closing: str, following: tuple[str, ...]) -> int:
    """Return where a call that could not be parsed ends: after what closes it, or in front of what follows it.

    Args:
        text: the text of the model.
        position: where the search begins.
        closing: closes the call.
        following: what stands at the beginning of the next call, or after all calls.
    """
    index, found = find_first(text, (closing, *following), position)
    return index + len(closing) if found == closing else index


class ToolCallParser(ABC):
    """Parses the text of one family of models into content and tool calls, and formats calls as the family's chat template does.

    A parser keeps no state between messages.

    Args:
        make_call_id: returns the identifier of a call to which the model gave none.
    """

    #: The name of the family in the registry.
    name: ClassVar[str]
    #: The texts of the tokens with which models of the family end a turn.
    end_of_turn: ClassVar[tuple[str, ...]]
    #: The tags around the model's reasoning. A call that is drafted between them is content.
    reasoning_tags: ClassVar[tuple[str, str]] = ("<think>", "</think>")

    def __init__(self, make_call_id: Callable[[], str] = new_call_id) -> None:
        self._make_call_id = make_call_id

    def parse(self, text: str, tools: ToolSchemas = ()) -> ParsedMessage:
        """Divide a model's text into content and calls. Every text can be parsed.

        Args:
            text: the text without the token that ends the turn.
            tools: the schemas of the tools, for formats that write arguments without their types.

        Returns:
            The message, whose pieces cover the whole text.
        """
        position = self._end_of_leading_reasoning(text)
        pieces = [content_piece(text[:position])]
        while (found := self._find_call(text, position)) < len(text):
            pieces.append(content_piece(text[position:found]))
            read = self._read_calls(text, found, tools)
            if not any(piece.text for piece in read):  # without progress, the loop would not end
                read = [content_piece(text[found : found + 1])]
            pieces += read
            position = found + sum(len(piece.text) for piece in read)
        pieces.append(content_piece(text[position:]))
        return ParsedMessage(_merge_content(self._calls_to_content_in_reasoning(pieces)))

    def render(self, message: ParsedMessage) -> str:
        """Return the text of a parsed message, character by character as the model wrote it."""
        return message.text

    @abstractmethod
    def format_message(self, content: str, calls: Sequence[ParsedCall]) -> str:
        """Write content and calls as the family's chat template does, for calls whose text is not known.

        Args:
            content: the text in front of the calls.
            calls: the calls. Their arguments are the JSON text of an object.
        """

    @abstractmethod
    def _find_call(self, text: str, position: int) -> int:
        """Return the index at which the next call may start, or the length of the text."""

    @abstractmethod
    def _read_calls(self, text: str, start: int, tools: ToolSchemas) -> list[Piece]:
        """Read what starts at an index that `_find_call` returned.

        Returns:
            Pieces that cover at least one character from `start` on. If it is no call after all, they are content.
        """

    def _call(self, name: str, arguments: object, call_id: str = "") -> ParsedCall:
        return ParsedCall(call_id or self._make_call_id(), name, encode_arguments(arguments))

    def _malformed(self, text: str, problem: str, name: str = "") -> Piece:
        """Return the piece of a call that could not be parsed. In broken JSON, the name can often still be read."""
        named = _NAME_IN_JSON.search(text)
        name = name or (named.group(1) if named else "")
        return Piece(PieceKind.CALL, text, ParsedCall(self._make_call_id(), name, text, problem))

    def _end_of_leading_reasoning(self, text: str) -> int:
        """Return the index after the reasoning with which the text starts. Reasoning that does not end is the whole text."""
        opening, closing = self.reasoning_tags
        if not text.lstrip().startswith(opening):
            return 0
        end = text.find(closing)
        return len(text) if end < 0 else end + len(closing)

    def _calls_to_content_in_reasoning(self, pieces: list[Piece]) -> list[Piece]:
        """Turn calls into content if reasoning ends after them. Its opening tag can be in the prompt, where the parser does not see it."""
        closing = self.reasoning_tags[1]
        ends = [index for index, piece in enumerate(pieces) if piece.kind is PieceKind.CONTENT and closing in piece.text]
        end = ends[-1] if ends else 0
        return [*(content_piece(piece.text) for piece in pieces[:end]), *pieces[end:]]


def _merge_content(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """Join adjacent pieces of content, and leave out empty ones."""
    merged: list[Piece] = []
    for piece in pieces:
        if merged and piece.kind is merged[-1].kind is PieceKind.CONTENT:
            merged[-1] = content_piece(merged[-1].text + piece.text)
        elif piece.text:
            merged.append(piece)
    return tuple(merged)
