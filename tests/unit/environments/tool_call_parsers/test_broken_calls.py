"""Calls that cannot be parsed: they are reported with a sentence, keep their text, and do not disturb the calls beside them."""

from __future__ import annotations

import time

import pytest

from environments.tool_call_parsers import PARSERS, get_parser

GOOD = {
    "hermes": '<tool_call>{"name": "date", "arguments": {}}</tool_call>',
    "longcat": '<longcat_tool_call>{"name": "date", "arguments": {}}</longcat_tool_call>',
    "mistral": "[TOOL_CALLS]date{}",
    "llama3_json": '{"name": "date", "parameters": {}}',
    "deepseek_v3": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>date\n```json\n{}\n```<｜tool▁call▁end｜>",
    "deepseek_v3_1": "<｜tool▁call▁begin｜>date<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
    "kimi_k2": "<|tool_call_begin|>functions.date:9<|tool_call_argument_begin|>{}<|tool_call_end|>",
    "glm45": "<tool_call>date\n</tool_call>",
    "glm47": "<tool_call>date</tool_call>",
    "qwen3_coder": "<tool_call>\n<function=date>\n</function>\n</tool_call>",
}


@pytest.mark.parametrize(
    ("family", "text", "name", "problem"),
    [
        ("hermes", '<tool_call>{"name": "terminal", "arguments": {"command": "ls}}</tool_call>', "terminal", "The tool call is not valid JSON: "),
        (
            "hermes",
            '<tool_call>{"name": "terminal", "arguments": {"command": "a\nb"}}</tool_call>',
            "terminal",
            "The tool call is not valid JSON: Invalid control character at",
        ),
        (
            "hermes",
            '<tool_call>{"name": "terminal", "arguments": {}}}</tool_call>',
            "terminal",
            "Text follows the JSON object of the tool call, instead of </tool_call>.",
        ),
        ("hermes", "<tool_call>ls -la</tool_call>", "", "The tool call is not valid JSON: Expecting value at character 0."),
        ("hermes", '<tool_call>["ls"]</tool_call>', "", 'A tool call is a JSON object with "name" and "arguments".'),
        ("hermes", '<tool_call>{"tool": "terminal"}</tool_call>', "", 'The tool call has no "name".'),
        ("hermes", '<tool_call>{"name": "t", "arguments": {"a": NaN}}</tool_call>', "t", "The tool call is not valid JSON: NaN is not a JSON value."),
        (
            "hermes",
            '<tool_call>{"name": "t", "arguments": {"a": 1e999}}</tool_call>',
            "t",
            "The tool call is not valid JSON: the number 1e999 is out of range.",
        ),
        ("longcat", "<longcat_tool_call>{'name': 'terminal'}</longcat_tool_call>", "", "The tool call is not valid JSON: Expecting property name"),
        (
            "longcat",
            "<longcat_tool_call>terminal\n<longcat_arg_key>command</longcat_arg_key>\n<longcat_arg_value>ls\n</longcat_tool_call>",
            "terminal",
            "The argument command does not end with </longcat_arg_value>.",
        ),
        ("mistral", '[TOOL_CALLS] [{"name": "terminal", "arguments": {"command": "ls}]', "terminal", "The tool call is not valid JSON: "),
        ("mistral", '[TOOL_CALLS]terminal{"command": ls}', "terminal", "The arguments of the tool call are not valid JSON: Expecting value at character 12."),
        ("mistral", "[TOOL_CALLS]terminal", "", "No name and JSON object follow [TOOL_CALLS]."),
        ("llama3_json", '{"name": "terminal", "parameters": {"command": "ls}', "terminal", "The tool call is not valid JSON: "),
        ("llama3_json", '<|python_tag|>terminal.call(command="ls")', "", "The tool call is not valid JSON: Expecting value at character 0."),
        ("llama3_json", '<|python_tag|>{"name": "terminal"}', "terminal", 'The tool call has no "parameters".'),
        (
            "deepseek_v3",
            '<｜tool▁call▁begin｜>function<｜tool▁sep｜>terminal\n```json\n{"command": "ls"\n```<｜tool▁call▁end｜>',
            "terminal",
            "The arguments of the tool call are not valid JSON: Expecting ',' delimiter",
        ),
        ("deepseek_v3", '<｜tool▁call▁begin｜>terminal\n{"command": "ls"}<｜tool▁call▁end｜>', "", "The tool call has no <｜tool▁sep｜>."),
        (
            "deepseek_v3",
            '<｜tool▁call▁begin｜>function<｜tool▁sep｜>{"command": "ls"}<｜tool▁call▁end｜>',
            "",
            "After <｜tool▁sep｜>, the tool call has no name",
        ),
        ("deepseek_v3_1", "<｜tool▁call▁begin｜><｜tool▁sep｜>{}<｜tool▁call▁end｜>", "", "The tool call has no name."),
        (
            "deepseek_v3_1",
            "<｜tool▁call▁begin｜>terminal<｜tool▁sep｜>{} or so<｜tool▁call▁end｜>",
            "terminal",
            "After its arguments, the tool call does not end with",
        ),
        (
            "kimi_k2",
            "<|tool_call_begin|>two words<|tool_call_argument_begin|>{}<|tool_call_end|>",
            "",
            "'two words' is not an identifier such as functions.NAME:0.",
        ),
        (
            "kimi_k2",
            '<|tool_call_begin|>functions.terminal:0<|tool_call_argument_begin|>{"a<|tool_call_end|>',
            "terminal",
            "The arguments of the tool call are not valid",
        ),
        (
            "glm45",
            "<tool_call>terminal\n<arg_key>command</arg_key>\n<arg_value>ls\n</tool_call>",
            "terminal",
            "The argument command does not end with </arg_value>.",
        ),
        (
            "glm45",
            "<tool_call>terminal\n<arg_key>command\n<arg_value>ls</arg_value>\n</tool_call>",
            "terminal",
            "After its arguments, the tool call does not end with",
        ),
        ("glm47", "<tool_call></tool_call>", "", "The tool call has no name."),
        ("qwen3_coder", "<tool_call>\nls\n</tool_call>", "", "The tool call does not start with <function=NAME>."),
        (
            "qwen3_coder",
            "<tool_call>\n<function=terminal>\n<parameter=command>\nls\n</function>\n</tool_call>",
            "terminal",
            "The parameter command does not end with",
        ),
        (
            "qwen3_coder",
            "<tool_call>\n<function=terminal>\nls\n</function>\n</tool_call>",
            "terminal",
            "After its parameters, the function does not end with </function>.",
        ),
    ],
)
def test_a_broken_call_is_reported_between_good_ones(family: str, text: str, name: str, problem: str) -> None:
    good = GOOD[family]
    separator = "; " if family == "llama3_json" else "\n"

    message = get_parser(family).parse(separator.join(["Look:", good, text, good]))

    assert [call.name for call in message.calls if not call.problem] == ["date", "date"]
    (broken,) = [call for call in message.calls if call.problem]
    assert broken.problem.startswith(problem)
    assert broken.name == name
    assert broken.arguments.strip("; \n") == text.removeprefix("[TOOL_CALLS] [")
    assert message.text == separator.join(["Look:", good, text, good])


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", '<tool_call>{"name": "terminal", "arguments": {"command": "l'),
        ("mistral", '[TOOL_CALLS] [{"name": "terminal", "arguments": {"comm'),
        ("llama3_json", '{"name": "terminal", "parameters": {"comm'),
        ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>term"),
        ("deepseek_v3_1", "Let me look that up.<｜tool▁calls▁begin｜>get_weather"),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.term"),
        ("glm45", "<tool_call>terminal\n<arg_key>command</arg_key>\n<arg_value>ls -la</arg_value>"),
        ("qwen3_coder", "<tool_call>\n<function=terminal>\n<parameter=command>\nls -la\n</parameter>"),
    ],
)
def test_a_call_that_the_limit_of_tokens_cut_off_is_reported_and_not_executed(family: str, text: str) -> None:
    (call,) = get_parser(family).parse(text).calls

    assert call.problem


@pytest.mark.parametrize("family", sorted(PARSERS))
@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"name": ' * 3_000, "{" * 20_000, "<tool_call>" * 5_000, "[TOOL_CALLS]" * 5_000, "<tool_call><arg_key>" * 3_000, "</think>" * 5_000,
     "<｜tool▁call▁begin｜>" * 5_000, "<|tool_call_begin|>" * 5_000, "<function=a>" * 5_000, "<function=a><parameter=b></parameter>" * 2_000,
     "<tool_call>a<arg_key>b</arg_key><arg_value></arg_value>" * 1_000, '<tool_call>{"name": "a", "arguments": ' + "[" * 100_000, "9" * 5_000],
    ids=lambda text: text[:40],
)  # fmt: skip
def test_long_and_deeply_nested_text_is_parsed_quickly(family: str, text: str) -> None:
    began = time.process_time()

    message = get_parser(family).parse(text)

    assert message.text == text
    assert time.process_time() - began < 2.0


@pytest.mark.timeout(10)  # a parser that makes no progress would go on for ever
@pytest.mark.parametrize("text", ["<function=</tool_call>", "a <function= <x</tool_call> b", "<function=\n<function=</tool_call><tool_call>"])
@pytest.mark.parametrize("family", sorted(PARSERS))
def test_a_tag_that_is_not_complete_does_not_keep_a_parser_from_its_end(family: str, text: str) -> None:
    message = get_parser(family).parse(text)

    assert message.text == text
    assert all(piece.text for piece in message.pieces)
