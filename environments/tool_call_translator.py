"""The adapter between a parser of tool calls and atroposlib's `ManagedServer`, which has raw text on one side and OpenAI-style messages on the other.

It stands in for atroposlib's own translator, which needs vLLM: `managed._translator = ToolCallTranslator(get_parser("hermes"))`.
It has the two methods that `ManagedServer` calls, and imports nothing of atroposlib.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from environments.tool_call_parsers import MALFORMED_CALL, ParsedCall, ToolCallParser, ToolSchemas, get_parser
from environments.tool_call_parsers.arguments import encode_json


@dataclass(frozen=True, slots=True)
class TranslatedFunction:
    """The function of a call, as atroposlib reads it.

    Args:
        name: the tool.
        arguments: the JSON text of the arguments.
    """

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class TranslatedCall:
    """A call, as atroposlib reads it.

    Args:
        id: the identifier of the call.
        function: the tool and its arguments.
    """

    id: str
    function: TranslatedFunction


#: What identifies an assistant message with tool calls: its content, and identifier, name and arguments of each call.
_MessageKey = tuple[str, tuple[tuple[str, str, str], ...]]


class ToolCallTranslator:
    """Translates between the raw text of a model and OpenAI-style messages, for one conversation.

    It remembers the text of every message with tool calls. When such a message comes back as part of the next prompt, its text is written again character
    by character, so that the tokens of the prompt continue those that the model wrote.

    Args:
        parser: the parser of the model's family.
        end_of_turn: the texts of the tokens that end a turn, in addition to those of the family.
    """

    def __init__(self, parser: ToolCallParser, end_of_turn: Sequence[str] = ()) -> None:
        self._parser = parser
        self._end_of_turn = tuple(token for token in (*end_of_turn, *parser.end_of_turn) if token)
        # A model may give calls of two messages the same identifiers. Then the texts are used in the order in which they were written.
        self._texts: dict[_MessageKey, list[str]] = {}

    @classmethod
    def for_tokenizer(cls, parser_name: str, tokenizer: Any) -> Self:
        """Return a translator for a model.

        Args:
            parser_name: the name of the model's family.
            tokenizer: the model's tokenizer; its `eos_token` ends a turn.

        Raises:
            UnknownParser: no family has the name.
        """
        end = getattr(tokenizer, "eos_token", None)
        return cls(get_parser(parser_name), (end,) if isinstance(end, str) else ())

    @property
    def end_of_turn(self) -> tuple[str, ...]:
        """The texts of the tokens that end a turn."""
        return self._end_of_turn

    def parse_model_output(
        self, raw_text: str, tool_choice: str | None = None, tools: ToolSchemas | None = None
    ) -> tuple[str, list[TranslatedCall] | None, str]:
        """Translate what a model wrote.

        Args:
            raw_text: the decoded tokens, with or without the one that ends the turn.
            tool_choice: `none` if the text is not to be parsed.
            tools: the schemas of the tools.

        Returns:
            The content, the calls or None, and the reason for the end: `tool_calls` or `stop`. A call that could not be parsed is a call of `MALFORMED_CALL`.
        """
        text = self._without_end_of_turn(raw_text)
        if tool_choice == "none" or not tools:
            return text, None, "stop"
        message = self._parser.parse(text, tools)
        if not message.calls:
            return text, None, "stop"
        calls = [TranslatedCall(call.call_id, _translate_call(call)) for call in message.calls]
        key = message.content, tuple((call.id, call.function.name, call.function.arguments) for call in calls)
        self._texts.setdefault(key, []).append(self._parser.render(message))
        return message.content, calls, "tool_calls"

    def convert_messages_for_template(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Translate messages into what a chat template can render.

        Args:
            messages: the conversation.

        Returns:
            The conversation, in which each assistant message with tool calls has its raw text as content. Other messages are unchanged.
            A message that this translator has not parsed is written as the family's chat template does.
        """
        seen: dict[_MessageKey, int] = {}
        converted: list[dict[str, Any]] = []
        for message in messages:
            if message.get("role") != "assistant" or not message.get("tool_calls"):
                converted.append(dict(message))
                continue
            key = _message_key(message)
            index = seen[key] = seen.get(key, -1) + 1
            texts = self._texts.get(key)
            text = texts[min(index, len(texts) - 1)] if texts else self._format(key)
            converted.append({"role": "assistant", "content": text})
        return converted

    def _format(self, key: _MessageKey) -> str:
        content, calls = key
        return self._parser.format_message(content, [ParsedCall(*call) for call in calls])

    def _without_end_of_turn(self, text: str) -> str:
        """Return the text without the token that ends the turn. The chat template writes that token itself."""
        return next((text.removesuffix(token) for token in self._end_of_turn if text.endswith(token)), text)


def _translate_call(call: ParsedCall) -> TranslatedFunction:
    if not call.problem:
        return TranslatedFunction(call.name, call.arguments)
    return TranslatedFunction(MALFORMED_CALL, encode_json({"problem": call.problem, "tool": call.name, "text": call.arguments}))


def _message_key(message: Mapping[str, Any]) -> _MessageKey:
    functions = [(str(call.get("id") or ""), call.get("function") or {}) for call in message["tool_calls"]]
    calls = tuple((call_id, str(function.get("name") or ""), _arguments_text(function.get("arguments"))) for call_id, function in functions)
    return str(message.get("content") or ""), calls


def _arguments_text(arguments: object) -> str:
    if arguments is None:
        return "{}"
    return arguments if isinstance(arguments, str) else encode_json(arguments)
