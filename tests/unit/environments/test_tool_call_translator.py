"""The translator between a model's text and OpenAI-style messages."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from environments.tool_call_parsers import get_parser
from environments.tool_call_translator import ToolCallTranslator
from tests.unit.environments.scripted_model import TOOLS, call

CALL = '<tool_call>\n{"name":"terminal",  "arguments": {"command": "ls"}}\n</tool_call>'


def assistant(content: str | None, calls: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": [call(one.function.name, one.function.arguments, one.id) for one in calls]}


def raw_contents(translator: ToolCallTranslator, *messages: dict[str, Any]) -> list[Any]:
    return [message["content"] for message in translator.convert_messages_for_template(messages)]


def test_the_token_that_ends_the_turn_is_no_content() -> None:
    translator = ToolCallTranslator.for_tokenizer("hermes", SimpleNamespace(eos_token="<eos>"))

    assert translator.parse_model_output("Done.<|im_end|>", "auto", TOOLS) == ("Done.", None, "stop")
    assert translator.parse_model_output("Done.<eos>", None, TOOLS) == ("Done.", None, "stop")
    assert translator.parse_model_output("Done. <eos>!", None, TOOLS) == ("Done. <eos>!", None, "stop")
    assert ToolCallTranslator.for_tokenizer("hermes", SimpleNamespace(eos_token=None)).parse_model_output("Done.", None, TOOLS)[0] == "Done."


def test_without_tools_nothing_is_parsed() -> None:
    translator = ToolCallTranslator(get_parser("hermes"))

    assert translator.parse_model_output(CALL + "<|im_end|>", "none", TOOLS) == (CALL, None, "stop")
    assert translator.parse_model_output(CALL, "auto", None) == (CALL, None, "stop")


def test_calls_are_translated_and_written_again_character_by_character() -> None:
    translator = ToolCallTranslator(get_parser("hermes"))

    content, calls, finish = translator.parse_model_output(f"\n\nHm.\n{CALL}\n<|im_end|>", "auto", TOOLS)

    assert calls is not None
    assert (content, finish, [(one.function.name, one.function.arguments) for one in calls]) == ("Hm.", "tool_calls", [("terminal", '{"command": "ls"}')])
    reply = {"role": "tool", "tool_call_id": calls[0].id, "content": "{}"}
    assert raw_contents(translator, {"role": "user", "content": "u"}, assistant(content, calls), reply) == ["u", f"\n\nHm.\n{CALL}\n", "{}"]


def test_messages_with_the_same_identifiers_keep_their_own_texts() -> None:
    translator = ToolCallTranslator(get_parser("kimi_k2"))
    texts = [
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.terminal:0{space}<|tool_call_argument_begin|>"
        '{"command": "ls"}<|tool_call_end|><|tool_calls_section_end|>'
        for space in ("", " ")
    ]

    messages = [assistant(content, calls) for content, calls, _ in (translator.parse_model_output(text, "auto", TOOLS) for text in texts)]

    assert messages[0] == messages[1]
    assert raw_contents(translator, *messages) == texts


def test_a_message_of_another_conversation_is_written_as_the_chat_template_does() -> None:
    translator = ToolCallTranslator(get_parser("hermes"))
    message = {"role": "assistant", "content": "Hm.", "tool_calls": [call("terminal", {"command": "ls"})]}
    decoded = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "date", "arguments": None}}]}

    assert raw_contents(translator, message, decoded) == [
        'Hm.\n<tool_call>\n{"name": "terminal", "arguments": {"command": "ls"}}\n</tool_call>',
        '<tool_call>\n{"name": "date", "arguments": {}}\n</tool_call>',
    ]


def test_a_call_that_could_not_be_parsed_is_translated_with_its_problem_and_its_text() -> None:
    translator = ToolCallTranslator(get_parser("hermes"))
    text = f'{CALL}\n<tool_call>\n{{"name": "terminal", "arguments": {{"command": "ls}}}}\n</tool_call>'

    content, calls, finish = translator.parse_model_output(text, "auto", TOOLS)

    assert calls is not None
    assert (content, finish, [one.function.name for one in calls]) == ("", "tool_calls", ["terminal", "malformed_tool_call"])
    reported = json.loads(calls[1].function.arguments)
    assert reported == {
        "problem": "The tool call is not valid JSON: Invalid control character at character 51.",
        "tool": "terminal",
        "text": text.removeprefix(CALL + "\n"),
    }
    assert raw_contents(translator, assistant(content, calls)) == [text]


def test_messages_without_tool_calls_are_unchanged() -> None:
    messages = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a", "tool_calls": []},
        {"role": "tool", "tool_call_id": "1", "content": "{}"},
    ]

    assert ToolCallTranslator(get_parser("hermes")).convert_messages_for_template(messages) == messages
