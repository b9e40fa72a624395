"""Every parser of tool calls with texts and calls at random: no text makes it raise, no character is lost, and what it formats it parses again."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from environments.tool_call_parsers import MALFORMED_CALL, PARSERS, ParsedCall, PieceKind, get_parser
from environments.tool_call_translator import ToolCallTranslator

#: Pieces of all formats, so that random texts come close to calls.
FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<longcat_tool_call>", "</longcat_tool_call>", "<function=terminal>", "</function>", "<parameter=command>", "</parameter>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<longcat_arg_key>", "</longcat_arg_key>", "<longcat_arg_value>", "</longcat_arg_value>",
    "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[", "]", ",", "<|python_tag|>", "<think>", "</think>", "<longcat_think>", "</longcat_think>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "```json\n", "\n```",
    "function", "terminal", "<function=", "<parameter=",
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    "functions.terminal:0", '{"name": "terminal", "arguments": {"command": "ls"}}', '{"name": "terminal", "parameters": {"command": "l', '{"command": "ls"}',
    '{"name":', '"}', "{", "}", ";", "\n", " ", "0", "<|im_end|>",
]  # fmt: skip
TEXTS = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=5)), max_size=25).map("".join)
STRINGS = st.one_of(
    st.text(max_size=20),
    st.sampled_from(['it\'s "quoted"', "line\nbreak\r\n\ttab", "<b>ünï</b> 🎉 中文", '{"a": "b"}', "\\n \\\\", " spaces ", "null", "5", "True", ""]),
)
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), STRINGS)
NESTED = st.lists(st.one_of(SCALARS, st.dictionaries(STRINGS, st.lists(SCALARS, max_size=2), max_size=2)), max_size=2)
ARGUMENTS = st.dictionaries(
    st.sampled_from(["command", "path", "n_1"]), st.one_of(STRINGS, SCALARS, NESTED, st.dictionaries(STRINGS, NESTED, max_size=2)), max_size=3
)
#: Calls of different tools, so that each has a schema of its own.
CALLS = st.dictionaries(st.sampled_from(["terminal", "read_file", "web_search"]), ARGUMENTS, min_size=1, max_size=3).map(lambda calls: list(calls.items()))
#: Formats that write strings without quotes: a string with one of their own tags is another call.
UNQUOTED = re.compile(r"</?(?:tool_call|function|parameter|arg_key|arg_value)\b")
FAMILIES = pytest.mark.parametrize("family", sorted(PARSERS))
QUICK = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def schemas_of_calls(calls: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Schemas that give every argument the type that it has in a call."""
    types = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", type(None): "null"}
    return [
        {
            "type": "function",
            "function": {"name": name, "parameters": {"type": "object", "properties": {key: {"type": types[type(value)]} for key, value in args.items()}}},
        }
        for name, args in calls
    ]


@FAMILIES
@QUICK
@given(text=TEXTS)
def test_every_text_is_parsed_and_rendered_character_by_character(family: str, text: str) -> None:
    parser = get_parser(family)

    message = parser.parse(text)

    assert parser.render(message) == text
    assert all(piece.text for piece in message.pieces)
    assert [piece.kind is PieceKind.CALL for piece in message.pieces] == [piece.call is not None for piece in message.pieces]
    for call in message.calls:
        assert call.call_id
        assert call.problem or (call.name and isinstance(call.arguments, str))
    if not message.calls:
        assert message.content == "".join(piece.text for piece in message.pieces if piece.kind is PieceKind.CONTENT)


@FAMILIES
@QUICK
@given(calls=CALLS, content=STRINGS)
def test_calls_that_were_formatted_are_parsed_to_the_same_calls(family: str, calls: list[tuple[str, dict[str, Any]]], content: str) -> None:
    assume(not UNQUOTED.search(json.dumps(calls) + content) and "{" not in content and "]" not in content)
    parser = get_parser(family)
    written = [ParsedCall(f"id{index}aaaaaa", name, json.dumps(args, ensure_ascii=False)) for index, (name, args) in enumerate(calls)]

    message = parser.parse(parser.format_message(content, written), schemas_of_calls(calls))

    assert [(call.name, call.problem) for call in message.calls] == [(name, "") for name, _ in calls]
    assert [json.loads(call.arguments) for call in message.calls] == [args for _, args in calls]
    assert message.content == content.strip()


@FAMILIES
@QUICK
@given(texts=st.lists(TEXTS, min_size=1, max_size=4))
def test_the_translator_writes_every_message_of_a_conversation_again_as_the_model_wrote_it(family: str, texts: list[str]) -> None:
    tools = [{"type": "function", "function": {"name": "terminal", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}}}]
    translator = ToolCallTranslator(get_parser(family), ["<|im_end|>"])
    conversation: list[dict[str, Any]] = [{"role": "user", "content": "Go."}]

    for text in texts:
        content, calls, _ = translator.parse_model_output(text + "<|im_end|>", "auto", tools)
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": call.function.arguments}} for call in calls
            ]
            assert all(call.function.name != MALFORMED_CALL or json.loads(call.function.arguments)["problem"] for call in calls)
        conversation.append(message)

    assert [message["content"] for message in translator.convert_messages_for_template(conversation)] == ["Go.", *texts]
