"""What a scripted model writes in a turn: as content and calls for chat completions, and as text and tokens for `/generate`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from environments.demo.script import Fault, FaultKind, Script, ScriptedCall, Turn
from environments.demo.tokenizer import TextTokenizer
from environments.tool_call_parsers import ParsedCall, get_parser

#: How many tokens an answer has that goes on until its limit, if the request sets none.
DEFAULT_MAX_TOKENS = 4096
#: How many characters a token has on average; used where no tokenizer counts them.
CHARACTERS_PER_TOKEN = 4
_FILLER = " and so on"


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A tool call as the model writes it.

    Args:
        tool: the name of the tool.
        arguments: the text of its arguments, as the member `arguments` of a chat completion.
        arguments_json: the same in a format that has a JSON value there.
    """

    tool: str
    arguments: str
    arguments_json: str


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """An answer of a chat completion.

    Args:
        content: the text.
        calls: the tool calls.
        reasoning: the reasoning.
        finish_reason: `stop`, `tool_calls`, or `length`.
        token_count: how many tokens the answer has.
    """

    content: str
    calls: tuple[WrittenCall, ...]
    reasoning: str
    finish_reason: str
    token_count: int


@dataclass(frozen=True, slots=True)
class TokenAnswer:
    """An answer of `/generate`.

    Args:
        text: the text, without the token that ends the turn.
        tokens: the tokens, with the one that ends the turn unless the limit of tokens ended the answer.
        finish_reason: `stop` or `length`.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: str


def write_call(call: ScriptedCall, fault: FaultKind | None) -> WrittenCall:
    """Return a call as the model writes it.

    Args:
        call: the call of the script.
        fault: what is wrong with it.
    """
    text = call.arguments_text
    match fault:
        case FaultKind.MALFORMED_CALL:
            text = text[:-1] if text.startswith("{") else "{" + text
        case FaultKind.DOUBLE_ENCODED:
            text = json.dumps(text)
        case FaultKind.BARE_STRING:
            first = next(iter(call.arguments.values()), "") if isinstance(call.arguments, dict) else call.arguments
            text = first if isinstance(first, str) else json.dumps(first)
            return WrittenCall(call.tool, text, json.dumps(text))
        case FaultKind.UNKNOWN_TOOL:
            return WrittenCall(f"unknown_{call.tool}", text, text)
    return WrittenCall(call.tool, text, text)


class AnswerWriter:
    """Writes the answers of a script. The text and the tokens of each turn are made once.

    Args:
        script: the script.
        tokenizer: makes the tokens; None if only chat completions are served. Then tokens are estimated from characters.
    """

    def __init__(self, script: Script, tokenizer: TextTokenizer | None) -> None:
        self._script = script
        self._tokenizer = tokenizer
        self._parser = get_parser(script.tool_call_family)
        self._closing = Turn(text=script.closing_text)
        # The turns live as long as the script, so their identity names them.
        self._texts: dict[tuple[int, FaultKind | None], str] = {}
        self._tokens: dict[tuple[int, FaultKind | None], list[int]] = {}
        self._parsed: dict[int, tuple[str, tuple[WrittenCall, ...]]] = {}

    def turn(self, turns: Sequence[Turn], index: int) -> Turn:
        """Return a turn of a trajectory, or the closing text after the last one."""
        return turns[index] if index < len(turns) else self._closing

    def write_chat(self, turn: Turn, fault: Fault | None, *, max_tokens: int | None, with_tools: bool) -> ChatAnswer:
        """Return a turn as the answer of a chat completion.

        Args:
            turn: the turn.
            fault: what the model does wrong, or None.
            max_tokens: the most tokens of the answer; None for no limit.
            with_tools: whether the request offers tools. Without them, calls are text.
        """
        kind = fault.kind if fault else None
        count = len(self._turn_tokens(turn, kind)) if self._tokenizer else _estimate(self._text(turn, kind))
        if kind is FaultKind.LENGTH or (max_tokens is not None and count > max_tokens):
            limit = max_tokens or DEFAULT_MAX_TOKENS
            return ChatAnswer(self._cut_text(turn, limit), (), "", "length", limit)
        if not with_tools:
            return ChatAnswer(self._text(turn, kind), (), "", "stop", count)
        content, calls = self._split(turn) if turn.raw is not None else (turn.text, tuple(write_call(call, kind) for call in turn.calls))
        return ChatAnswer(content, calls, turn.reasoning, "tool_calls" if calls else "stop", count)

    def write_tokens(self, turn: Turn, fault: Fault | None, max_tokens: int | None) -> TokenAnswer:
        """Return a turn as the answer of `/generate`.

        Args:
            turn: the turn.
            fault: what the model does wrong, or None.
            max_tokens: the most tokens of the answer; None for no limit.

        Raises:
            ValueError: the writer has no tokenizer.
        """
        if self._tokenizer is None:
            raise ValueError("The scripted model server has no tokenizer, which /generate needs. Start it with one.")
        kind = fault.kind if fault else None
        tokens = self._turn_tokens(turn, kind)
        if kind is FaultKind.LENGTH or (max_tokens is not None and len(tokens) > max_tokens):
            tokens = self._cut_tokens(turn, max_tokens or DEFAULT_MAX_TOKENS)
            return TokenAnswer(self._tokenizer.decode(tokens), tuple(tokens), "length")
        return TokenAnswer(self._text(turn, kind), tuple(tokens), "stop")

    def _text(self, turn: Turn, fault: FaultKind | None) -> str:
        """Return the text of a turn with the markup of its calls."""
        if turn.raw is not None:
            return turn.raw
        key = (id(turn), fault)
        if key not in self._texts:
            opening, closing = self._parser.reasoning_tags
            reasoning = f"{opening}\n{turn.reasoning}\n{closing}\n" if turn.reasoning else ""
            written = [write_call(call, fault) for call in turn.calls]
            calls = [ParsedCall(f"call_{index}", call.tool, call.arguments_json) for index, call in enumerate(written)]
            self._texts[key] = reasoning + (self._parser.format_message(turn.text, calls) if calls else turn.text)
        return self._texts[key]

    def _turn_tokens(self, turn: Turn, fault: FaultKind | None) -> list[int]:
        assert self._tokenizer is not None
        key = (id(turn), fault)
        if key not in self._tokens:
            self._tokens[key] = [*self._tokenizer.encode(self._text(turn, fault)), self._tokenizer.end_of_turn_id]
        return self._tokens[key]

    def _split(self, turn: Turn) -> tuple[str, tuple[WrittenCall, ...]]:
        """Return content and calls of a raw text. As servers do, a text with a call that cannot be parsed is content."""
        if id(turn) not in self._parsed:
            message = self._parser.parse(turn.raw or "")
            broken = not message.calls or any(call.problem for call in message.calls)
            calls = () if broken else tuple(WrittenCall(call.name, call.arguments, call.arguments) for call in message.calls)
            self._parsed[id(turn)] = (message.text if broken else message.content, calls)
        return self._parsed[id(turn)]

    def _cut_tokens(self, turn: Turn, limit: int) -> list[int]:
        assert self._tokenizer is not None
        tokens = self._tokenizer.encode(self._text(turn, None))
        if len(tokens) < limit:
            filler = self._tokenizer.encode(_FILLER)
            tokens += filler * (limit // len(filler) + 1)
        return tokens[:limit]

    def _cut_text(self, turn: Turn, limit: int) -> str:
        if self._tokenizer is not None:
            return self._tokenizer.decode(self._cut_tokens(turn, limit))
        return (self._text(turn, None) + _FILLER * limit)[: limit * CHARACTERS_PER_TOKEN]


def _estimate(text: str) -> int:
    return max(1, len(text) // CHARACTERS_PER_TOKEN)


def estimate_message_tokens(messages: Sequence[dict[str, Any]]) -> int:
    """Return about how many tokens messages have."""
    return sum(_estimate(str(message.get("content") or "")) + 4 for message in messages)
